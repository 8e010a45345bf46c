"""Everything that trainkit raises on purpose.

::

    TrainkitError            exit 1   the thing failed
    ├── UsageError           exit 2   wrong flag, wrong file, wrong state of a run
    │   └── ConfigError      exit 2   one or more `Problem`s of a config, all at once
    ├── SlurmError           exit 3   Slurm cannot be reached: try again
    ├── CheckpointError      exit 1   no checkpoint that can be trusted
    └── DivergedError        exit 78  training cannot get better by starting again

The exit codes of a *worker* are a contract of their own: see `EXIT_*` below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_TRY_AGAIN = 3
EXIT_STUCK = 70
"""A rank left by itself before the deadline because its peers did not answer."""
EXIT_STOPPED = 75
"""The state is saved and the run wants to continue."""
EXIT_NO_RESTART = 78
"""Starting again cannot help: the config is wrong or the run diverged."""
EXIT_INTERRUPTED = 130


class TrainkitError(Exception):
    """What happened, and in `hint` what to do about it."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, hint: str = "", exit_code: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if exit_code is not None:
            self.exit_code = exit_code

    def render(self) -> str:
        """The error as a person reads it: ``error: …``, a blank line, ``hint: …``."""
        text = f"error: {self.message}"
        return f"{text}\n\nhint: {self.hint}" if self.hint else text


class UsageError(TrainkitError):
    """The command cannot be carried out as it was typed."""

    exit_code = EXIT_USAGE


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a config."""

    key: str
    """Dotted key, for example ``train.steps``; empty when the problem is not about one key."""
    message: str
    """What is wrong, with the value."""
    origin: str = ""
    """Where the value came from: ``configs/x.yaml:12``, ``--set train.steps=0``, ``TRAINKIT_SEED``."""
    hint: str = ""

    def render(self) -> str:
        place = f"{self.origin}: " if self.origin else ""
        subject = f"{self.key}: " if self.key else ""
        text = f"{place}{subject}{self.message}"
        return f"{text}\n  hint: {self.hint}" if self.hint else text


class ConfigError(UsageError):
    """All problems of a config at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        count = len(self.problems)
        message = "\n".join(problem.render() for problem in self.problems)
        if count > 1:
            message = f"{count} problems\n\n{message}"
        super().__init__(message)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[Problem]]]:
        return type(self), (self.problems,)  # an exception is pickled by its message otherwise


class SlurmError(TrainkitError):
    """Slurm did not answer; nothing is wrong with the request as far as we know."""

    exit_code = EXIT_TRY_AGAIN


class CheckpointError(TrainkitError):
    """There is no checkpoint that can be trusted."""


class DivergedError(TrainkitError):
    """Loss or gradients are not finite and will not become so by starting again."""

    exit_code = EXIT_NO_RESTART
