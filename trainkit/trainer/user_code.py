"""Import a user's task class, and report, with file and line, why a task cannot be trained."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from trainkit.config.schema import RunConfig
from trainkit.config.training import OptimizerConfig
from trainkit.errors import FatalError, Problem, TrainkitError
from trainkit.run.record import copied_file, copied_folder
from trainkit.run.rundir import RunDir
from trainkit.run.tracebacks import is_of_user
from trainkit.shipped import TASKS
from trainkit.task import Task

TRACEBACK_HINT = "run the code in a Python shell to see the traceback"


class TaskError(FatalError):
    """An error in a task that prevents training."""

    def __init__(self, key: str, message: str, hint: str = "") -> None:
        super().__init__(f"{key} {message}", hint)
        self.problem = Problem(key, message, hint=hint)


def refusal(config: RunConfig, message: str, hint: str = "") -> TaskError:
    """Return an error for a task or `model.hf` that cannot be trained; `message` follows the word "but"."""
    key, value = ("model.hf", config.model.hf) if config.uses_transformers else ("task", config.task)
    return TaskError(key, f"is {value}, but {message}", hint)


def problem_of(config: RunConfig, error: TrainkitError) -> Problem:
    """Convert an error in a task or model to a problem with a config key."""
    if isinstance(error, TaskError):
        return error.problem
    key, _, message = error.message.partition(" ")
    if key.startswith(("model.lora", "model.hf", "model.quantize")):
        return Problem(key, message, hint=error.hint)
    if config.has_user_task:
        return refusal(config, error.message, error.hint).problem
    return Problem("model.hf", error.message, hint=error.hint)


@contextmanager
def errors_of_user(
    config: RunConfig, failed: str, but: type[Exception] | tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Convert any exception in user code to a TaskError with file and line.

    Exceptions whose type is in `but` are not converted, because a restart may help.
    """
    try:
        yield
    except TrainkitError:
        raise
    except but:
        raise
    except Exception as error:
        raise refusal(config, f"{failed}: {describe(error)}", TRACEBACK_HINT) from error


def import_file(path: Path, *, as_script: bool = True) -> ModuleType:
    """Import a file; with `as_script`, it can import files next to it, like a script run with Python."""
    name = f"trainkit_task_{path.stem}"
    if as_script:
        name = path.stem if path.stem not in sys.modules else name
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Data workers unpickle instances of the module's classes by name, and dataclasses look up their module by
    # name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def named_in_file(key: str, name: str, hint: str, run: RunDir | None) -> tuple[Path, object]:
    """Return the file and the object that `name` specifies as FILE.py:NAME; the object may be None.

    If `run` is given, the file is loaded from the run's code snapshot, so that later edits have no effect.
    Raises TaskError for the config key `key` if there is no such file, or if it cannot be imported.
    """
    file, _, own_name = name.rpartition(":")
    path = Path(file).absolute() if run is None else copied_file(run, file)
    if not path.is_file():
        raise TaskError(key, f"is {name}, but there is no file {path}", hint)
    try:
        module = import_file(path, as_script=False)
    except TrainkitError:
        raise
    except Exception as error:
        message = f"is {name}, but {path} cannot be imported: {describe(error)}"
        raise TaskError(key, message, TRACEBACK_HINT) from error
    return path, getattr(module, own_name, None)


def describe(error: BaseException) -> str:
    """Return an exception as text, with the innermost line that is not in an installed package."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return f"{text} ({error.filename}:{error.lineno})"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_of_user(frame.filename):
            return f"{text} ({frame.filename}:{frame.lineno})"
    return text


def line_of(function: object) -> str:
    """Return `` at FILE:LINE`` for a function written in Python, or "" for any other object."""
    code = getattr(function, "__code__", None)
    return "" if code is None else f" at {code.co_filename}:{code.co_firstlineno}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """Join the first `most` names, and append how many names were omitted."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def load_task_class(config: RunConfig, run: RunDir | None = None) -> type[Task]:
    """Return the class that ``task`` specifies, as FILE.py:CLASS or MODULE:CLASS.

    If `run` is given, the class is imported from the run's code snapshot, so that later edits have no effect.
    Raises TaskError if the class cannot be imported, does not implement all of Task, or does not accept
    ``task_args``.
    """
    shipped = TASKS.get(config.task)
    module_name, _, class_name = (config.task if shipped is None else shipped.place).rpartition(":")
    with errors_of_user(config, "cannot be imported"):
        module = _import(config, module_name, run)
    found = getattr(module, class_name, None)
    where = module.__file__ or module_name
    if not (isinstance(found, type) and issubclass(found, Task)):
        hint = "a task is a subclass of trainkit.task.Task"
        raise refusal(config, f"{where} does not define {class_name} as a subclass of Task", hint)
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if found.loss is Task.loss and found.turns is Task.turns:
        missing.append("loss")
    if missing:
        place = f"{where}:{inspect.getsourcelines(found)[1]}"
        raise refusal(config, f"{class_name} does not define {', '.join(missing)}", f"see {place}")
    _check(config, found)
    return found


def _import(config: RunConfig, name: str, run: RunDir | None) -> ModuleType:
    if not name.endswith(".py"):
        folder = str(Path.cwd() if run is None else copied_folder(run))
        if folder not in sys.path:
            sys.path.insert(0, folder)
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the task's module exists, but imports another module that is missing
            hint = f"use a module in {folder} or an installed one, or a file: FILE.py:CLASS"
            raise refusal(config, f"there is no module {error.name}", hint) from None
    path = Path(name).absolute() if run is None else copied_file(run, name)
    if not path.is_file():
        raise refusal(config, f"there is no file {path}", "FILE.py is relative to the current folder")
    return import_file(path)


def _check(config: RunConfig, found: type[Task]) -> None:
    """Raise TaskError if the task's class does not accept `task_args` or does not support the layout."""
    tp = config.parallel.tp
    if tp > 1 and found.tensor_plan is Task.tensor_plan:
        message = f"is {tp}, but {found.__name__} does not define tensor_plan"
        hint = "define tensor_plan() (see docs/own-task.md), or remove parallel.tp and set parallel.dp_shard"
        raise TaskError("parallel.tp", message, hint)
    for name, needs in (
        ("turns", "optimizers"),
        ("turns", "loss_for"),
        ("state_dict", "load_state_dict"),
        ("load_state_dict", "state_dict"),
    ):
        if getattr(found, name) is not getattr(Task, name) and getattr(found, needs) is getattr(Task, needs):
            message = f"{found.__name__} defines {name}() and not {needs}()"
            raise refusal(config, message, f"define {needs}(), or remove {name}()")
    for key in ("name", "state_dtype", "groups") if found.optimizers is not Task.optimizers else ():
        value = getattr(config.optimizer, key)
        if value != getattr(OptimizerConfig(), key):
            shown = f"is {value}" if isinstance(value, str) else "is set"
            message = f"{shown}, but {found.__name__} defines its own optimizers"
            raise TaskError(f"optimizer.{key}", message, f"remove optimizer.{key}, or remove optimizers()")
    signature = inspect.signature(found)
    try:
        signature.bind(config, **config.task_args)
    except TypeError as error:
        known = list(signature.parameters)[1:]
        takes = f"{found.__name__} takes {', '.join(known) if known else 'no task_args'}"
        raise TaskError("task_args", f"do not fit: {error}", takes) from None
