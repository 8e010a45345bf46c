"""The exception that ended a Python program, found at the end of what it printed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainkit.frozen import dataclass

_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?")
_RANK_PREFIX = re.compile(r"\[rank\d+\]: ?")
"""What torch writes before the lines of a traceback where there are several ranks."""
LAUNCHER_ERROR = "ChildFailedError"
"""What torchrun raises when a rank failed; it says nothing about why."""
LAST_WORDS = 20
"""So many lines before its end, an exception is what ended the program and not one that it got over."""
FINAL = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError")


@dataclass(frozen=True)
class Raised:
    """An exception that nobody caught."""

    type: str
    message: str

    @property
    def is_final(self) -> bool:
        """Whether it would be raised again if the program was started again."""
        return self.type in FINAL


def last_exception(lines: Sequence[str]) -> Raised | None:
    """The exception whose traceback ends what a program printed; None when it ended without one."""
    plain = [_RANK_PREFIX.sub("", line, count=1) for line in lines]
    launched = False
    for index in range(len(plain) - 1, 0, -1):
        found = _EXCEPTION.fullmatch(plain[index])
        if found is None or not _follows_a_traceback(plain, index):
            continue
        if found[1].endswith(LAUNCHER_ERROR):
            launched = True
        elif launched or index >= len(plain) - LAST_WORDS:
            return Raised(found[1], found[2] or "")
        else:
            return None
    return None


def _follows_a_traceback(lines: Sequence[str], index: int) -> bool:
    """Whether the lines above are indented, and one of them names a place in a file."""
    for line in reversed(lines[:index]):
        if not line.startswith(" "):
            return False
        if line.startswith('  File "'):
            return True
    return False
