"""Errors of a user's task: what its code raises, with file and line, and why it cannot be trained."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from trainkit.config.schema import RunConfig
from trainkit.errors import EXIT_NO_RESTART, Problem, TrainkitError

TRACEBACK_HINT = "run it in a Python shell to see the traceback"


class TaskError(TrainkitError):
    """A task that cannot be trained; a restart would not change that."""

    exit_code = EXIT_NO_RESTART

    def __init__(self, problem: Problem) -> None:
        super().__init__(f"{problem.key} {problem.message}", problem.hint)
        self.problem = problem


def refusal(config: RunConfig, message: str, hint: str = "") -> TaskError:
    """The error of a task, or of `model.hf`, that cannot be trained, for its `message` after "but"."""
    key, value = ("model.hf", config.model.hf) if config.uses_transformers else ("task", config.task)
    return TaskError(Problem(key, f"is {value}, but {message}", hint=hint))


def problem_of(config: RunConfig, error: TrainkitError) -> Problem:
    """An error of a task or a model as the problem of a config key."""
    if isinstance(error, TaskError):
        return error.problem
    key, _, message = error.message.partition(" ")
    if key.startswith("model."):
        return Problem(key, message, hint=error.hint)
    if config.has_user_task:
        return refusal(config, error.message, error.hint).problem
    return Problem("model.hf", error.message, hint=error.hint)


@contextmanager
def errors_of_user(
    config: RunConfig, failed: str, but: type[Exception] | tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Raise TaskError, with file and line, for whatever the user's code raises.

    Errors of the types in `but` are raised as they are: a restart may help.
    """
    try:
        yield
    except TrainkitError:
        raise
    except but:
        raise
    except Exception as error:
        raise refusal(config, f"{failed}: {describe(error)}", TRACEBACK_HINT) from error


def import_file(path: Path) -> ModuleType:
    """Import a file as Python runs a script: it can import the files next to it."""
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = path.stem if path.stem not in sys.modules else f"trainkit_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Data workers send instances of its classes by name, and dataclasses look up their module.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def describe(error: BaseException) -> str:
    """An exception as text, with the innermost line of a file outside installed packages."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return f"{text} ({error.filename}:{error.lineno})"
    package = str(Path(__file__).parents[1])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        is_installed = "site-packages" in frame.filename or frame.filename.startswith(
            ("<", sys.prefix, package)
        )
        if not is_installed and not frame.filename.startswith(sys.base_prefix):
            return f"{text} ({frame.filename}:{frame.lineno})"
    return text


def line_of(function: object) -> str:
    """`` at FILE:LINE`` of a function in Python; empty for others."""
    code = getattr(function, "__code__", None)
    return "" if code is None else f" at {code.co_filename}:{code.co_firstlineno}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
