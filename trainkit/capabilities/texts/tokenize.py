"""Tokenizes one unit of text into shards, in a worker process of `prepare`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from trainkit.capabilities.texts.inputs import FORMS, Input, unreadable
from trainkit.capabilities.texts.units import Unit
from trainkit.data.dataset_file import BYTES, PLACES, SPLITS, Shard, identify, places_file
from trainkit.errors import UsageError
from trainkit.folders import shown_path
from trainkit.run import files

T = TypeVar("T")
Tokens = npt.NDArray[Any]
"""Token ids in the format of the shards: uint16 or uint32, little endian."""


def token_dtype(vocab_size: int) -> str:
    """Return the smallest unsigned integer dtype that can represent all token ids."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class Tokenizer:
    """The tokenizer set by `data.tokenizer`: `bytes`, or one loaded from a tokenizer.json file."""

    def __init__(self, name: str) -> None:
        self.identity = identify(name)
        self._library = None if name == BYTES else _load(name)
        self._dtype = np.dtype(token_dtype(self.identity.vocab_size)).newbyteorder("<")

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Return each text's token ids without special tokens; may raise UnicodeDecodeError."""
        if self._library is None:
            return [np.frombuffer(text, dtype=np.uint8).astype(self._dtype) for text in texts]
        encodings = self._library.encode_batch_fast(
            [text.decode() for text in texts], add_special_tokens=False
        )
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text for token ids, without special tokens; invalid UTF-8 bytes become U+FFFD."""
        if self._library is None:
            return bytes(token for token in ids if token < 256).decode(errors="replace")
        return str(self._library.decode(list(ids)))


def _load(path: str) -> Any:
    import tokenizers  # importing tokenizers takes 60 ms, and the byte tokenizer does not need it

    try:
        library = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # tokenizers raises plain Exception objects
        raise UsageError(
            f"tokenizer {shown_path(path)} cannot be loaded by tokenizers {tokenizers.__version__}: {error}",
            hint="install a newer version of the package tokenizers, or save the tokenizer again",
        ) from None
    library.no_truncation()
    library.no_padding()
    return library


WORK_FOLDER = ".work"
"""Subfolder of the output folder that exists only during preparation."""
_BATCH_BYTES = 4 << 20
"""Bytes of text per call to the tokenizer, chosen to keep several threads busy."""


def record_file(folder: Path, unit: Unit) -> Path:
    """Return the path of the record that is written after a unit's shards are complete."""
    return folder / WORK_FOLDER / f"unit-{unit.index:05d}.json"


def run_unit(folder: Path, unit: Unit) -> None:
    """Tokenize a unit, rename its shards to their final names, and then write its record.

    Raises UsageError if a text is unusable or a source has changed, and OSError if the shards cannot be
    written.
    """
    writers = {split: _ShardWriter(folder, f"{split}-{unit.index:05d}.bin") for split in SPLITS}
    try:
        digests = _tokenize(unit, writers)
        shards = {split: asdict(shard) for split in SPLITS if (shard := writers[split].publish())}
        files.write_json(record_file(folder, unit), {"digests": digests, "shards": shards})
    finally:
        for writer in writers.values():
            writer.discard()


def digest_unit(unit: Unit) -> list[str]:
    """Return a digest of the current content for each span in a unit."""
    digests = []
    for reader in unit.readers():
        for _ in reader:
            pass
        digests.append(reader.digest)
    return digests


def _tokenize(unit: Unit, writers: dict[str, _ShardWriter]) -> list[str]:
    tokenizer = _tokenizer(unit.spec.tokenizer)
    eos = tokenizer.identity.eos_id
    digests = []
    for reader in unit.readers():
        source = reader.span.source
        _check_unchanged(source)
        try:
            for batch in in_batches(reader, lambda piece: len(piece.text)):
                for piece, tokens in zip(
                    batch, tokenizer.encode([piece.text for piece in batch]), strict=True
                ):
                    writer = writers[piece.split]
                    writer.add_place(piece.place, reader.span.input, FORMS.index(source.form))
                    writer.append(tokens, eos if piece.ends_document else None)
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{source.shown} is not UTF-8: byte {error.object[error.start]:#04x}",
                hint=f"`trainkit data validate {quote(source.shown)}` lists all such lines; "
                "the tokenizer `bytes` accepts any bytes",
            ) from None
        _check_unchanged(source)
        digests.append(reader.digest)
    return digests


def in_batches(items: Iterable[T], num_bytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Group items into batches of about `_BATCH_BYTES`, the amount of text for one call to the tokenizer."""
    batch: list[T] = []
    size = 0
    for item in items:
        batch.append(item)
        size += num_bytes(item)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _check_unchanged(source: Input) -> None:
    try:
        status = Path(source.path).stat()
    except OSError as error:
        raise unreadable(source.path, error) from None
    if (status.st_size, status.st_mtime_ns) != (source.size, source.mtime_ns):
        raise UsageError(
            f"{source.shown} changed while it was being prepared",
            hint="wait until the file is complete, then prepare the data in a new folder",
        )


@lru_cache(maxsize=1)
def _tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer, cached for later units of this worker, because loading it can take a second."""
    return Tokenizer(name)


class _ShardWriter:
    """Appends tokens to a shard file, and renames the file to its final name when it is complete."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.path = folder / name
        self.partial = folder / WORK_FOLDER / f"{name}.{os.getpid()}"
        self.num_tokens = 0
        self._places: list[tuple[int, int, int, int]] = []
        self._hash = hashlib.sha256()
        self._stream = self.partial.open("wb")

    def add_place(self, place: int, number: int, form: int) -> None:
        """Record that the next appended tokens begin at position `place` in input number `number`."""
        self._places.append((self.num_tokens, place, number, form))

    def append(self, tokens: Tokens, eos: int | None) -> None:
        self._write(tokens.tobytes())
        self.num_tokens += len(tokens)
        if eos is not None:
            self._write(eos.to_bytes(tokens.itemsize, "little"))
            self.num_tokens += 1

    def publish(self) -> Shard | None:
        """Rename the file to its final name and return its shard, or return None if the file is empty."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        if not self.num_tokens:
            return None
        places = self.partial.with_name(f"{self.partial.name}.places")
        np.array(self._places, dtype=PLACES).tofile(places)
        places.rename(places_file(self.path))
        self.partial.rename(self.path)
        return Shard(self.name, self.num_tokens, self._hash.hexdigest())

    def discard(self) -> None:
        # Closing the file flushes its buffer, which fails again if the disk is full.
        with suppress(OSError):
            self._stream.close()
        self.partial.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        self._hash.update(data)
        self._stream.write(data)
