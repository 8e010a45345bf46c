"""Define the exceptions of trainkit and its exit codes, and print notes.

::

    TrainkitError            exit 1   the command failed
    ├── UsageError           exit 2   wrong flag, wrong file, wrong state of a run
    │   └── ConfigError      exit 2   one or more `Problem`s of a config
    ├── SlurmError           exit 3   Slurm cannot be reached: try again
    ├── CheckpointError      exit 1   no intact checkpoint
    └── FatalError           exit 78  an error that a restart of a worker cannot fix
        └── DivergedError    exit 78  non-finite loss or gradients

Workers use further exit codes: see `EXIT_*` below.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_TRY_AGAIN = 3
EXIT_STUCK = 70
"""A rank exited before the deadline because its peers did not respond."""
EXIT_STOPPED = 75
"""The state is saved and the run can be resumed."""
EXIT_NO_RESTART = 78
"""A restart cannot help, because the config is wrong or the run diverged."""
EXIT_INTERRUPTED = 130


class TrainkitError(Exception):
    """The base class of all errors: `message` says what happened, and `hint` what the user can do.

    ``str(error)`` is the message. A traceback ends with both texts, except in Python 3.10, which prints no
    notes.
    """

    exit_code = EXIT_FAILED

    def __init__(self, message: str, hint: str = "", exit_code: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint = hint.rstrip()  # `did_you_mean` ends with a space
        if hint:
            self.__notes__ = [f"hint: {hint}"]
        if exit_code is not None:
            self.exit_code = exit_code

    def render(self) -> str:
        """Return the error as text: ``error: …``, a blank line, ``hint: …``."""
        text = f"error: {self.message}"
        return f"{text}\n\nhint: {self.hint}" if self.hint else text


class UsageError(TrainkitError):
    """Raised if a command cannot be carried out: a wrong flag, file or state of a run."""

    exit_code = EXIT_USAGE


@dataclass(frozen=True)
class Problem:
    """One problem of a config."""

    key: str
    """The dotted key, for example ``train.steps``; empty if the problem is not about a single key."""
    message: str
    """A description of the problem, with the value."""
    origin: str = ""
    """The source of the value: ``configs/x.yaml:12``, ``--set train.steps=0``, ``TRAINKIT_SEED``."""
    hint: str = ""

    @property
    def sentence(self) -> str:
        """Return the key and the message in one line."""
        return f"{self.key} {self.message}".strip()

    @property
    def statement(self) -> str:
        """Return the origin, the key and the message, without the hint."""
        return "".join(f"{part}: " for part in (self.origin, self.key) if part) + self.message

    def render(self) -> str:
        """Return the problem as an item of a list, with its hint indented below."""
        return f"{self.statement}\n  hint: {self.hint}" if self.hint else self.statement

    @property
    def line(self) -> int | None:
        """Return the line of the file that contains the value; None if the value is not from a file."""
        file, _, line = self.origin.rpartition(":")
        # A flag may end in :00 too, so an origin that begins with a flag is not a file.
        return int(line) if line.isdigit() and not file.startswith("--") else None

    def to_dict(self) -> dict[str, str | int | None]:
        """Return the problem for ``--json``; with a `line`, `origin` is the file alone."""
        return {
            "key": self.key,
            "origin": self.origin if self.line is None else self.origin.rpartition(":")[0],
            "line": self.line,
            "message": self.message,
            "hint": self.hint,
        }


KeyProblem = tuple[str, str, str]
"""The dotted key, message and hint of a problem; the origin of the value is added later."""


class ConfigError(UsageError):
    """Raised with all problems of a config.

    `message` lists the problems with their hints, while `hint` has the hints alone.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        count = len(self.problems)
        message = "\n".join(problem.render() for problem in self.problems)
        if count > 1:
            message = f"{count} problems\n\n{message}"
        super().__init__(message)
        self.hint = "\n".join(dict.fromkeys(problem.hint for problem in self.problems if problem.hint))

    def render(self) -> str:
        if len(self.problems) != 1:
            return f"error: {self.message}"
        return UsageError(self.problems[0].statement, self.hint).render()

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[Problem]]]:
        return type(self), (self.problems,)  # by default, only the message of an exception is pickled


class SlurmError(TrainkitError):
    """Raised if Slurm cannot be reached; the request itself may be valid."""

    exit_code = EXIT_TRY_AGAIN


class CheckpointError(TrainkitError):
    """Raised if there is no intact checkpoint."""


class FatalError(TrainkitError):
    """Raised by a worker for an error that a restart cannot fix."""

    exit_code = EXIT_NO_RESTART


class DivergedError(FatalError):
    """Raised if loss or gradients are not finite."""


PACKAGE = __name__.partition(".")[0]


def warn_caller(text: str) -> None:
    """Issue a warning at the line of the program that called trainkit."""
    import warnings

    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in (PACKAGE, "contextlib"):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def replace_unencodable() -> None:
    """Make stdout and stderr replace characters that the locale cannot encode.

    For a process of a run, whose output is in a log: an encoding error must not end the run.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors != "backslashreplace":
            # a terminal that is opened for reading and writing cannot be reconfigured
            with suppress(OSError):
                stream.reconfigure(errors="replace")


def print_note(text: str) -> None:
    """Print a sentence to stderr and flush."""
    print(text, file=sys.stderr, flush=True)
