"""Check the user's code in a separate process, because only the trainer may import torch."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

from trainkit.config import LoadedConfig
from trainkit.config.optimizers import is_own
from trainkit.config.training import DECODER
from trainkit.errors import KeyProblem, Problem, TrainkitError, UsageError, print_note
from trainkit.job.processes import module_argv
from trainkit.run.own_folders import own_environ
from trainkit.shipped import TASK_CHECK

CHECK_TIMEOUT_S = 60.0
PREFIX = "problems: "
"""Marks the output line with the result, because the user's code may also print to stdout."""
TRIED = "tried: "
"""Marks the output line that says what `check --task-smoke` has tried."""
CODE_CHECK = "trainkit.trainer.task_check"


def find_code_problems(loaded: LoadedConfig, folder: Path) -> list[Problem]:
    """Return the problems that the trainer would find in the code of the user.

    The code defines a task, an architecture, an optimizer or a schedule. File paths are relative to `folder`.
    Prints a note and returns an empty list if the code cannot run on this host within `CHECK_TIMEOUT_S`,
    because the code may still run in the job's environment.
    """
    config = loaded.config
    launch = config.launch
    elsewhere = (launch.venv, launch.conda, launch.uv, launch.container, launch.python)
    if any(elsewhere) or launch.modules or launch.setup:
        return []
    (key, file), optimizer, schedule = config.model_source, config.optimizer.name, config.schedule
    sections: dict[str, bool | set[str]] = {"parallel": True}
    if key == "task":
        sections |= {"task": True, "task_args": True, "optimizer": {"name", "state_dtype", "groups"}}
    elif config.model.hf is not None:
        sections, file = {**sections, "model": True}, f"{config.model.hf}/config.json:"
    elif file != DECODER:
        sections |= {"model": True, "data": True, "optimizer": True}
    elif not (is_own(optimizer) or config.optimizer.groups or schedule.is_own):
        return []
    if is_own(optimizer) or config.optimizer.groups:
        sections |= {"optimizer": True, "model": True, "data": True}
    if schedule.is_own:
        sections |= {"schedule": True, "train": {"steps", "epochs"}}
    # `_check` caches its result for these values, because most trials of a sweep share them. The modification
    # time of a file is part of the cache key; a module is identified only by its name.
    values = config.model_dump_json(by_alias=True, include=sections)
    files = [folder / name.rpartition(":")[0] for name in (file, optimizer, schedule.name)]
    modified_ns = tuple(path.stat().st_mtime_ns if path.is_file() else 0 for path in files)
    checked = key
    if file == DECODER:
        checked = "schedule" if schedule.is_own and not is_own(optimizer) else "optimizer"
    return [loaded.problem(*item) for item in _check(checked, values, folder, tuple(files), modified_ns)]


@lru_cache
def _check(
    key: str, values: str, folder: Path, files: tuple[Path, ...], modified_ns: tuple[int, ...]
) -> list[KeyProblem]:
    try:
        return _problems("", output_of("trying it", module_argv(CODE_CHECK), values, CHECK_TIMEOUT_S, folder))
    except (subprocess.TimeoutExpired, TrainkitError) as error:
        is_slow = isinstance(error, subprocess.TimeoutExpired)
        reason = f"loading it took more than {CHECK_TIMEOUT_S:g} s" if is_slow else str(error)
        print_note(f"note: {key} was not checked on this host: {reason}; the trainer checks it in the job")
        return []


def task_problems(
    loaded: LoadedConfig, option: Literal["--smoke", "--samples"]
) -> tuple[list[KeyProblem], str]:
    """Return problems that occur when a task trains on some samples on a CPU, or reads all samples.

    Each problem refers to the config key or task method that causes it. With ``--smoke``, also returns a
    sentence which says what was tried; the sentence is empty if there are problems. Raises TrainkitError if
    the process that executes the task crashes.
    """
    task = loaded.config.task
    if not loaded.config.has_user_task:
        hint = "set task to FILE.py:CLASS; for text files, use `trainkit data validate SRC...`"
        raise UsageError(f"task is {task}, which is not a custom task", hint=hint)
    values = loaded.config.model_dump_json(by_alias=True)
    text = output_of(f"trying {task}", module_argv(TASK_CHECK, option), values)
    tried = [line.removeprefix(TRIED) for line in text.splitlines() if line.startswith(TRIED)]
    return _problems(task, text), tried[-1] if tried else ""


def _problems(task: str, text: str) -> list[KeyProblem]:
    """Return the problems in the output of a process that has tried a task."""
    answers = [line for line in text.splitlines() if line.startswith(PREFIX)]
    if not answers:
        message = f"the check of {task} failed: its process exited without a result"
        raise TrainkitError(
            message, hint="code in the file exits the Python process; run `python FILE.py` to find this code"
        )
    found = json.loads(answers[-1].removeprefix(PREFIX))
    return [(key, message, hint) for key, message, hint in found]


def output_of(
    what: str, argv: Sequence[str], text: str = "", timeout_s: float | None = None, folder: Path | None = None
) -> str:
    """Return the stdout of a process; `what` is its name in error messages.

    Raises TrainkitError with the last line of stderr if the process fails, and TimeoutExpired on timeout.
    """
    done = subprocess.run(
        argv,
        input=text,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        cwd=folder,
        env=own_environ(),
    )
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise TrainkitError(
            f"{what} failed: {' '.join(last) or f'exit code {done.returncode}'}",
            hint="`trainkit --debug …` shows its full output",
        ) from RuntimeError(done.stderr)
    return done.stdout
