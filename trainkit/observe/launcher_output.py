"""Parses what torchrun and torch.distributed print about failed ranks: which was first, and why."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from trainkit.observe.run_text import Text

WATCHDOG = re.compile(
    r"\[Rank (?P<rank>\d+)\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<sequence>\d+)"
)
"""A rank whose collective timed out, and the number of that collective."""
_ROOT_CAUSE = "Root Cause (first observed failure)"
_FAILURE = re.compile(
    r"time\s*: (?P<time>\S+)\n\s*host\s*: (?P<host>\S*)\n"
    r"\s*rank\s*: (?P<rank>\d+) .*\n\s*exitcode\s*: (?P<code>-?\d+)"
)
_EXCEPTION = re.compile(r"\[rank(?P<rank>\d+)\]: (?P<type>[A-Za-z_][\w.]*): (?P<message>.*)")
"""Torch prefixes the lines of an uncaught exception once the ranks have joined their group."""


@dataclass(frozen=True)
class RootCause:
    """The rank that failed first on a node, according to its torchrun."""

    time: str
    rank: int
    host: str
    code: int
    """Its exit code; negative for a signal."""
    index: int
    """The line of the text."""


def root_causes(text: Text) -> list[RootCause]:
    """The first failure that torchrun reports in a log, unless torchrun stopped that rank itself."""
    joined = "\n".join(text.lines)
    start = joined.rfind(_ROOT_CAUSE)
    found = _FAILURE.search(joined, start) if start >= 0 else None
    if found is None or int(found["code"]) == -signal.SIGTERM:
        return []
    index = joined.count("\n", 0, found.start("code"))
    return [RootCause(found["time"], int(found["rank"]), found["host"], int(found["code"]), index)]


def exception_of(text: Text, rank: int) -> tuple[int, str, str] | None:
    """(line, type, message) of the uncaught exception of a rank; None without one."""
    for index in range(len(text.lines) - 1, -1, -1):
        found = _EXCEPTION.match(text.lines[index])
        if found is not None and int(found["rank"]) == rank:
            return index, found["type"], found["message"]
    return None


def describe_signal(number: int) -> str:
    """The name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
