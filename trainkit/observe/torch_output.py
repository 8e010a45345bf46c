"""Parses what torch.distributed prints about failed ranks."""

from __future__ import annotations

import re
import signal

from trainkit.observe.run_text import Text

WATCHDOG = re.compile(
    r"\[Rank (?P<rank>\d+)\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<sequence>\d+)"
)
"""A rank whose collective timed out, and the number of that collective."""
_EXCEPTION = re.compile(r"\[rank(?P<rank>\d+)\]: (?P<type>[A-Za-z_][\w.]*): (?P<message>.*)")
"""Torch prefixes the lines of an uncaught exception once the ranks have joined their group."""


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
