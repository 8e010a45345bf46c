"""Divides inputs into units of about 64 MiB, each with a separate set of shards, and reads the units.

The boundaries of units depend only on the files, so the result does not depend on the number of workers.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, takewhile
from shlex import quote
from typing import IO, Any, cast

from trainkit.capabilities.texts.inputs import (
    BOTH,
    TABLES,
    TEXT,
    DatasetSpec,
    Input,
    TableError,
    read_column,
    unreadable,
)
from trainkit.data.dataset_file import TRAIN, VAL
from trainkit.errors import UsageError

UNIT_BYTES = 64 << 20
MAX_LINE_SCAN = 1 << 20
"""Number of bytes to search for a newline; a longer line is cut between two characters."""
_BLOCK = 1 << 16


@dataclass(frozen=True)
class InputSpan:
    """A byte range of one input."""

    source: Input
    input: int
    """The index of the input file."""
    start: int
    end: int | None
    """End of the byte range; None for a compressed file, whose uncompressed length is unknown until it has
    been read."""
    role: str
    ends_document: bool
    """True if the end of the byte range is the end of a text document."""

    @property
    def num_bytes(self) -> int:
        """Return the size of the span on disk."""
        return (self.source.size if self.end is None else self.end) - self.start


@dataclass(frozen=True)
class Unit:
    """The spans that a single worker tokenizes into one set of shards."""

    index: int
    spec: DatasetSpec
    spans: tuple[InputSpan, ...]

    @property
    def num_bytes(self) -> int:
        """Return the size of the unit on disk."""
        return sum(span.num_bytes for span in self.spans)

    def readers(self) -> Iterator[SpanReader]:
        """Return a reader for each span."""
        return (SpanReader(span, self.spec, self.index, number) for number, span in enumerate(self.spans))


def plan_units(spec: DatasetSpec, inputs: Sequence[Input], unit_bytes: int = UNIT_BYTES) -> list[Unit]:
    """Divide inputs into units, in the order of the data; several small inputs share a unit.

    Large texts are cut at newlines, which are found by reading a few bytes. Tables can be cut anywhere,
    because a row group is read completely by the span where it begins.
    """
    groups: list[list[InputSpan]] = []
    total = 0
    for number, source in enumerate(inputs):
        for span in _spans(number, source, spec.split_fraction, unit_bytes):
            if not groups or total + span.num_bytes > unit_bytes:
                groups.append([])
                total = 0
            groups[-1].append(span)
            total += span.num_bytes
    return [Unit(index, spec, tuple(spans)) for index, spans in enumerate(groups)]


def open_input(source: Input) -> IO[bytes]:
    """Open an input for reading, decompressing it if necessary."""
    return cast(IO[bytes], gzip.open(source.path, "rb")) if source.compressed else open(source.path, "rb")


def _spans(number: int, source: Input, val_fraction: float, unit_bytes: int) -> Iterator[InputSpan]:
    span = partial(InputSpan, source, number)
    whole_lines = source.form != TEXT
    if source.compressed:
        yield span(0, None, source.role, True)
    elif source.size <= unit_bytes and (whole_lines or source.role != BOTH):
        yield span(0, source.size, source.role, True)
    elif source.form in TABLES:
        for start in range(0, source.size, unit_bytes):
            yield span(start, min(start + unit_bytes, source.size), source.role, True)
    else:
        with open_input(source) as stream:
            splits = [(source.role, 0, source.size)]
            if not whole_lines and source.role == BOTH:
                border = split_offset(stream, source.size, val_fraction)
                splits = [(TRAIN, 0, border), (VAL, border, source.size)]
            for role, start, stop in splits:
                while start < stop:
                    end = min(_cut(stream, start + unit_bytes, stop, whole_lines), stop)
                    yield span(start, end, role, end == stop)
                    start = end


def split_offset(stream: IO[bytes], size: int, val_fraction: float) -> int:
    """Return the byte offset of the first line that starts in the last `val_fraction` of a text."""
    target = size - round(size * val_fraction)
    border = _cut(stream, target, size, whole_lines=False)
    return border if border < size else _character_border(stream, target, size)


def rows_phase(unit: int, span: int, name: str, every: int) -> int:
    """Return the remainder, modulo `every`, of the row indices that go to the validation split.

    The first row of the dataset always goes to validation, so that the validation split is not empty. In all
    other spans, the remainder is a hash, so that the validation rows of many small files add up to the
    configured fraction.
    """
    if unit == 0 and span == 0:
        return 0
    digest = hashlib.sha256(f"{name}:{span}:{unit}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % every


def _cut(stream: IO[bytes], target: int, size: int, whole_lines: bool) -> int:
    """Return the first line start at or after `target`, or a character boundary if the line is too long."""
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
    """Return the offset of the first byte at or after `target` that begins a UTF-8 character."""
    stream.seek(target)
    following = stream.read(3)
    for shift, byte in enumerate(following):
        if byte & 0xC0 != 0x80:
            return target + shift
    return min(target + len(following), size)


PIECE_BYTES = 1 << 16
"""Approximate size in bytes of the pieces that are tokenized separately; pieces are cut at newlines."""


@dataclass(frozen=True)
class Piece:
    """A contiguous part of one document."""

    split: str
    text: bytes
    ends_document: bool
    place: int
    """Position of the piece in its input: a byte offset in decompressed text, or a row number in a table."""


class RowError(ValueError):
    """Raised for a row of a .jsonl file or table that has no usable text."""


@dataclass
class SpanReader:
    """Iterates over the pieces of a span; afterwards, `digest` is the SHA-256 hash of the bytes read.

    For a table, the digest covers the values of the text column, each preceded by its length. Raises
    UsageError if a row is unusable or reading fails.
    """

    span: InputSpan
    spec: DatasetSpec
    unit: int = 0
    """Index of the unit that contains the span."""
    number: int = 0
    """Index of the span within its unit."""
    _hash: Any = field(default_factory=hashlib.sha256, init=False)

    @property
    def digest(self) -> str:
        return str(self._hash.hexdigest())

    def __iter__(self) -> Iterator[Piece]:
        source = self.span.source
        try:
            if source.form == TEXT:
                with open_input(source) as stream:
                    yield from self._text(stream)
            else:
                yield from self._rows()
        except TableError as error:
            hint = "set data.text_key to a column of strings, or create the file again"
            raise UsageError(f"{source.shown}: {error}", hint=hint) from None
        except (EOFError, zlib.error) as error:
            raise UsageError(
                f"{source.shown} is not a complete gzip file: {error}",
                hint="copy the file again, or compress it again",
            ) from None
        except OSError as error:
            raise unreadable(source.path, error) from None

    def _text(self, stream: IO[bytes]) -> Iterator[Piece]:
        span = self.span
        if span.end is not None:
            yield from self._range(stream, span.start, span.end, span.role)
            return
        while stream.read(1 << 20):  # The length is known only after decompression.
            pass
        size = stream.tell()
        border = split_offset(stream, size, self.spec.split_fraction) if span.role == BOTH else size
        first, second = (VAL, VAL) if span.role == VAL else (TRAIN, VAL)
        yield from self._range(stream, 0, border, first)
        yield from self._range(stream, border, size, second)

    def _range(self, stream: IO[bytes], start: int, end: int, split: str) -> Iterator[Piece]:
        stream.seek(start)
        position, kept = start, b""
        while position < end:
            block = stream.read(min(PIECE_BYTES, end - position))
            if not block:
                message = f"{self.span.source.shown} was truncated while being read"
                raise UsageError(
                    message, hint="run the command again when no other process is writing to the file"
                )
            self._hash.update(block)
            position += len(block)
            kept += block
            cut = len(kept) if position == end else _piece_border(kept)
            if cut:
                ends = position == end and self.span.ends_document
                yield Piece(split, kept[:cut], ends, position - len(kept))
                kept = kept[cut:]

    def _rows(self) -> Iterator[Piece]:
        span, source, key = self.span, self.span.source, self.spec.text_key
        is_table = source.form in TABLES
        every = max(2, round(1 / self.spec.split_fraction)) if span.role == BOTH else 0
        phase = rows_phase(self.unit, self.number, source.name, every) if every else 0
        index = 0
        for number, place, row in read_rows(source, key, span.start, span.end):
            if not is_table:
                self._hash.update(row)
                if not row.strip():
                    continue
            try:
                text = row_text(source, row, key)
            except RowError as error:
                number += 0 if is_table else _count_lines(source, span.start)
                hint = f"`trainkit data validate {quote(source.shown)}` lists all such rows"
                raise UsageError(f"{source.shown}:{number}: {error}", hint=hint) from None
            if is_table:
                self._hash.update(len(text).to_bytes(8, "little") + text)
            split = span.role if not every else VAL if index % every == phase else TRAIN
            index += 1
            if text:
                yield Piece(split, text, True, place)


def read_rows(
    source: Input, key: str, start: int = 0, end: int | None = None
) -> Iterator[tuple[int, int, Any]]:
    """Yield the number, the `Piece.place` and the content of each row that begins in the byte range.

    Rows of a table are numbered from 1. Lines of a .jsonl file are numbered from the beginning of the byte
    range.
    """
    if source.form in TABLES:
        yield from ((row, row, value) for row, value in read_column(source, key, start, end))
        return
    with open_input(source) as stream:
        stream.seek(start)
        position = start
        for number, line in enumerate(stream, 1):
            if end is not None and position >= end:
                break
            yield number, position, line
            position += len(line)


def row_text(source: Input, row: Any, key: str) -> bytes:
    """Return the text of a row from `read_rows`, b"" for a blank line; raise RowError if it is unusable."""
    if source.form not in TABLES:
        return line_text(row, key) if row.strip() else b""
    if row is None:
        raise RowError(f'column "{key}" (data.text_key) is null, not a string')
    try:
        row.decode()
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8: byte {row[error.start]:#04x} at byte {error.start + 1}") from None
    return bytes(row)


def line_text(line: bytes, key: str) -> bytes:
    """Return the text of a .jsonl row as UTF-8; raise RowError if the row is invalid."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8: byte {line[error.start]:#04x} at column {error.start + 1}") from None
    except (ValueError, RecursionError) as error:
        raise RowError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise RowError(f"the row is {_json_kind(row)}, not an object")
    if key not in row:
        keys = ", ".join(sorted(row)[:8]) or "none"
        raise RowError(f'no field "{key}" (data.text_key); the fields are: {keys}')
    text = row[key]
    if not isinstance(text, str):
        raise RowError(f'field "{key}" (data.text_key) is {_json_kind(text)}, not a string')
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise RowError(f'field "{key}" contains an unpaired surrogate') from None


def _json_kind(value: object) -> str:
    if value is None:
        return "null"
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return kinds.get(type(value), "an object")


def _piece_border(text: bytes) -> int:
    """Return the offset for cutting an incomplete text: after its last line, or before its last character."""
    newline = text.rfind(b"\n")
    if newline >= 0:
        return newline + 1
    for back in range(1, min(4, len(text)) + 1):
        if text[-back] & 0xC0 != 0x80:
            return len(text) - back
    return len(text)


def _count_lines(source: Input, end: int) -> int:
    """Return the number of lines that precede the line at byte offset `end`."""
    with open_input(source) as stream:
        starts = accumulate(map(len, stream), initial=0)
        return sum(1 for _ in takewhile(lambda start: start < end, starts))
