"""Reads the end of files that grow: logs and JSONL."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

BLOCK_BYTES = 65_536


class LogTail:
    """The complete lines that a file has gained since it was last asked; the file may not exist yet."""

    def __init__(self, path: Path, start: int = 0) -> None:
        self.path = path
        self.position = start
        self.rest = b""

    def read(self) -> list[str]:
        """New lines without their ends."""
        try:
            with self.path.open("rb") as stream:
                stream.seek(self.position)
                data = stream.read()
        except FileNotFoundError:
            return []
        self.position += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        return [line.decode("utf-8", errors="replace") for line in lines]

    def read_rest(self) -> list[str]:
        """New lines and a last one that was never ended; for a file that no longer grows."""
        lines = self.read()
        if self.rest:
            lines.append(self.rest.decode("utf-8", errors="replace"))
            self.rest = b""
        return lines


def last_lines(path: Path, count: int) -> tuple[list[bytes], int]:
    """The last complete lines of a file, and the position in it where they end."""
    try:
        with path.open("rb") as stream:
            end = stream.seek(0, os.SEEK_END)
            start, data = end, b""
            while start > 0 and data.count(b"\n") <= count:
                step = min(BLOCK_BYTES, start)
                start -= step
                stream.seek(start)
                data = stream.read(step) + data
    except FileNotFoundError:
        return [], 0
    lines = data.split(b"\n")
    unfinished = lines.pop()
    return (lines[-count:] if count else []), end - len(unfinished)


def start_of_last(path: Path, count: int) -> int:
    """The position in a file where its last so many complete lines begin."""
    lines, end = last_lines(path, count)
    return end - sum(len(line) + 1 for line in lines)


def last_records(path: Path, count: int) -> list[dict[str, Any]]:
    """The last whole records of a JSONL file, oldest first."""
    records = []
    for line in last_lines(path, count + 1)[0]:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records[-count:]
