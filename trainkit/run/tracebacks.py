"""The exceptions in what programs print: torch prefixes their lines with the rank, Python indents a group."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.run.rundir import RunDir

if TYPE_CHECKING:
    from trainkit.run.record import JobRecord

_EXCEPTION = re.compile(r"([^\W\d][\w.<>]*)(?:: (.*))?")
_RANK_PREFIX = re.compile(r"\[rank(\d+)\]: ?")
"""The prefix that torch adds to the lines of a traceback in a multi-rank job."""
_FIRST_LINE = re.compile(r"\[rank(?P<rank>\d+)\]: (?:Traceback \(|  \+ Exception Group Traceback \()")
_GROUP = "+ Exception Group Traceback ("
_MARGIN = re.compile(r" +(?:\| ?|\+(?=-))")
LAUNCHER_ERROR = "ChildFailedError"
"""The exception that torchrun raises when a rank fails; it does not name the cause."""
MAX_LINES_AFTER = 20
"""An exception further from the end of the output counts as handled by the program."""

_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+)')
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_INSTALLED = re.compile(
    r"^<|/(?:site|dist)-packages/|/lib(?:64)?/python\d[.\d]*/"
    r"|/[a-z2-7]{2}/c[a-z2-7]{51}\.py$"  # made by torch.compile, in any TORCHINDUCTOR_CACHE_DIR
)
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


@dataclass(frozen=True)
class CodeLine:
    """A line of the user's own code."""

    file: str = ""
    """Relative to the folder that the run was submitted from, if it is below."""
    line: int = 0
    text: str = ""
    """Empty where Python could not read it."""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def shown(self) -> str:
        """The place, with the text if it is known."""
        return f"{self.place}: {self.text}" if self.text else self.place

    def in_tree(self, job: JobRecord) -> CodeLine:
        """The line in the tree that the user edits, if the run has executed a copy of it."""
        file, code = self.file, job.code
        if code is not None and code.code:
            for copy in (code.code, RunDir(Path(code.code).parent).work_dir):
                if file.startswith(f"{copy}{os.sep}"):
                    file = str(Path(code.source, os.path.relpath(file, copy)))
        if job.cwd and file.startswith(f"{job.cwd}{os.sep}"):
            file = os.path.relpath(file, job.cwd)
        return replace(self, file=file)


def is_of_user(file: str) -> bool:
    """Whether the file of a frame is neither of an installed package, nor of Python or trainkit."""
    return not _INSTALLED.search(file) and not file.startswith(_PACKAGE)


def users_line(traceback: Sequence[str]) -> CodeLine | None:
    """The innermost line of the user's own code in the traceback that ends these lines; None without one.

    An exception that was raised for another one counts with it.
    """
    for index in range(len(traceback) - 1, -1, -1):
        frame = _FRAME.match(traceback[index])
        if frame is not None and is_of_user(frame["file"]):
            source = traceback[index + 1] if index + 1 < len(traceback) else ""
            text = source.strip() if source.startswith("    ") else ""
            return CodeLine(frame["file"], int(frame["line"]), text)
        before = traceback[max(0, index - 2) : index]
        begins = traceback[index].startswith("Traceback ") or _GROUP in traceback[index]
        if begins and not any(one.startswith(_CHAINED) for one in before):
            return None
    return None


@dataclass(frozen=True)
class Raised:
    """An exception that ended a program."""

    index: int
    """The line of its type and message."""
    type: str
    message: str
    """Its first line."""
    code: CodeLine | None
    """The innermost line of the user's own code."""
    tail: list[str]
    """The lines up to that of its type and message."""


def last_exception(lines: Sequence[str]) -> Raised | None:
    """The exception whose traceback ends a program's output; None if the output does not end with one."""
    found = _without_margins(
        [(index, _RANK_PREFIX.sub("", line, count=1)) for index, line in enumerate(lines)]
    )
    raised, launched = _last(found), False
    while raised is not None and raised.type.endswith(LAUNCHER_ERROR):
        raised, launched = _last([one for one in found if one[0] < raised.index]), True
    if raised is None or launched:
        return raised
    after = [one for one in found if one[0] > raised.index]
    return raised if len(after) < MAX_LINES_AFTER else None


def exception_of(lines: Sequence[str], rank: int) -> Raised | None:
    """The uncaught exception of a rank, according to torch's prefix; None without one."""
    prefix = f"[rank{rank}]: "
    own = [(index, line[len(prefix) :]) for index, line in enumerate(lines) if line.startswith(prefix)]
    return _last(_without_margins(own))


def first_raising_rank(lines: Sequence[str]) -> tuple[int, int] | None:
    """(rank, line) of the first uncaught exception in the output of several ranks, if it ends with them."""
    for index, line in enumerate(lines):
        if found := _FIRST_LINE.match(line):
            others = sum(not _RANK_PREFIX.match(line) for line in lines[index:])
            return (int(found["rank"]), index) if others <= MAX_LINES_AFTER else None
    return None


def _last(lines: Sequence[tuple[int, str]]) -> Raised | None:
    plain = [line for _, line in lines]
    for position in range(len(plain) - 1, 0, -1):
        found = _EXCEPTION.fullmatch(plain[position])
        if found is not None and _follows_a_traceback(plain, position):
            above = plain[: position + 1]
            return Raised(lines[position][0], found[1], found[2] or "", users_line(above), above)
    return None


def _follows_a_traceback(lines: Sequence[str], index: int) -> bool:
    """Whether the lines above `index` are a traceback: indented, with a line that names a file."""
    for at in range(index - 1, -1, -1):
        line = lines[at]
        if not line.startswith(" "):
            return False
        if line.startswith('  File "'):
            return True
    return False


def _without_margins(lines: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """The numbered lines; those of an exception group without the margins that Python draws."""
    if not any(_GROUP in line for _, line in lines):
        return list(lines)
    return [(index, _MARGIN.sub("", line, count=1)) for index, line in lines]


def is_quit(kind: str) -> bool:
    """Whether a failure of this type is the end of `pdb`, in which a person has typed `q`."""
    return kind.rpartition(".")[2] == "BdbQuit"
