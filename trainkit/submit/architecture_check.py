"""Checks the user's own architecture in another process, since only the trainer may import torch."""

from __future__ import annotations

import json
import subprocess
from functools import lru_cache
from pathlib import Path

from trainkit.config import LoadedConfig, RunConfig
from trainkit.errors import Problem
from trainkit.plan.make_plan import OURS

CHECK_TIMEOUT_S = 60.0
PREFIX = "problem: "
"""Starts the line of the answer, since the file of the architecture may print too."""


def find_architecture_problem(loaded: LoadedConfig) -> Problem | None:
    """The problem of `model.architecture` and the layout that the trainer would refuse; None without one.

    None as well if the file cannot be imported here within `CHECK_TIMEOUT_S`: the environment of the job may
    differ, and the trainer checks again.
    """
    config = loaded.config
    launch = config.launch
    elsewhere = (launch.venv, launch.conda, launch.uv, launch.container, launch.python)
    if config.model.architecture == OURS or any(elsewhere) or launch.modules or launch.setup:
        return None
    file = Path(config.model.architecture.rpartition(":")[0]).absolute()
    found = _check(_facts(config), file, file.stat().st_mtime_ns)
    return None if found is None else loaded.problem(*found)


def _facts(config: RunConfig) -> str:
    """The sections on which the result depends, as JSON: the points of a sweep mostly share them."""
    return config.model_dump_json(by_alias=True, include={"model", "data", "parallel"})


@lru_cache
def _check(facts: str, file: Path, modified_ns: int) -> tuple[str, str, str] | None:
    from trainkit.job.processes import module_argv

    try:
        done = subprocess.run(
            module_argv("trainkit.trainer.models.supported_layouts"),
            input=facts,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CHECK_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        return None
    answers = [line for line in done.stdout.splitlines() if line.startswith(PREFIX)]
    found = json.loads(answers[-1].removeprefix(PREFIX))
    return None if found is None else (found[0], found[1], found[2])
