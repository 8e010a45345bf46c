"""Reads datasets without the code under test."""

import json

import numpy as np

from trainkit.data.dataset_file import SPLITS, read_dataset_file

CODES = {"uint16": "<u2", "uint32": "<u4"}


def rows(*texts, key="text"):
    """Return the content of a .jsonl file."""
    return "".join(json.dumps({key: text}, ensure_ascii=False) + "\n" for text in texts)


def tokens_of(folder):
    """Return all tokens of each split, read without the code under test."""
    file = read_dataset_file(folder)
    tokens = {split: [] for split in SPLITS}
    for split in SPLITS:
        for shard in file.splits[split]:
            tokens[split] += np.fromfile(folder / shard.file, CODES[file.dtype]).tolist()
    return tokens


def documents_of(folder):
    """Return the documents of each split as bytes. The dataset was made with the byte tokenizer."""
    documents = {}
    for split, tokens in tokens_of(folder).items():
        found, current = [], bytearray()
        for token in tokens:
            if token == 256:
                found.append(bytes(current))
                current = bytearray()
            else:
                current.append(token)
        assert not current, f"the last document of {split} has no end"
        documents[split] = found
    return documents


def content_of(folder):
    """Return the bytes of every file of a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
