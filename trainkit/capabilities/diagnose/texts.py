"""The texts that a diagnosis searches: the last lines of log files, and failure records as single lines."""

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
"""An error that is followed by more than this number of lines of ordinary output is considered handled."""
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
"""Matches the first line of a traceback or of another message, such as a launcher or Slurm message."""


@dataclass(frozen=True)
class Evidence:
    """A line in one of the run's files that supports a diagnosis."""

    file: str
    """The file's path relative to the run folder."""
    line: int | None
    """The line number, counted from 1; None if there is no file or the file is too large to count its
    lines."""
    text: str

    @property
    def place(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Text:
    """Consecutive lines of a file, and the rank or host that wrote them if known."""

    file: str
    kind: Where
    lines: Sequence[str]
    rank: int | None = None
    host: str | None = None
    first_line: int | None = 1
    """The number of the first line in the file, or None if it is unknown."""

    @cached_property
    def _joined(self) -> tuple[str, list[int]]:
        starts, position = [], 0
        for line in self.lines:
            starts.append(position)
            position += len(line) + 1
        return "\n".join(self.lines), starts

    def find(self, signature: Signature) -> Match | None:
        """Return the last line that matches a signature and reports an error, or None.

        Matches in quoted text, and in errors that the program survived, are ignored. Matching lines that
        contain a rank or a host take precedence.
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
        """Return the number of leading lines whose errors are considered handled."""
        if self.kind != "log":
            return 0
        ordinary = [index for index, line in enumerate(self.lines) if not _REST_OF_AN_ERROR.match(line)]
        return ordinary[-1 - MAX_LINES_AFTER] if len(ordinary) > MAX_LINES_AFTER else 0

    def _is_quoted(self, text: str, start: int, end: int) -> bool:
        """Return whether a match is part of data that the program printed, such as a training sample."""
        return self.kind == "log" and text.count('"', start, end) % 2 == 1

    def part(self, start: int, count: int, kind: Where) -> Text:
        """Return `count` lines, beginning at index `start`, as a text of the given kind."""
        number = None if self.first_line is None else self.first_line + start
        return replace(self, kind=kind, lines=self.lines[start : start + count], first_line=number)

    def evidence(self, index: int) -> Evidence:
        """Return the line at `index` as evidence."""
        number = None if self.first_line is None else self.first_line + index
        return Evidence(self.file, number, self.lines[index])


@dataclass(frozen=True)
class Match:
    """A line that matches a signature, and the matched values."""

    signature: Signature
    text: Text
    evidence: Evidence
    groups: Mapping[str, str] = field(default_factory=dict)


def num_lines_of_message(lines: Sequence[str]) -> int:
    """Return the number of lines in the exception message that begins on the first line."""
    prefix = _RANK_PREFIX.match(lines[0])
    for index, line in enumerate(lines[1:MAX_LINES_AFTER], 1):
        own = _RANK_PREFIX.match(line)
        if _NEXT_MESSAGE.match(line) or (prefix and prefix[0]) != (own and own[0]):
            return index
    return min(len(lines), MAX_LINES_AFTER)


def read_log(
    path: Path, root: Path, kind: Where, rank: int | None = None, host: str | None = None
) -> Text | None:
    """Return the last lines of a log file, or None if it is empty, missing or unreadable."""
    lines, first = last_lines(path)
    return Text(str(path.relative_to(root)), kind, lines, rank, host, first) if lines else None


def record_text(path: Path, root: Path, failure: RankFailure) -> Text:
    """Return a failure as a line ``Type: message``, with the message's line number in the JSON file."""
    message = f"{failure.type}: {failure.message}"
    # An exception message may have several lines, so join them.
    line = clean(" ".join(message.split()))
    return Text(
        str(path.relative_to(root)), "record", [line], failure.rank, failure.host, json_line(path, "message")
    )


def json_line(path: Path, key: str) -> int | None:
    """Return the number of the first line with the given key in an indented JSON file, or None."""
    try:
        with open_file(path) as stream:
            marker = f"{json.dumps(key)}:".encode()
            lines = enumerate(forward_lines(stream), 1)
            return next((n for n, line in lines if line.lstrip().startswith(marker)), None)
    except OSError:
        return None
