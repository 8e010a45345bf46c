"""The logs of a run: followed across attempts until it ends, and as texts that a diagnosis searches.

A text is a bounded part of a log, or a record as a line.
"""

from __future__ import annotations

import json
import os
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from trainkit.run.end import RankFailure, is_over
from trainkit.run.files import Tail, forward_lines, open_file, reversed_lines
from trainkit.run.rundir import AttemptDir, RunDir

if TYPE_CHECKING:
    from trainkit.observe.signatures import Signature, Where

N = TypeVar("N", int, float)
TAIL_BYTES = 262_144
COUNTED_BYTES = 64 * 2**20
"""Up to this size of a log, its lines are counted to give the number of one near the end."""
MAX_LINE = 1000
"""Characters of a line that are searched and shown."""
MAX_LAST_LINES = 400
"""A log is searched in its last lines; what a program has printed before, it has survived."""
MAX_LINES_AFTER = 20
"""An error with more lines of ordinary output after it counts as handled by the program."""
_REST_OF_AN_ERROR = re.compile(
    r"^(?:\s|$|Traceback|\[rank\d+\]|\[[EWIF]\d|\[[EWF] |[EWIF]\d{4} |frame #|terminate called|srun:"
    r"|slurmstepd:|Exception raised|During handling|The above exception|=+$|-+$|\*+$"
    r"|[\w.<>]+(?:Error|Exception)\b|.*NCCL (?:WARN|INFO)|Root Cause|Failures:|Fatal Python error|Thread 0x"
    r"|Current thread)",
    re.MULTILINE,
)
_RANK_PREFIX = re.compile(r"\[rank\d+\]: ?")
_NEXT_MESSAGE = re.compile(
    r"Traceback|\[[EWIF]\d|\[[EWF] |[EWIF]\d{4} |srun:|slurmstepd:|terminate called|=+$|-+$"
)
"""A line of another message: of a launcher, of Slurm, or the next traceback."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True)
class Evidence:
    """A line of a file of the run."""

    file: str
    """Relative to the run folder."""
    line: int | None
    """Counted from 1; None in a file too large to count its lines, and outside files."""
    text: str

    @property
    def place(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Text:
    """Lines from one file, of one rank or host if known."""

    file: str
    kind: Where
    lines: Sequence[str]
    rank: int | None = None
    host: str | None = None
    first_line: int | None = 1
    """The number of the first line; None when unknown."""

    @cached_property
    def _joined(self) -> tuple[str, list[int]]:
        starts, position = [], 0
        for line in self.lines:
            starts.append(position)
            position += len(line) + 1
        return "\n".join(self.lines), starts

    def find(self, signature: Signature) -> Match | None:
        """The last line that matches a signature and is an error; None without one.

        Errors that the program has survived do not count, nor do words in quotes. Lines that name the rank or
        the host count more than others.
        """
        text, starts = self._joined
        found: tuple[tuple[bool, int], dict[str, str]] | None = None
        for pattern in signature.patterns:
            for match in pattern.finditer(text):
                index = bisect_right(starts, match.start()) - 1
                groups = {name: value for name, value in match.groupdict().items() if value}
                weight = bool({"rank", "host"} & groups.keys()), index
                if found is not None and weight <= found[0]:
                    continue
                if index >= self._num_survived and not self._is_quoted(text, starts[index], match.start()):
                    found = weight, groups
        if found is None:
            return None
        (_, index), groups = found
        return Match(signature, self, self.evidence(index), groups)

    @cached_property
    def _num_survived(self) -> int:
        """How many of its lines have so much ordinary output after them that errors there were handled."""
        if self.kind != "log":
            return 0
        ordinary = [index for index, line in enumerate(self.lines) if not _REST_OF_AN_ERROR.match(line)]
        return ordinary[-1 - MAX_LINES_AFTER] if len(ordinary) > MAX_LINES_AFTER else 0

    def _is_quoted(self, text: str, start: int, end: int) -> bool:
        """Whether a program prints the words as data, such as a sample or a JSON string."""
        return self.kind == "log" and text.count('"', start, end) % 2 == 1

    def part(self, start: int, count: int, kind: Where) -> Text:
        """Some of its lines, as another kind of text."""
        number = None if self.first_line is None else self.first_line + start
        return replace(self, kind=kind, lines=self.lines[start : start + count], first_line=number)

    def evidence(self, index: int) -> Evidence:
        """The line at an index as evidence."""
        number = None if self.first_line is None else self.first_line + index
        return Evidence(self.file, number, self.lines[index])


@dataclass(frozen=True)
class Match:
    """A line that matches a signature."""

    signature: Signature
    text: Text
    evidence: Evidence
    groups: Mapping[str, str] = field(default_factory=dict)


def num_lines_of_message(lines: Sequence[str]) -> int:
    """How many of the lines at the end of a log belong to the exception that the first one begins."""
    prefix = _RANK_PREFIX.match(lines[0])
    for index, line in enumerate(lines[1:MAX_LINES_AFTER], 1):
        own = _RANK_PREFIX.match(line)
        if _NEXT_MESSAGE.match(line) or (prefix and prefix[0]) != (own and own[0]):
            return index
    return min(len(lines), MAX_LINES_AFTER)


def clean(line: str) -> str:
    """A line without control characters, cut to `MAX_LINE` characters."""
    line = line.rpartition("\r")[2] or line  # a progress bar
    return _CONTROL.sub("", line[: 4 * MAX_LINE])[:MAX_LINE].rstrip()


def read_log(
    path: Path, root: Path, kind: Where, rank: int | None = None, host: str | None = None
) -> Text | None:
    """The last lines of a log; None when it is empty, missing or unreadable."""
    try:
        with open_file(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            start = max(0, size - TAIL_BYTES)
            first = 1 + stream.read(start).count(b"\n") if size <= COUNTED_BYTES else None
            stream.seek(start)
            data = stream.read(TAIL_BYTES)
    except OSError:
        return None
    lines = [clean(line) for line in data.decode("utf-8", errors="replace").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    skipped = max(0, len(lines) - MAX_LAST_LINES)
    if not lines:
        return None
    return Text(
        str(path.relative_to(root)),
        kind,
        lines[skipped:],
        rank,
        host,
        None if first is None else first + skipped,
    )


def record_text(path: Path, root: Path, failure: RankFailure) -> Text:
    """A failure as the line ``Type: message``, at the line of its message in a JSON file."""
    message = f"{failure.type}: {failure.message}"
    # An exception's message may have lines of its own: they count as one.
    line = clean(" ".join(message.split()))
    return Text(
        str(path.relative_to(root)), "record", [line], failure.rank, failure.host, json_line(path, "message")
    )


def json_line(path: Path, key: str) -> int | None:
    """The number of the first line of an indented JSON file that has a key; None if none has."""
    try:
        with open_file(path) as stream:
            marker = f"{json.dumps(key)}:".encode()
            lines = enumerate(forward_lines(stream), 1)
            return next((n for n, line in lines if line.lstrip().startswith(marker)), None)
    except OSError:
        return None


def last_texts(path: Path, count: int) -> list[str]:
    """The last `count` complete lines of a file for a screen; none if it cannot be read."""
    try:
        with open_file(path) as stream:
            lines = islice(reversed_lines(stream, stream.seek(0, os.SEEK_END)), 1, count + 1)
            return [clean(line.decode(errors="replace").removesuffix("\n")) for line in lines][::-1]
    except OSError:
        return []


def start_of_last(stream: BinaryIO, count: int, *, unfinished: bool = False) -> int:
    """Where the last `count` lines of a file begin, with `unfinished` also one without an end."""
    end = stream.seek(0, os.SEEK_END)
    lines = reversed_lines(stream, end)
    last = len(next(lines))
    if unfinished and (last or not count):
        count, last = max(0, count - 1), last if count else 0
    return end - last - sum(map(len, islice(lines, count)))


POLL_S = 0.1
LISTING_S = 1.0
"""Seconds between looking for logs of ranks that start late."""


def _start_of_last(path: Path, count: int) -> int:
    try:
        with open_file(path) as stream:
            return start_of_last(stream, count)
    except OSError:
        return 0


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
        tails: dict[str, Tail] = {}
        listed_s = float("-inf")
        while True:
            # Checked before reading, so that everything written before the end is read.
            over = run_is_over(run, is_alive())
            if over and run.follow():
                continue  # it was moved while it was looked at
            passed = over or run.attempt(number + 1).path.is_dir()
            if passed or time.monotonic() - listed_s > LISTING_S or not tails:
                listed_s = time.monotonic()
                for path in logs_of(attempt):
                    if path.name not in tails:
                        tails[path.name] = Tail(path, 0 if last is None else _start_of_last(path, last))
                    tails[path.name].path = path  # the run may have been moved
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
"""How much of the end of a command's log is searched for its progress: it may be one long line."""


def printed_metrics(log: Path, pattern: str | None) -> tuple[int | None, float | None]:
    """The step and loss that a COMMAND has printed last into a log, as ``logging.pattern`` finds them."""
    with open_file(log) as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - SEARCHED_BYTES))
        text = stream.read().decode(errors="replace")
    # A progress bar overwrites its line; what follows the last end of a line is incomplete.
    lines = reversed(re.split(r"[\r\n]", text)[:-1])
    found = None if pattern is None else next(filter(None, map(re.compile(pattern).search, lines)), None)
    values = {} if found is None else found.groupdict()
    return _number(values.get("step"), int), _number(values.get("loss"), float)


def _number(text: str | None, kind: Callable[[str], N]) -> N | None:
    try:
        return None if text is None else kind(text)
    except ValueError:
        return None  # the pattern matches other text too
