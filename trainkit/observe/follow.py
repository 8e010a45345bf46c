"""Follows a run while it goes on: new log lines and events, over all its attempts, until it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from trainkit.frozen import dataclass
from trainkit.observe.tail import LogTail, start_of_last
from trainkit.rundir import AttemptDir, RunDir, goes_on, read_end

POLL_S = 0.1
LISTING_S = 1.0
"""How often to look for logs of ranks that start late."""


@dataclass(frozen=True)
class Line:
    """A line of a log."""

    source: str
    """The log it is from, for example ``rank-0000``."""
    text: str


def is_over(run: RunDir, alive: bool | None) -> bool:
    """Whether nothing more will come from a run; `alive` is its supervisor's liveness, None if unknown."""
    numbers = run.attempt_numbers()
    if not numbers or alive is False:
        return True
    end = read_end(run.attempt(numbers[-1]))
    return end is not None and not goes_on(end)


def follow(
    run: RunDir,
    first_attempt: int,
    logs_of: Callable[[AttemptDir], list[Path]],
    is_alive: Callable[[], bool | None],
    last: int | None = None,
) -> Iterator[Line]:
    """The lines of the chosen logs as they are written, from an attempt on until the run is over.

    `last` starts with so many lines that are there already, instead of with all.
    """
    number = first_attempt
    while True:
        attempt = run.attempt(number)
        tails: dict[Path, LogTail] = {}
        listed_s = float("-inf")
        while True:
            # Asked before reading: what was written before the end is then surely read.
            over = is_over(run, is_alive())
            passed = over or run.attempt(number + 1).path.is_dir()
            if passed or time.monotonic() - listed_s > LISTING_S or not tails:
                listed_s = time.monotonic()
                for path in logs_of(attempt):
                    if path not in tails:
                        tails[path] = LogTail(path, 0 if last is None else start_of_last(path, last))
            for path, tail in tails.items():
                for text in tail.read_rest() if passed else tail.read():
                    yield Line(path.stem, text)
            if passed:
                break
            time.sleep(POLL_S)
        if over and not run.attempt(number + 1).path.is_dir():
            return
        number, last = number + 1, None
