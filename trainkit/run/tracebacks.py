"""Find exceptions in program output, including those with torch's rank prefixes or in exception groups."""

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
"""The exception that torchrun raises if a rank fails; it does not contain the cause."""
MAX_LINES_AFTER = 20
"""If more lines of output than this follow an exception, the program has probably handled it."""

_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+)')
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_INSTALLED = re.compile(
    r"^<|/(?:site|dist)-packages/|/lib(?:64)?/python\d[.\d]*/"
    r"|/[a-z2-7]{2}/c[a-z2-7]{51}\.py$"  # code that torch.compile has generated
)
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


@dataclass(frozen=True)
class CodeLine:
    """A line of the user's code in a traceback."""

    file: str = ""
    """The path of the file; relative if the file is in the folder that the run was submitted from."""
    line: int = 0
    text: str = ""
    """The source text; empty if Python could not read it."""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def shown(self) -> str:
        """Return the file, the line number and, if known, the source text, for a message."""
        return f"{self.place}: {self.text}" if self.text else self.place

    def in_tree(self, job: JobRecord) -> CodeLine:
        """Return this line in the user's original file, if the run has executed a copy of the code."""
        file, code = self.file, job.code
        if code is not None and code.code:
            for copy in (code.code, RunDir(Path(code.code).parent).work_dir):
                if file.startswith(f"{copy}{os.sep}"):
                    file = str(Path(code.source, os.path.relpath(file, copy)))
        if job.cwd and file.startswith(f"{job.cwd}{os.sep}"):
            file = os.path.relpath(file, job.cwd)
        return replace(self, file=file)


def is_of_user(file: str) -> bool:
    """Return whether a file in a traceback belongs to the user, not to Python, trainkit or a package."""
    return not _INSTALLED.search(file) and not file.startswith(_PACKAGE)


def users_line(traceback: Sequence[str]) -> CodeLine | None:
    """Return the innermost line of the user's code in the last traceback in `traceback`; None without one.

    Chained exceptions count as parts of the same traceback.
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
    """The index of the line with the exception's type and message."""
    type: str
    message: str
    """The first line of the exception's message."""
    code: CodeLine | None
    """The innermost line of the user's code; None if there is none."""
    tail: list[str]
    """The lines up to and including the line with the exception's type and message."""


def last_exception(lines: Sequence[str]) -> Raised | None:
    """Return the exception whose traceback ends a program's output; None if the output ends otherwise."""
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
    """Return a rank's uncaught exception, which has torch's rank prefix; None if there is none."""
    prefix = f"[rank{rank}]: "
    own = [(index, line[len(prefix) :]) for index, line in enumerate(lines) if line.startswith(prefix)]
    return _last(_without_margins(own))


def first_raising_rank(lines: Sequence[str]) -> tuple[int, int] | None:
    """Return (rank, line index) of the first uncaught exception in the output of several ranks.

    Returns None if many lines of other output follow the exception.
    """
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
    """Return whether the lines above `index` are an indented traceback that contains a file name."""
    for at in range(index - 1, -1, -1):
        line = lines[at]
        if not line.startswith(" "):
            return False
        if line.startswith('  File "'):
            return True
    return False


def _without_margins(lines: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """Remove the margins that Python draws around exception groups; the line numbers are kept."""
    if not any(_GROUP in line for _, line in lines):
        return list(lines)
    return [(index, _MARGIN.sub("", line, count=1)) for index, line in lines]


def is_quit(kind: str) -> bool:
    """Return whether a failure is the exception that pdb raises for the command `q`."""
    return kind.rpartition(".")[2] == "BdbQuit"
