"""Checks the user's own task or architecture in another process: only the trainer may import torch."""

from __future__ import annotations

import json
import subprocess
from functools import lru_cache
from pathlib import Path

from trainkit.config import LoadedConfig, RunConfig
from trainkit.errors import Problem, TrainkitError
from trainkit.plan.facts import KeyProblem
from trainkit.plan.make_plan import OURS

CHECK_TIMEOUT_S = 60.0
PREFIX = "problems: "
"""Starts the line of the answer, since the user's code may print too."""
CODE_CHECK = "trainkit.trainer.task_check"


def find_code_problems(loaded: LoadedConfig) -> list[Problem]:
    """The problems of `task`, or of `model.architecture` and the layout, that the trainer would refuse.

    Empty as well if the code cannot be run here within `CHECK_TIMEOUT_S`: the environment of the job may
    differ, and the trainer checks again.
    """
    config = loaded.config
    launch = config.launch
    elsewhere = (launch.venv, launch.conda, launch.uv, launch.container, launch.python)
    if any(elsewhere) or launch.modules or launch.setup:
        return []
    if config.has_user_task:
        found = _check(_facts(config, "task", "task_args", "parallel"), *_file(config.task))
    elif config.model.hf is not None:
        found = _check(_facts(config, "model", "parallel"), *_file(f"{config.model.hf}/config.json:"))
    elif config.model.architecture != OURS:
        found = _check(_facts(config, "model", "data", "parallel"), *_file(config.model.architecture))
    else:
        return []
    return [loaded.problem(*item) for item in found]


def smoke_problems(loaded: LoadedConfig) -> list[Problem]:
    """The problems of a task that show when a few samples are trained on, on this machine's CPU.

    Raises TrainkitError if the process that tries it crashes.
    """
    return [loaded.problem(*item) for item in _try(loaded, "--smoke")]


def sample_problems(loaded: LoadedConfig) -> list[tuple[str, str]]:
    """The key or method and the message of each sample of a task that cannot be read; reads all of them.

    Raises TrainkitError if the process that reads them crashes.
    """
    return [(key, message) for key, message, _ in _try(loaded, "--samples")]


def _try(loaded: LoadedConfig, option: str) -> list[KeyProblem]:
    done = _run(option, text=loaded.config.model_dump_json(by_alias=True))
    answer = _answer(done)
    if answer is None:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise TrainkitError(
            f"trying {loaded.config.task} failed: {' '.join(last) or f'exit code {done.returncode}'}",
            hint="`trainkit --debug …` shows its full output",
        ) from RuntimeError(done.stderr)
    return answer


def _facts(config: RunConfig, *sections: str) -> str:
    """The values on which the result depends, as JSON: the points of a sweep mostly share them."""
    return config.model_dump_json(by_alias=True, include=set(sections))


def _file(name: str) -> tuple[Path, int]:
    """The file of FILE.py:CLASS and when it was modified; a module is searched for by its name alone."""
    file = Path(name.rpartition(":")[0]).absolute()
    return file, file.stat().st_mtime_ns if file.is_file() else 0


@lru_cache
def _check(facts: str, file: Path, modified_ns: int) -> list[KeyProblem]:
    try:
        return _answer(_run(text=facts, timeout_s=CHECK_TIMEOUT_S)) or []
    except subprocess.TimeoutExpired:
        return []


def _run(*options: str, text: str, timeout_s: float | None = None) -> subprocess.CompletedProcess[str]:
    from trainkit.job.processes import module_argv

    return subprocess.run(
        module_argv(CODE_CHECK, *options),
        input=text,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
    )


def _answer(done: subprocess.CompletedProcess[str]) -> list[KeyProblem] | None:
    answers = [line for line in done.stdout.splitlines() if line.startswith(PREFIX)]
    if done.returncode or not answers:
        return None
    return [(key, message, hint) for key, message, hint in json.loads(answers[-1].removeprefix(PREFIX))]
