"""Tries the user's code, or simulates a rank, in another process: only the trainer may import torch."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trainkit.cluster.machine import Machine
from trainkit.cluster.target import Target
from trainkit.config import LoadedConfig, dump_effective
from trainkit.config.training import DECODER
from trainkit.data.checks import inspect_data
from trainkit.errors import ConfigError, KeyProblem, Problem, TrainkitError, UsageError
from trainkit.formats import plural
from trainkit.job.processes import module_argv
from trainkit.plan.facts import Facts
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.make_plan import make_plan
from trainkit.run.files import write_atomic
from trainkit.run.own_folders import own_environ

if TYPE_CHECKING:
    from trainkit.plan.memory import Simulation

CHECK_TIMEOUT_S = 60.0
PREFIX = "problems: "
"""Starts the line of the answer, since the user's code may print too."""
CODE_CHECK = "trainkit.trainer.task_check"


def find_code_problems(loaded: LoadedConfig, folder: Path) -> list[Problem]:
    """The problems of `task`, or of `model.architecture` and the layout, that the trainer would refuse.

    Files are relative to `folder`. Empty as well if the code cannot be run here within `CHECK_TIMEOUT_S`: the
    environment of the job may differ, and the trainer checks again.
    """
    config = loaded.config
    launch = config.launch
    elsewhere = (launch.venv, launch.conda, launch.uv, launch.container, launch.python)
    if any(elsewhere) or launch.modules or launch.setup:
        return []
    key, file = config.model_source
    if key == "task":
        sections = {"task", "task_args", "parallel"}
    elif config.model.hf is not None:
        sections, file = {"model", "parallel"}, f"{config.model.hf}/config.json:"
    elif file != DECODER:
        sections = {"model", "data", "parallel"}
    else:
        return []
    # The points of a sweep mostly share these values. A module is searched for by its name alone.
    values = config.model_dump_json(by_alias=True, include=sections)
    path = folder / file.rpartition(":")[0]
    modified_ns = path.stat().st_mtime_ns if path.is_file() else 0
    return [loaded.problem(*item) for item in _check(values, folder, path, modified_ns)]


@lru_cache
def _check(values: str, folder: Path, file: Path, modified_ns: int) -> list[KeyProblem]:
    try:
        return _problems("", values, CHECK_TIMEOUT_S, folder=folder)
    except (subprocess.TimeoutExpired, TrainkitError):
        return []


def task_problems(loaded: LoadedConfig, option: Literal["--smoke", "--samples"]) -> list[KeyProblem]:
    """The problems of a task that show when some samples are trained on, on a CPU, or when all are read.

    Each has the key or the method of the task. Raises TrainkitError if the process that tries it crashes.
    """
    task = loaded.config.task
    if not loaded.config.has_user_task:
        hint = "set task to FILE.py:CLASS; `trainkit data validate SRC...` reads texts"
        raise UsageError(f"there is no task of your own to try: task is {task}", hint=hint)
    return _problems(task, loaded.config.model_dump_json(by_alias=True), None, option)


def _problems(
    task: str, values: str, timeout_s: float | None, *options: str, folder: Path | None = None
) -> list[KeyProblem]:
    text = _run(f"trying {task}", module_argv(CODE_CHECK, *options), values, timeout_s, folder)
    answers = [line for line in text.splitlines() if line.startswith(PREFIX)]
    if not answers:
        message = f"trying {task} failed: its process ended without an answer"
        raise TrainkitError(message, hint="something in the file ends Python: `python FILE.py` shows what")
    found = json.loads(answers[-1].removeprefix(PREFIX))
    return [(key, message, hint) for key, message, hint in found]


def _run(
    what: str, argv: Sequence[str], text: str = "", timeout_s: float | None = None, folder: Path | None = None
) -> str:
    """The output of a process; raises TrainkitError with its last line when it fails, and TimeoutExpired."""
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


GPUS_PER_NODE = 8
"""The GPUs per node of a simulated job if the config does not set them."""


def simulated_plan(loaded: LoadedConfig, world_size: int) -> LaunchPlan:
    """The plan of a run on `world_size` GPUs; raises ConfigError with all problems."""
    loaded.require_decoder(
        ("which cannot be simulated", "--simulate-world needs the task causal_lm"),
        ("whose models cannot be simulated", "--simulate-world needs trainkit's own decoder"),
        or_own=True,
    )
    requested = loaded.config.resources.gpus_per_node
    per_node = min(world_size, GPUS_PER_NODE if requested == "auto" else requested)
    if world_size % per_node:
        message = f"is {world_size}, which is not a multiple of {per_node} GPUs per node"
        raise ConfigError([Problem("--simulate-world", message, hint="set --gpus-per-node N")])
    target = Target("local", "simulated", node_sizes=(per_node,) * (world_size // per_node))
    machine = Machine(1, per_node, (), f"{per_node} simulated GPUs per node")
    return make_plan(loaded, Facts(machine, target, inspect_data(loaded.config.data)))


def simulate(loaded: LoadedConfig, plan: LaunchPlan, rank: int) -> Simulation:
    """Simulate a step of one rank.

    Raises UsageError for a rank that does not exist, TrainkitError when the simulation fails.
    """
    if rank >= plan.world_size:
        raise UsageError(
            f"--rank {rank} does not exist: the run has {plural(plan.world_size, 'rank')}",
            hint="they are counted from 0",
        )
    config = loaded.config
    with tempfile.TemporaryDirectory(prefix="trainkit-simulate-") as name:
        folder = Path(name)
        # Compile and float8 need a GPU or real values, but not more memory. `gather` takes less.
        parallel = config.parallel.model_copy(update={"compile": False})
        precision = config.precision.model_copy(update={"float8": False})
        simulated = config.model_copy(update={"parallel": parallel, "precision": precision})
        write_atomic(folder / "config.yaml", dump_effective(simulated))
        write_atomic(folder / "plan.json", plan.to_text())
        files = [str(folder / "config.yaml"), str(folder / "plan.json")]
        argv = module_argv("trainkit.trainer.simulate", *files, str(rank))
        text = _run(f"the simulation of rank {rank} of {plan.world_size}", argv)
    from trainkit.plan.memory import Simulation

    return Simulation(**json.loads(text.splitlines()[-1]))


def simulation_lines(found: Simulation) -> list[str]:
    """The result of a simulation as text."""
    peak = dict(found.peak_bytes)
    total = peak.pop("total")
    kinds = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in peak.items() if size)
    collectives = ", ".join(f"{count} {kind}" for kind, count in found.collectives.items())
    return [
        f"rank {found.rank} of {found.world_size}: {found.num_params:,} parameters on this rank",
        f"peak memory {total / 2**30:.2f} GiB ({kinds})",
        f"collectives per step: {collectives or 'none'}",
    ]
