"""Tokenises one unit into its shards: what a worker process of `prepare` does."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from trainkit import rundir
from trainkit.data.dataset_file import SPLITS, Shard
from trainkit.data.recipe import Recipe
from trainkit.data.sources import Input
from trainkit.data.tokenizer import Tokenizer, Tokens
from trainkit.data.units import PartReader, Piece, Unit
from trainkit.errors import UsageError

WORK_FOLDER = ".work"
"""Inside the output folder while it is not finished."""
_BATCH_BYTES = 4 << 20
"""Text given to the tokenizer at once, so that it can use several threads."""


@dataclass(frozen=True)
class UnitJob:
    """Everything that a worker needs to know."""

    folder: Path
    recipe: Recipe
    unit: Unit
    inputs: dict[int, Input]

    @property
    def record_file(self) -> Path:
        """Written when the shards of the unit are in place; absent means: not done."""
        return self.folder / WORK_FOLDER / f"unit-{self.unit.index:05d}.json"

    def shard_name(self, split: str) -> str:
        return f"{split}-{self.unit.index:05d}.bin"

    def reader(self, number: int) -> PartReader:
        part = self.unit.parts[number]
        fraction, key = self.recipe.split_fraction, self.recipe.text_key
        return PartReader(self.inputs[part.input], part, self.unit.index, number, fraction, key)


def run_unit(job: UnitJob) -> None:
    """Tokenise a unit, publish its shards and last its record.

    Raises UsageError for text that cannot be used and for a source that changed, OSError where the shards
    cannot be written.
    """
    writers = {split: _ShardWriter(job.folder, job.shard_name(split)) for split in SPLITS}
    try:
        digests = _tokenize(job, writers)
        shards = {split: asdict(shard) for split in SPLITS if (shard := writers[split].publish())}
        rundir.write_json(job.record_file, {"digests": digests, "shards": shards})
    finally:
        for writer in writers.values():
            writer.discard()


def digest_unit(job: UnitJob) -> list[str]:
    """The digests of the parts of a unit as they are on disk now."""
    digests = []
    for number in range(len(job.unit.parts)):
        reader = job.reader(number)
        for _ in reader:
            pass
        digests.append(reader.digest)
    return digests


def _tokenize(job: UnitJob, writers: dict[str, _ShardWriter]) -> list[str]:
    tokenizer = _tokenizer(job.recipe.tokenizer)
    eos = tokenizer.identity.eos_id
    digests = []
    for number, part in enumerate(job.unit.parts):
        source = job.inputs[part.input]
        _check_unchanged(source)
        reader = job.reader(number)
        try:
            for batch in _batches(iter(reader)):
                for piece, tokens in zip(
                    batch, tokenizer.encode([piece.text for piece in batch]), strict=True
                ):
                    writers[piece.split].append(tokens, eos if piece.ends_document else None)
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{source.path} is not UTF-8: byte {error.object[error.start]:#04x}",
                hint=f"`trainkit data validate {source.path}` lists every such line; "
                "the tokenizer `bytes` takes any bytes",
            ) from None
        except _ReadError as error:
            raise UsageError(f"{source.path} cannot be read: {error}") from None
        _check_unchanged(source)
        digests.append(reader.digest)
    return digests


class _ReadError(Exception):
    """An OSError of the source, kept apart from those of the shards."""


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    while True:
        try:
            piece = next(pieces, None)
        except OSError as error:
            raise _ReadError(error.strerror or str(error)) from error
        if piece is None:
            break
        batch.append(piece)
        size += len(piece.text)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _check_unchanged(source: Input) -> None:
    try:
        status = Path(source.path).stat()
    except OSError as error:
        raise UsageError(f"{source.path} cannot be read: {error.strerror}") from None
    if (status.st_size, status.st_mtime_ns) != (source.size, source.mtime_ns):
        raise UsageError(
            f"{source.path} changed while it was being prepared",
            hint="wait until it is complete, then prepare into a new folder",
        )


@lru_cache(maxsize=1)
def _tokenizer(name: str) -> Tokenizer:
    """One for all units of a worker: loading a big vocabulary takes a second."""
    return Tokenizer(name)


class _ShardWriter:
    """Appends tokens to a file that gets its name only when it is complete."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.path = folder / name
        self.partial = folder / WORK_FOLDER / f"{name}.{os.getpid()}"
        self.num_tokens = 0
        self._hash = hashlib.sha256()
        self._stream = self.partial.open("wb")

    def append(self, tokens: Tokens, eos: int | None) -> None:
        self._write(tokens.tobytes())
        self.num_tokens += len(tokens)
        if eos is not None:
            self._write(eos.to_bytes(tokens.itemsize, "little"))
            self.num_tokens += 1

    def publish(self) -> Shard | None:
        """Give the file its name; None when there is nothing in it."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        if not self.num_tokens:
            return None
        self.partial.rename(self.path)
        return Shard(self.name, self.num_tokens, self._hash.hexdigest())

    def discard(self) -> None:
        # Closing writes what is still buffered, which fails again where the disk is full.
        with suppress(OSError):
            self._stream.close()
        self.partial.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        self._hash.update(data)
        self._stream.write(data)
