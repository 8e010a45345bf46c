"""Define the file formats of a prepared dataset, and identify the tokenizer that produced its tokens.

A `tokenizer.json` is read as plain JSON, without the tokenizers library. A prepared dataset consists of these
files:

::

    DIR/dataset.json      this file, written last: a folder without it is not a dataset
    DIR/inputs.json       the source files with the hashes of their content
    DIR/train-00000.bin   tokens, little endian, without a header; the shards of a split in order
    DIR/train-00000.places  the places in the source files where the texts of a shard begin; optional
    DIR/val-00000.bin
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from shlex import quote
from typing import Any

from trainkit.errors import UsageError
from trainkit.folders import shown_path
from trainkit.formats import JsonObject
from trainkit.run import files

DATASET_FILE = "dataset.json"
FORMAT = "trainkit-token-shards"
FORMAT_VERSION = 1
LAYOUT_VERSION = 1
"""Part of every fingerprint; increment it when a change makes the same text produce different tokens."""
TRAIN = "train"
VAL = "val"
SPLITS = (TRAIN, VAL)
TOKEN_BYTES = {"uint16": 2, "uint32": 4}
"""Bytes per token for each dtype."""

PLACES = [("token", "<i8"), ("place", "<i8"), ("input", "<i4"), ("form", "u1")]
"""NumPy dtype of the records in a places file, which has one record per text in the shard.

Each record contains the index of the text's first token, `units.Piece.place`, the index of the source file in
inputs.json, and the index of the file's format in `inputs.FORMS`. A text is a row of a data file, or up to 64
KiB of a plain text file.
"""


def places_file(shard: Path) -> Path:
    """Return the path of a shard's places file, which maps tokens to places in the source files."""
    return shard.with_suffix(".places")


@dataclass(frozen=True)
class TokenizerIdentity:
    """The tokenizer that produced a dataset's tokens."""

    kind: str
    """Either ``bytes`` or ``tokenizer.json``."""
    name: str
    sha256: str
    vocab_size: int
    """The largest token id plus one, which is the number of rows that an embedding needs."""
    eos_id: int
    eos_token: str


@dataclass(frozen=True)
class Shard:
    """One file of tokens in a prepared dataset."""

    file: str
    num_tokens: int
    sha256: str


Options = dict[str, float | str | None]


@dataclass(frozen=True)
class DatasetFile:
    """The contents of `dataset.json`."""

    tokenizer: TokenizerIdentity
    dtype: str
    fingerprint: str
    """Hash of the tokenizer, the options and the text that produced the dataset."""
    options: Options
    """The options that affect the tokens, excluding the tokenizer and the text."""
    splits: dict[str, tuple[Shard, ...]]

    def num_tokens(self, split: str) -> int:
        return sum(shard.num_tokens for shard in self.splits.get(split, ()))

    def write(self, folder: Path, staging: Path) -> None:
        """Complete the dataset: write `dataset.json` in `staging`, then rename it into `folder`."""
        record = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        write_shared_json(folder / DATASET_FILE, record, staging)


def write_shared_json(path: Path, value: object, staging: Path) -> None:
    """Write JSON in `staging`, then rename it; permissions follow the umask, because teams share datasets."""
    staged = staging / path.name
    with staged.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    staged.replace(path)


def is_dataset(folder: Path) -> bool:
    """Return whether a folder is a prepared dataset completed by `data prepare`."""
    return (folder / DATASET_FILE).is_file()


def read_dataset_file(folder: Path) -> DatasetFile:
    """Read `dataset.json`; raise UsageError if the folder is not a dataset that this version supports."""
    path = folder / DATASET_FILE
    try:
        record = files.read_json(path)
    except FileNotFoundError:
        shown = shown_path(folder)
        raise UsageError(
            f"{shown} is not a prepared dataset: it has no {DATASET_FILE}",
            hint=f"run `trainkit data prepare SRC --out {quote(shown)}`; the command also resumes an "
            "interrupted preparation",
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
            f"{path} has format version {version}, but this trainkit version supports at most version "
            f"{FORMAT_VERSION}",
            hint="install a newer trainkit version, or prepare the dataset again with this trainkit version",
        )
    try:
        return _parse(record)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is damaged: {error!r}", hint="prepare the dataset again") from None


def checked_dataset(folder: Path) -> DatasetFile:
    """Read `dataset.json` as in `read_dataset_file`, and also check the sizes of all shards."""
    file = read_dataset_file(folder)
    for split in SPLITS:
        check_shard_sizes(folder, file, split)
    return file


def check_shard_sizes(folder: Path, file: DatasetFile, split: str) -> None:
    """Raise UsageError if a shard of a split is missing or does not have its recorded size."""
    for shard in file.splits.get(split, ()):
        check_shard_size(folder / shard.file, shard.num_tokens * TOKEN_BYTES[file.dtype])


def check_shard_size(path: Path, expected: int) -> None:
    """Raise UsageError if a shard is missing or does not have the expected size in bytes."""
    hint = "copy the dataset again, or prepare it in another folder"
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UsageError(f"shard {path} cannot be opened: {error.strerror}", hint=hint) from None
    if size != expected:
        raise UsageError(f"shard {path} has {size:,} bytes instead of {expected:,}", hint=hint)


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


BYTES = "bytes"
BYTES_IDENTITY = TokenizerIdentity(
    kind=BYTES,
    name=BYTES,
    sha256=hashlib.sha256(b"ids 0..255 are bytes, 256 ends a document").hexdigest(),
    vocab_size=257,
    eos_id=256,
    eos_token="<eos>",
)
EOS_NAMES = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[SEP]", "<|im_end|>")
"""Names of end-of-document tokens, tried in this order if tokenizer_config.json does not define one."""


def identify(tokenizer: str) -> TokenizerIdentity:
    """Return the identity of the `bytes` tokenizer, or of a tokenizer.json file given by its path.

    Raises UsageError if the file is missing, is not a tokenizer.json, or has no end-of-document token.
    """
    if tokenizer == BYTES:
        return BYTES_IDENTITY
    sha256, ids = _read(tokenizer)
    eos, name = _eos_token(Path(tokenizer), ids), Path(tokenizer).name
    return TokenizerIdentity("tokenizer.json", name, sha256, max(ids.values()) + 1, ids[eos], eos)


def check_made_by(wanted: str, identity: TokenizerIdentity, folder: Path, used: TokenizerIdentity) -> None:
    """Raise UsageError if a prepared dataset was made with a tokenizer other than `data.tokenizer`.

    `bytes` is the default of `data.tokenizer`, so it is accepted for datasets with any tokenizer.
    """
    if wanted != BYTES and identity.sha256 != used.sha256:
        raise UsageError(
            f"data.tokenizer {wanted} is not the tokenizer of the dataset {shown_path(folder)}, which was "
            f"prepared with {used.name}",
            hint="remove data.tokenizer, or prepare the texts again with the tokenizer in data.tokenizer",
        )


def refuse_several(used: Sequence[tuple[str, TokenizerIdentity]]) -> None:
    """Raise UsageError if a mixture's sources use different tokenizers; `used` pairs names and tokenizers."""
    (first, expected), *others = used
    for name, tokenizer in others:
        if tokenizer.sha256 != expected.sha256:
            raise UsageError(
                f"all sources of a mixture must use the same tokenizer: {first} uses {expected.name}, "
                f"{name} uses {tokenizer.name}",
                hint="set data.tokenizer to the tokenizer of the prepared datasets, or prepare all datasets "
                "with the same tokenizer",
            )


@lru_cache(maxsize=4)
def _read(tokenizer: str) -> tuple[str, dict[str, int]]:
    """Return the SHA-256 of a tokenizer.json file, and the ids of its tokens."""
    path, shown = Path(tokenizer), shown_path(tokenizer)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(
            f"tokenizer {shown} does not exist",
            hint="use `bytes`, or the path of a tokenizer.json",
        ) from None
    except OSError as error:
        hint = "use the path of the tokenizer.json in this folder" if path.is_dir() else "check the path"
        raise UsageError(f"tokenizer {shown} cannot be read: {error.strerror}", hint=hint) from None
    try:
        record = json.loads(content)
        ids = _token_ids(record)
    except (ValueError, KeyError, TypeError, AttributeError):
        ids = {}
    if not ids:
        raise UsageError(
            f"tokenizer {shown} is not a Hugging Face tokenizer.json",
            hint="save a tokenizer.json with `tokenizer.backend_tokenizer.save(PATH)`, or use `bytes`",
        )
    return hashlib.sha256(content).hexdigest(), ids


def _token_ids(record: JsonObject) -> dict[str, int]:
    vocab = record["model"]["vocab"]
    if isinstance(vocab, list):
        ids = {token: number for number, (token, _score) in enumerate(vocab)}
    else:
        ids = {token: int(number) for token, number in vocab.items()}
    for added in record.get("added_tokens") or ():
        ids[added["content"]] = int(added["id"])
    return ids


def _eos_token(path: Path, ids: dict[str, int]) -> str:
    named = _configured_eos(path.with_name("tokenizer_config.json"))
    if named is not None:
        if named in ids:
            return named
        raise UsageError(
            f"tokenizer {shown_path(path)} has no token {named!r}, "
            "which is the eos_token in tokenizer_config.json",
            hint="both files must come from the same model",
        )
    for token in EOS_NAMES:
        if token in ids:
            return token
    raise UsageError(
        f"tokenizer {shown_path(path)} has no known end-of-document token: none of {' '.join(EOS_NAMES)}",
        hint='add a tokenizer_config.json to its folder, with {"eos_token": "…"}, a token of the vocabulary',
    )


def _configured_eos(path: Path) -> str | None:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}", hint="copy the file again, or remove it"
        ) from None
    eos = config.get("eos_token") if isinstance(config, dict) else None
    if isinstance(eos, dict):
        eos = eos.get("content")
    return eos if isinstance(eos, str) else None
