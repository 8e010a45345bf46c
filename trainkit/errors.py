"""Defines trainkit's exceptions and exit codes, and prints notes.

::

    TrainkitError            exit 1   the command failed
    ├── UsageError           exit 2   wrong flag, wrong file, wrong state of a run
    │   └── ConfigError      exit 2   one or more `Problem`s of a config
    ├── SlurmError           exit 3   Slurm cannot be reached: try again
    ├── CheckpointError      exit 1   no intact checkpoint, or a save that failed
    └── FatalError           exit 78  an error that a restart of a worker cannot fix
        └── DivergedError    exit 78  non-finite loss or gradients

Workers use additional exit codes; see `EXIT_*` below.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from typing import TypedDict

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_TRY_AGAIN = 3
EXIT_STUCK = 70
"""A rank made no progress and exited by itself, before the supervisor or a timeout killed it."""
EXIT_STOPPED = 75
"""The state was saved, so the run can be resumed."""
EXIT_NO_RESTART = 78
"""A restart cannot help, because the config is wrong or the run has diverged."""
EXIT_TIMEOUT = 124
"""The timeout of `trainkit wait` has expired; the program `timeout` uses the same exit code."""
EXIT_INTERRUPTED = 130


class TrainkitError(Exception):
    """Base class of all errors: `message` describes what happened, and `hint` what the user can do.

    ``str(error)`` is the message. Tracebacks end with the message and the hint, except in Python 3.10, which
    does not print exception notes.
    """

    exit_code = EXIT_FAILED

    def __init__(self, message: str, hint: str = "", exit_code: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint = hint.rstrip()  # the result of `did_you_mean` ends with a space
        if hint:
            self.__notes__ = [f"hint: {hint}"]
        if exit_code is not None:
            self.exit_code = exit_code

    def render(self) -> str:
        """Return the error as text: ``error: …``, a blank line, ``hint: …``."""
        text = f"error: {self.message}"
        return f"{text}\n\nhint: {self.hint}" if self.hint else text


class UsageError(TrainkitError):
    """Raised if a command cannot run because of a wrong flag, a wrong file or the state of a run."""

    exit_code = EXIT_USAGE


class ProblemJson(TypedDict):
    """A problem of a config, as printed by ``--json``."""

    key: str
    """The dotted config key; empty if the problem does not concern a single key."""
    origin: str
    """Where the value comes from, such as a file or an option."""
    line: int | None
    """The number of the line if `origin` is a file."""
    message: str
    hint: str


class _ErrorJson(TypedDict):
    error: str
    """Describes what happened."""
    hint: str
    """Tells the user what to do; empty if there is no advice."""
    exit_code: int


class ErrorJson(_ErrorJson, total=False):
    """An error, which a command with ``--json`` prints instead of its result."""

    problems: list[ProblemJson]
    """All problems of the config, if the config is invalid."""


@dataclass(frozen=True)
class Problem:
    """A single problem found in a config."""

    key: str
    """Dotted key, for example ``train.steps``; empty if the problem does not concern a single key."""
    message: str
    """Description of the problem, including the value."""
    origin: str = ""
    """Where the value comes from: ``configs/x.yaml:12``, ``--set train.steps=0``, ``TRAINKIT_SEED``."""
    hint: str = ""

    @property
    def sentence(self) -> str:
        """Return the key and the message on one line."""
        return f"{self.key} {self.message}".strip()

    @property
    def statement(self) -> str:
        """Return the origin, the config key and the message, without the hint."""
        return "".join(f"{part}: " for part in (self.origin, self.key) if part) + self.message

    def render(self) -> str:
        """Return the problem as a list item, with its hint indented below."""
        return f"{self.statement}\n  hint: {self.hint}" if self.hint else self.statement

    @property
    def line(self) -> int | None:
        """Return the line number of the value in its file, or None if the value does not come from a file."""
        file, _, line = self.origin.rpartition(":")
        # An origin such as `--set name=a:8` also ends with a colon and digits, but is not FILE:LINE.
        return int(line) if line.isdigit() and not file.startswith("--") else None

    def to_dict(self) -> ProblemJson:
        """Return the problem for ``--json``; if there is a `line`, `origin` contains only the file."""
        return {
            "key": self.key,
            "origin": self.origin if self.line is None else self.origin.rpartition(":")[0],
            "line": self.line,
            "message": self.message,
            "hint": self.hint,
        }


KeyProblem = tuple[str, str, str]
"""Config key, message and hint of a problem. The origin of the key's value is added later."""


class ConfigError(UsageError):
    """Raised with all problems that were found in a config.

    `message` lists the problems with their hints, while `hint` contains only the hints.
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
        return type(self), (self.problems,)  # By default, an exception is pickled with only its message.


class SlurmError(TrainkitError):
    """Raised if Slurm cannot be reached. The request itself may be valid."""

    exit_code = EXIT_TRY_AGAIN


class CheckpointError(TrainkitError):
    """Raised if there is no intact checkpoint, or if the final save failed."""


class FatalError(TrainkitError):
    """Raised by a worker for an error that a restart cannot fix."""

    exit_code = EXIT_NO_RESTART


class DivergedError(FatalError):
    """Raised if the loss or the gradients are not finite."""


PACKAGE = __name__.partition(".")[0]


def warn_caller(text: str) -> None:
    """Issue a warning that points to the line of the user program that called trainkit."""
    import warnings

    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in (PACKAGE, "contextlib"):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def replace_unencodable() -> None:
    """Make stdout and stderr replace characters that the locale cannot encode.

    Used in the processes of a run, so that an encoding error in the log cannot terminate them.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors != "backslashreplace":
            # A terminal opened for both reading and writing cannot be reconfigured.
            with suppress(OSError):
                stream.reconfigure(errors="replace")


def print_note(text: str) -> None:
    """Print a sentence to stderr and flush the stream."""
    print(text, file=sys.stderr, flush=True)
