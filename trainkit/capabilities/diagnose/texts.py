"""What a diagnosis searches, as texts: a bounded part of a log, or a record as a line."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from trainkit.capabilities.diagnose.signatures import Signature, Where
from trainkit.observe.logs import clean, last_lines
from trainkit.run.end import RankFailure
from trainkit.run.files import forward_lines, open_file

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


def read_log(
    path: Path, root: Path, kind: Where, rank: int | None = None, host: str | None = None
) -> Text | None:
    """The last lines of a log; None when it is empty, missing or unreadable."""
    lines, first = last_lines(path)
    return Text(str(path.relative_to(root)), kind, lines, rank, host, first) if lines else None


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
