"""Follows a run's log files across attempts until it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from trainkit.run.end import is_over
from trainkit.run.files import reversed_lines
from trainkit.run.rundir import AttemptDir, RunDir


class LogTail:
    """Reads the complete lines appended to a file since the last read; the file may not exist yet."""

    def __init__(self, path: Path, start: int = 0) -> None:
        self.path = path
        self.position = start
        self.rest = b""

    def read(self) -> list[str]:
        """New lines, without their newlines."""
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
        """New lines including an unterminated last one; for a file that no longer grows."""
        lines = self.read()
        if self.rest:
            lines.append(self.rest.decode("utf-8", errors="replace"))
            self.rest = b""
        return lines


def last_lines(path: Path, count: int) -> tuple[list[bytes], int]:
    """The last `count` complete lines of a file, and the position at which they end."""
    try:
        with path.open("rb") as stream:
            end = stream.seek(0, os.SEEK_END)
            lines = reversed_lines(stream, end)
            unfinished = next(lines)
            return list(islice(lines, count))[::-1], end - len(unfinished)
    except FileNotFoundError:
        return [], 0


def start_of_last(path: Path, count: int) -> int:
    """The position in a file where its last `count` complete lines begin."""
    lines, end = last_lines(path, count)
    return end - sum(len(line) + 1 for line in lines)


POLL_S = 0.1
LISTING_S = 1.0
"""Seconds between looking for logs of ranks that start late."""


def run_is_over(run: RunDir, alive: bool | None) -> bool:
    """Whether a run has ended and will not resume; `alive` is its job's liveness, None if unknown."""
    numbers = run.attempt_numbers()
    if not numbers or alive is False:
        return True
    return is_over(run.attempt(numbers[-1]))


def follow(
    run: RunDir,
    first_attempt: int,
    logs_of: Callable[[AttemptDir], list[Path]],
    is_alive: Callable[[], bool | None],
    last: int | None = None,
) -> Iterator[tuple[str, str]]:
    """The lines of the chosen logs as they are written, from `first_attempt` until the run is over.

    Each comes with the name of its log, such as ``rank-0000``. With `last`, starts with that many existing
    lines of each log instead of all of them.
    """
    number = first_attempt
    while True:
        attempt = run.attempt(number)
        tails: dict[Path, LogTail] = {}
        listed_s = float("-inf")
        while True:
            # Checked before reading, so that everything written before the end is read.
            over = run_is_over(run, is_alive())
            passed = over or run.attempt(number + 1).path.is_dir()
            if passed or time.monotonic() - listed_s > LISTING_S or not tails:
                listed_s = time.monotonic()
                for path in logs_of(attempt):
                    if path not in tails:
                        tails[path] = LogTail(path, 0 if last is None else start_of_last(path, last))
            for path, tail in tails.items():
                for text in tail.read_rest() if passed else tail.read():
                    yield path.stem, text
            if passed:
                break
            time.sleep(POLL_S)
        if over and not run.attempt(number + 1).path.is_dir():
            return
        number, last = number + 1, None
