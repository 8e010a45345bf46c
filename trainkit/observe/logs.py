"""Finds the log of a rank, reads its last lines, and follows it while it grows."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import BinaryIO, TypeVar

from trainkit.plan.workload import PER_RANK
from trainkit.run.end import is_over
from trainkit.run.files import Tail, open_file, reversed_lines
from trainkit.run.history import PlanRecord
from trainkit.run.rundir import AttemptDir, RunDir

N = TypeVar("N", int, float)
TAIL_BYTES = 262_144
COUNTED_BYTES = 64 * 2**20
"""Maximum size in bytes of a log whose lines are counted to find the line numbers of its last lines."""
MAX_LINE = 1000
"""Maximum number of characters per line that are searched and shown."""
MAX_LAST_LINES = 400
"""Number of lines at the end of a log that are searched for errors. Earlier errors are ignored, because the
program continued after them."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


def clean(line: str) -> str:
    """Return a line without control characters, truncated to `MAX_LINE` characters."""
    line = line.rpartition("\r")[2] or line  # a progress bar overwrites its line after a carriage return
    return _CONTROL.sub("", line[: 4 * MAX_LINE])[:MAX_LINE].rstrip()


def last_lines(path: Path) -> tuple[list[str], int | None]:
    """Return a log's last lines, and the line number of the first one, or None if the number is unknown.

    Returns no lines if the log is empty, missing or unreadable.
    """
    try:
        with open_file(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            start = max(0, size - TAIL_BYTES)
            first = 1 + stream.read(start).count(b"\n") if size <= COUNTED_BYTES else None
            stream.seek(start)
            data = stream.read(TAIL_BYTES)
    except OSError:
        return [], None
    lines = [clean(line) for line in data.decode("utf-8", errors="replace").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    skipped = max(0, len(lines) - MAX_LAST_LINES)
    return lines[skipped:], None if first is None else first + skipped


def last_texts(path: Path, count: int) -> list[str]:
    """Return a file's last `count` complete lines for a live view; empty if the file cannot be read."""
    try:
        with open_file(path) as stream:
            lines = islice(reversed_lines(stream, stream.seek(0, os.SEEK_END)), 1, count + 1)
            return [clean(line.decode(errors="replace").removesuffix("\n")) for line in lines][::-1]
    except OSError:
        return []


def start_of_last(stream: BinaryIO, count: int, *, unfinished: bool = False) -> int:
    """Return the byte offset at which the last `count` lines of a file begin.

    If `unfinished` is True, a last line without a newline is also counted.
    """
    end = stream.seek(0, os.SEEK_END)
    lines = reversed_lines(stream, end)
    last = len(next(lines))
    if unfinished and (last or not count):
        count, last = max(0, count - 1), last if count else 0
    return end - last - sum(map(len, islice(lines, count)))


POLL_S = 0.1
LISTING_S = 1.0
"""Seconds between searches for new logs, because some ranks start late."""


def _start_of_last(path: Path, count: int) -> int:
    try:
        with open_file(path) as stream:
            return start_of_last(stream, count)
    except OSError:
        return 0


def run_is_over(run: RunDir, alive: bool | None) -> bool:
    """Return whether a run has ended and will not resume automatically.

    `alive` is True if the run's job is alive, False if not, and None if unknown.
    """
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
    """Yield each new line in the chosen logs, starting with `first_attempt`, until the run is over.

    Each item is a pair of the log's name, such as ``rank-0000``, and the line. If `last` is given, only the
    last N existing lines of each log are yielded before the new lines.
    """
    number = first_attempt
    while True:
        attempt = run.attempt(number)
        tails: dict[str, Tail] = {}
        listed_s = float("-inf")
        while True:
            # Check the state before reading the logs, so that lines written before the run ended are not
            # missed.
            over = run_is_over(run, is_alive())
            if over and run.follow():
                continue  # The run folder was moved while its state was being checked.
            passed = over or run.attempt(number + 1).path.is_dir()
            if passed or time.monotonic() - listed_s > LISTING_S or not tails:
                listed_s = time.monotonic()
                for path in logs_of(attempt):
                    if path.name not in tails:
                        tails[path.name] = Tail(path, 0 if last is None else _start_of_last(path, last))
                    tails[path.name].path = path  # The run folder may have been moved, so update the path.
            for tail in tails.values():
                for text in tail.texts(unfinished=passed):
                    yield tail.path.stem, text
            if passed:
                break
            time.sleep(POLL_S)
        if over and not run.attempt(number + 1).path.is_dir():
            return
        number, last = number + 1, None


SEARCHED_BYTES = 65_536
"""Number of bytes at the end of a COMMAND's log that are searched for its step and loss. The number is large
because a progress bar can be a single long line."""


def printed_metrics(log: Path, pattern: str | None) -> tuple[int | None, float | None]:
    """Return the last step and loss that a COMMAND has printed, as matched by ``logging.pattern``."""
    with open_file(log) as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - SEARCHED_BYTES))
        text = stream.read().decode(errors="replace")
    # A progress bar ends its line with a carriage return instead of a newline. Drop the text after the last
    # line ending, because it is incomplete.
    lines = reversed(re.split(r"[\r\n]", text)[:-1])
    found = None if pattern is None else next(filter(None, map(re.compile(pattern).search, lines)), None)
    values = {} if found is None else found.groupdict()
    return _number(values.get("step"), int), _number(values.get("loss"), float)


def _number(text: str | None, kind: Callable[[str], N]) -> N | None:
    try:
        return None if text is None else kind(text)
    except ValueError:
        return None  # The pattern may also match text that is not numeric.


MAX_NODES = 1_000_000
"""A plan with more nodes is considered damaged."""


def ranks_of_nodes(plan: PlanRecord) -> list[range]:
    """Return the ranks on each node, or an empty list if they are unknown."""
    sizes = plan.values.get("node_sizes")
    if not isinstance(sizes, list):
        num_nodes = plan.count("num_nodes") or 0
        sizes = [plan.count("workers_per_node")] * num_nodes if num_nodes <= MAX_NODES else []
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return []
    return [range(first, end) for first, end in pairwise(accumulate(sizes, initial=0))]


def log_of(attempt: AttemptDir, plan: PlanRecord, rank: int) -> Path:
    """Return the path of the log that contains a rank's output.

    A launcher such as torchrun writes the output of all ranks on a node to one log.
    """
    if plan.text("launcher") not in (None, *PER_RANK):
        rank = next((ranks[0] for ranks in ranks_of_nodes(plan) if rank in ranks), rank)
    return attempt.rank_log(rank)
