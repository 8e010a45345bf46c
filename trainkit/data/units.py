"""Cuts inputs into units of work of about 64 MiB, each of which becomes its own shards.

The cuts depend on the files alone, never on the number of workers, so the result does not either.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator
from typing import IO, cast

from trainkit.data.dataset_file import TRAIN, VAL
from trainkit.data.sources import BOTH, ROWS, TEXT, Input
from trainkit.frozen import dataclass

LAYOUT_VERSION = 1
"""Part of every fingerprint: raise it when the same text would become other tokens."""
UNIT_BYTES = 64 << 20
MAX_LINE_SCAN = 1 << 20
"""Bytes of text looked through for the end of a line, before a cut is made within the line."""
_BLOCK = 1 << 16


@dataclass(frozen=True)
class Part:
    """A range of bytes of one input."""

    input: int
    start: int
    end: int | None
    """None for a compressed file, whose length is known only when it has been read."""
    role: str
    ends_document: bool
    """Whether the end of the range is the end of a text document."""


@dataclass(frozen=True)
class Unit:
    """What one worker tokenises in one go."""

    index: int
    parts: tuple[Part, ...]
    num_bytes: int
    """On disk."""


def plan_units(inputs: list[Input], val_fraction: float, unit_bytes: int = UNIT_BYTES) -> list[Unit]:
    """Units in the order of the data; small inputs share one.

    Reads a few bytes of the big inputs to cut them where lines end.
    """
    units: list[Unit] = []
    parts: list[Part] = []
    total = 0
    for number, source in enumerate(inputs):
        for part in _parts(number, source, val_fraction, unit_bytes):
            size = (source.size if part.end is None else part.end) - part.start
            if parts and total + size > unit_bytes:
                units.append(Unit(len(units), tuple(parts), total))
                parts, total = [], 0
            parts.append(part)
            total += size
    if parts:
        units.append(Unit(len(units), tuple(parts), total))
    return units


def open_input(source: Input) -> IO[bytes]:
    """An input's bytes, decompressed."""
    return cast(IO[bytes], gzip.open(source.path, "rb")) if source.compressed else open(source.path, "rb")


def _parts(number: int, source: Input, val_fraction: float, unit_bytes: int) -> Iterator[Part]:
    if source.compressed:
        yield Part(number, 0, None, source.role, True)
        return
    whole_lines = source.form == ROWS
    splits = [(source.role, 0, source.size)]
    if source.size <= unit_bytes and (whole_lines or source.role != BOTH):
        yield Part(number, 0, source.size, source.role, True)
        return
    with open_input(source) as stream:
        if source.form == TEXT and source.role == BOTH:
            border = split_offset(stream, source.size, val_fraction)
            splits = [(TRAIN, 0, border), (VAL, border, source.size)]
        for role, start, stop in splits:
            while start < stop:
                end = min(_cut(stream, start + unit_bytes, stop, whole_lines), stop)
                yield Part(number, start, end, role, end == stop)
                start = end


def split_offset(stream: IO[bytes], size: int, val_fraction: float) -> int:
    """Where the validation part of a text begins: the last `val_fraction` of it, from a line on."""
    target = size - round(size * val_fraction)
    border = _cut(stream, target, size, whole_lines=False)
    return border if border < size else _character_border(stream, target, size)


def rows_phase(unit: int, part: int, name: str, every: int) -> int:
    """Which of every `every` rows of a part is validation.

    The very first row of the data is, so that there is one; elsewhere a hash decides, so that many small
    files together still give the fraction that was asked for.
    """
    if unit == 0 and part == 0:
        return 0
    digest = hashlib.sha256(f"{name}:{part}:{unit}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % every


def _cut(stream: IO[bytes], target: int, size: int, whole_lines: bool) -> int:
    """The first border of a line at or after `target`; in a text line that is too long, of a character."""
    if target <= 0 or target >= size:
        return max(0, min(target, size))
    stream.seek(target - 1)
    position = target - 1
    while position < size and (whole_lines or position - target < MAX_LINE_SCAN):
        block = stream.read(_BLOCK)
        newline = block.find(b"\n")
        if newline >= 0:
            return position + newline + 1
        if not block:
            return size
        position += len(block)
    return _character_border(stream, target, size) if not whole_lines else size


def _character_border(stream: IO[bytes], target: int, size: int) -> int:
    """The first byte at or after `target` that begins a UTF-8 character."""
    stream.seek(target)
    following = stream.read(3)
    for shift, byte in enumerate(following):
        if byte & 0xC0 != 0x80:
            return target + shift
    return min(target + len(following), size)
