"""The bytes of a part as pieces of documents, in constant memory."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator
from typing import IO, Any

from trainkit.data.dataset_file import TRAIN, VAL
from trainkit.data.sources import BOTH, ROWS, Input
from trainkit.data.units import Part, open_input, rows_phase, split_offset
from trainkit.errors import UsageError
from trainkit.frozen import dataclass

PIECE_BYTES = 1 << 16
"""A text is tokenised in pieces of about this size, cut where lines end."""


@dataclass(frozen=True)
class Piece:
    """A stretch of one document."""

    split: str
    text: bytes
    ends_document: bool


class RowError(ValueError):
    """Why a row of a .jsonl file has no text."""


class PartReader:
    """Iterates over the pieces of a part; afterwards `digest` is the sha256 of the bytes it read.

    Raises UsageError for a row that cannot be used, OSError where reading fails.
    """

    def __init__(self, source: Input, part: Part, unit: int, number: int, fraction: float, key: str) -> None:
        self.source = source
        self.part = part
        self.fraction = fraction
        self.key = key
        self._phase_of = (unit, number, source.name)
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[Piece]:
        try:
            with open_input(self.source) as stream:
                yield from self._rows(stream) if self.source.form == ROWS else self._text(stream)
        except (EOFError, zlib.error) as error:
            raise UsageError(
                f"{self.source.path} is not a whole gzip file: {error}",
                hint="copy or compress the file again",
            ) from None

    def _text(self, stream: IO[bytes]) -> Iterator[Piece]:
        part = self.part
        if part.end is not None:
            yield from self._range(stream, part.start, part.end, part.role)
            return
        size = _stream_size(stream)
        border = split_offset(stream, size, self.fraction) if part.role == BOTH else size
        first, second = (VAL, VAL) if part.role == VAL else (TRAIN, VAL)
        yield from self._range(stream, 0, border, first)
        yield from self._range(stream, border, size, second)

    def _range(self, stream: IO[bytes], start: int, end: int, split: str) -> Iterator[Piece]:
        stream.seek(start)
        position, kept = start, b""
        while position < end:
            block = stream.read(min(PIECE_BYTES, end - position))
            if not block:
                raise UsageError(f"{self.source.path} became shorter while it was read")
            self._hash.update(block)
            position += len(block)
            kept += block
            cut = len(kept) if position == end else _piece_border(kept)
            if cut:
                yield Piece(split, kept[:cut], position == end and self.part.ends_document)
                kept = kept[cut:]

    def _rows(self, stream: IO[bytes]) -> Iterator[Piece]:
        part = self.part
        every = max(2, round(1 / self.fraction)) if part.role == BOTH else 0
        phase = rows_phase(*self._phase_of, every) if every else 0
        stream.seek(part.start)
        position, row = part.start, 0
        for line_number, line in enumerate(stream):
            if part.end is not None and position >= part.end:
                break
            self._hash.update(line)
            position += len(line)
            if not line.strip():
                continue
            try:
                text = row_text(line, self.key)
            except RowError as error:
                raise self._row_error(line_number, str(error)) from None
            split = part.role if not every else VAL if row % every == phase else TRAIN
            row += 1
            if text:
                yield Piece(split, text, True)

    def _row_error(self, line_number: int, why: str) -> UsageError:
        with open_input(self.source) as stream:
            before = _count_lines(stream, self.part.start)
        return UsageError(
            f"{self.source.path}:{before + line_number + 1}: {why}",
            hint=f"`trainkit data validate {self.source.path}` lists every such row",
        )


def row_text(line: bytes, key: str) -> bytes:
    """The text of one row of a .jsonl file, as UTF-8; RowError says what is wrong with the row."""
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
        raise RowError(f'field "{key}" holds half a surrogate pair, which is no text') from None


def _json_kind(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return kinds.get(type(value), "an object")


def _piece_border(text: bytes) -> int:
    """Where to cut a text of which more follows: after its last line, else before its last character."""
    newline = text.rfind(b"\n")
    if newline >= 0:
        return newline + 1
    for back in range(1, min(4, len(text)) + 1):
        if text[-back] & 0xC0 != 0x80:
            return len(text) - back
    return len(text)


def _stream_size(stream: IO[bytes]) -> int:
    while stream.read(1 << 20):
        pass
    return stream.tell()


def _count_lines(stream: IO[bytes], end: int) -> int:
    count = 0
    while end > 0:
        block = stream.read(min(1 << 20, end))
        if not block:
            break
        count += block.count(b"\n")
        end -= len(block)
    return count
