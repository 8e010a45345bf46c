"""Loads the class of a user's task from a file or a module."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType

from trainkit.config.schema import MULTIMODAL, RunConfig
from trainkit.errors import Problem
from trainkit.run.record import copied_file, copied_folder
from trainkit.run.rundir import RunDir
from trainkit.task import Task
from trainkit.trainer.task_errors import TaskError, errors_of_user, import_file, refusal

SHIPPED_TASKS = {MULTIMODAL: "trainkit.contrib.multimodal.task:MultimodalLM"}


def load_task(config: RunConfig, run: RunDir | None = None) -> Task:
    """Create the task of a config; raises TaskError if it cannot be imported or created."""
    if config.uses_transformers:
        from trainkit.trainer.hf_task import HFCausalLM

        return HFCausalLM(config)
    found = load_task_class(config, run)
    with errors_of_user(config, f"{found.__name__}() failed"):
        return found(config, **config.task_args)


def load_task_class(config: RunConfig, run: RunDir | None = None) -> type[Task]:
    """The class that ``task`` names: FILE.py:CLASS or MODULE:CLASS.

    A run imports it from its code snapshot, so later edits have no effect. Raises TaskError if it cannot be
    imported, is not a complete Task, or does not take ``task_args``.
    """
    module_name, _, class_name = SHIPPED_TASKS.get(config.task, config.task).rpartition(":")
    with errors_of_user(config, "cannot be imported"):
        module = _import(config, module_name, run)
    found = getattr(module, class_name, None)
    where = module.__file__ or module_name
    if not (isinstance(found, type) and issubclass(found, Task)):
        hint = "a task is a subclass of trainkit.task.Task"
        raise refusal(config, f"{where} has no class {class_name} that is a Task", hint)
    missing = sorted(getattr(found, "__abstractmethods__", ()))
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
                raise  # something that the module itself imports
            hint = f"name a module in {folder} or an installed one, or a file: FILE.py:CLASS"
            raise refusal(config, f"there is no module {error.name}", hint) from None
    path = Path(name).absolute() if run is None else copied_file(run, name)
    if not path.is_file():
        raise refusal(config, f"there is no file {path}", "FILE.py is relative to the current folder")
    return import_file(path)


def _check(config: RunConfig, found: type[Task]) -> None:
    """Raise TaskError if a class does not take `task_args`, or does not support the layout."""
    tp = config.parallel.tp
    if tp > 1 and found.tensor_plan is Task.tensor_plan:
        message = f"is {tp}, but {found.__name__} does not define tensor_plan"
        hint = "it names the modules to split, see docs/own-task.md; or remove parallel.tp and use dp_shard"
        raise TaskError(Problem("parallel.tp", message, hint=hint))
    signature = inspect.signature(found)
    try:
        signature.bind(config, **config.task_args)
    except TypeError as error:
        known = list(signature.parameters)[1:]
        takes = f"{found.__name__} takes {', '.join(known)}" if known else f"{found.__name__} takes none"
        raise TaskError(Problem("task_args", f"do not fit: {error}", hint=takes)) from None
