"""JSON Lines files: appends whole lines, and reads records from the start or from the end."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO


def append_jsonl(path: Path, record: dict[str, Any]) -> None:
    """Append one record as one line, with a single write.

    Terminates a line that a crash cut off first, so that the new record starts on its own line.
    Raises OSError when the record does not fit on the disk; the file is then unchanged.
    """
    line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        written = os.write(descriptor, line)
        if written != len(line):
            os.ftruncate(descriptor, size)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
    finally:
        os.close(descriptor)


def read_jsonl(path: Path, words: Sequence[str] = (), every: int = 1) -> Iterator[dict[str, Any]]:
    """Yield the records of a file; skips lines cut off by a crash. A missing file has no records.

    With `words`, only the records whose lines contain one of them as a JSON string, as a key or value: most
    of the time goes into parsing lines. With `every`, only the lines 1, 1 + `every`, and so on.
    """
    with _opened(path) as stream:
        if stream is not None:
            yield from _parsed(islice(stream, 0, None, every), words)


READ_BYTES = 16_384


def read_jsonl_reversed(path: Path, words: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Like `read_jsonl`, but the last record first; reads no more of the file than is consumed."""
    with _opened(path) as stream:
        if stream is None:
            return
        position = stream.seek(0, os.SEEK_END)
        rest: list[bytes] = []  # the blocks, last first, of a line whose start is not read yet
        while position > 0:
            size = min(READ_BYTES, position)
            position -= size
            stream.seek(position)
            block = stream.read(size)
            if b"\n" not in block:
                rest.append(block)
                continue
            first, *lines = block.split(b"\n")
            lines[-1] = b"".join([lines[-1], *reversed(rest)])
            yield from _parsed(reversed(lines), words)
            rest = [first]
        yield from _parsed([b"".join(reversed(rest))], words)


class JsonlTail:
    """Reads the records that are appended to a file; the file may not exist yet."""

    def __init__(self, path: Path, words: Sequence[str] = (), *, from_start: bool = False) -> None:
        """`words` as in `read_jsonl`; records that are there already are read only with `from_start`."""
        self.path, self._words = path, words
        self.position = 0 if from_start else self.size()

    def size(self) -> int:
        """The size of the file; 0 without one."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def read(self) -> Iterator[dict[str, Any]]:
        """The records since the last read; leaves an unterminated last line for the next. Raises OSError."""
        return _parsed(self._lines(), self._words)

    def _lines(self) -> Iterator[bytes]:
        with _opened(self.path) as stream:
            if stream is None:
                return
            stream.seek(self.position)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                self.position += len(line)
                yield line


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO | None]:
    """A regular file; None for anything else, since reading a pipe or a device might never end."""
    try:
        stream = path.open("rb") if path.is_file() else None
    except FileNotFoundError:
        stream = None
    with stream or contextlib.nullcontext():
        yield stream


def _parsed(lines: Iterable[bytes], words: Sequence[str]) -> Iterator[dict[str, Any]]:
    wanted = re.compile(b'"(?:' + b"|".join(re.escape(word.encode()) for word in words) + b')"')
    for line in lines:
        if words and not wanted.search(line):
            continue
        record = parse_record(line)
        if record is not None:
            yield record


DECODER = json.JSONDecoder(parse_constant=lambda name: None)
"""Reads NaN and Infinity, which are not JSON, as null."""


def parse_record(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None if it is not one."""
    try:
        record = DECODER.decode(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
