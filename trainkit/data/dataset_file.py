"""`dataset.json`, the description of a folder of token shards.

::

    DIR/dataset.json      this file, written last: a folder without it is not a dataset
    DIR/inputs.json       the source files with the hashes of their content
    DIR/train-00000.bin   tokens, little endian, without a header; the shards of a split in order
    DIR/train-00000.places  where in the source files the texts of a shard begin; missing in older datasets
    DIR/val-00000.bin
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainkit.errors import UsageError
from trainkit.run import files

DATASET_FILE = "dataset.json"
FORMAT = "trainkit-token-shards"
FORMAT_VERSION = 1
LAYOUT_VERSION = 1
"""Part of every fingerprint: increment it when the same text would yield different tokens."""
TRAIN = "train"
VAL = "val"
SPLITS = (TRAIN, VAL)
TOKEN_BYTES = {"uint16": 2, "uint32": 4}
"""Bytes per token, by dtype."""

PLACES = [("token", "<i8"), ("place", "<i8"), ("input", "<i4"), ("form", "u1")]
"""The fields of each text in a shard: its first token, `units.Piece.place`, its index in inputs.json, and its
index in `sources.FORMS`. A text is a row, or up to 64 KiB of a text file.
"""


def places_file(shard: Path) -> Path:
    """The file with the places of the texts in a shard."""
    return shard.with_suffix(".places")


@dataclass(frozen=True)
class TokenizerIdentity:
    """The tokenizer that produced the tokens."""

    kind: str
    """``bytes`` or ``tokenizer.json``."""
    name: str
    sha256: str
    vocab_size: int
    """The largest id plus one: the number of rows an embedding needs."""
    eos_id: int
    eos_token: str


@dataclass(frozen=True)
class Shard:
    """One file of tokens."""

    file: str
    num_tokens: int
    sha256: str


Options = dict[str, float | str | None]


@dataclass(frozen=True)
class DatasetFile:
    """The content of `dataset.json`."""

    tokenizer: TokenizerIdentity
    dtype: str
    fingerprint: str
    """A hash of the tokenizer, the options and the text."""
    options: Options
    """What determines the tokens, besides the tokenizer and the text."""
    splits: dict[str, tuple[Shard, ...]]

    def num_tokens(self, split: str) -> int:
        return sum(shard.num_tokens for shard in self.splits.get(split, ()))

    def num_shards(self) -> int:
        return sum(len(shards) for shards in self.splits.values())

    def write(self, folder: Path, staging: Path) -> None:
        """Publish the folder as a dataset: write the file in `staging`, then rename it into place."""
        record = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        write_shared_json(folder / DATASET_FILE, record, staging)


def write_shared_json(path: Path, value: Any, staging: Path) -> None:
    """Write JSON in `staging`, then rename it; the mode follows the umask, since teams share datasets."""
    staged = staging / path.name
    with staged.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    staged.replace(path)


def is_dataset(folder: Path) -> bool:
    """Whether a folder is a dataset that `data prepare` finished."""
    return (folder / DATASET_FILE).is_file()


def read_dataset_file(folder: Path) -> DatasetFile:
    """Read `dataset.json`; raises UsageError if the folder is not a dataset that this version can read."""
    path = folder / DATASET_FILE
    try:
        record = files.read_json(path)
    except FileNotFoundError:
        raise UsageError(
            f"{folder} is not a prepared dataset: it has no {DATASET_FILE}",
            hint=f"run `trainkit data prepare SRC --out {folder}`; it also resumes an interrupted run",
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}", hint="prepare the dataset again") from None
    version = record.get("format_version") if isinstance(record, dict) else None
    if not isinstance(version, int) or record.get("format") != FORMAT:
        raise UsageError(
            f"{path} was not written by trainkit",
            hint="set data.source to a folder written by `trainkit data prepare`",
        )
    if version > FORMAT_VERSION:
        raise UsageError(
            f"{path} has format version {version}; this trainkit reads up to {FORMAT_VERSION}",
            hint="install a newer trainkit, or prepare the dataset again with this one",
        )
    try:
        return _parse(record)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is damaged: {error!r}", hint="prepare the dataset again") from None


def check_shard_sizes(folder: Path, file: DatasetFile, split: str) -> None:
    """Raise UsageError if a shard of a split is missing or its size has changed."""
    for shard in file.splits.get(split, ()):
        check_shard_size(folder / shard.file, shard.num_tokens * TOKEN_BYTES[file.dtype])


def check_shard_size(path: Path, expected: int) -> None:
    """Raise UsageError if a shard is missing or does not have the expected number of bytes."""
    hint = "copy the dataset again, or prepare it again into another folder"
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UsageError(f"shard {path} cannot be opened: {error.strerror}", hint=hint) from None
    if size != expected:
        raise UsageError(f"shard {path} has {size:,} bytes, expected {expected:,}", hint=hint)


def _parse(record: Any) -> DatasetFile:
    dtype = record["dtype"]
    if dtype not in TOKEN_BYTES:
        raise ValueError(f"dtype {json.dumps(dtype)} is neither uint16 nor uint32")
    return DatasetFile(
        tokenizer=TokenizerIdentity(**record["tokenizer"]),
        dtype=dtype,
        fingerprint=str(record["fingerprint"]),
        options=dict(record["options"]),
        splits={split: tuple(Shard(**entry) for entry in record["splits"][split]) for split in SPLITS},
    )
