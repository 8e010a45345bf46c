"""What torchrun, accelerate and DeepSpeed print about the rank that failed first on their node.

They exit with 1, or with the exit code of that rank as a byte: 247 is -9, death by SIGKILL.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from trainkit.run.files import parse_time, seconds_between

_TORCHRUN = re.compile(
    r"time\s*: (?P<time>\S+)\n\s*host\s*: (?P<host>\S*)\n"
    r"\s*rank\s*: (?P<rank>\d+) .*\n\s*exitcode\s*: (?P<code>-?\d+)"
)
"""A rank in the report of torchrun, which accelerate runs for more than one rank."""
_OTHERS = "Failures:"
_ROOT_CAUSE = "Root Cause (first observed failure)"
_ACCELERATE = re.compile(r"in \w+_launcher\n.*\n.* died with <Signals\.\w+: (?P<number>\d+)>")
_DEEPSPEED = re.compile(r"exits with return code = -(?P<number>\d+)")
"""DeepSpeed prints it behind the command of its last rank, whichever has ended."""
AT_ONCE_S = 5.0
"""Torchrun itself kills what is left of its ranks after 30 s."""


@dataclass(frozen=True)
class RankExit:
    """How a rank below a launcher ended."""

    code: int
    """Its exit code; negative for a signal."""
    rank: int | None = None
    """In the world; None when the launcher does not say."""
    index: int = 0
    """The line of its output in which the launcher says so."""
    host: str = ""
    time: str = ""

    @property
    def was_killed(self) -> bool:
        """Whether a signal from outside ended it: launchers send SIGTERM, a rank raises SIGABRT itself."""
        return self.code < 0 and self.code not in (-signal.SIGTERM, -signal.SIGABRT)


def first_exit(lines: Sequence[str]) -> RankExit | None:
    """The rank that failed first; None if the launcher names none, or only one that it has stopped itself."""
    text = "\n".join(lines)
    start = text.rfind(_ROOT_CAUSE)
    if start < 0:
        others = [found for pattern in (_ACCELERATE, _DEEPSPEED) for found in pattern.finditer(text)]
        return RankExit(-int(others[-1]["number"]), index=_line(text, others[-1].end())) if others else None
    exits = [
        RankExit(int(one["code"]), int(one["rank"]), _line(text, one.end()), one["host"], one["time"])
        for one in _TORCHRUN.finditer(text, max(0, text.rfind(_OTHERS, 0, start)))
    ]
    roots = [item for item in exits if item.index > _line(text, start)]
    if not roots:
        return None
    # Of the ranks that ended since it last looked, torchrun calls the one with the lowest number the first.
    killed = (item for item in exits if item.was_killed and _is_at_once(roots[0], item))
    first = next(killed, roots[0])
    return None if first.code == -signal.SIGTERM else first


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position)


def _is_at_once(first: RankExit, second: RankExit) -> bool:
    later_s = seconds_between(first.time, parse_time(second.time))
    return later_s is not None and abs(later_s) < AT_ONCE_S
