"""Checks the Python environment of the ranks: the interpreter, the packages and torch."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from trainkit.capabilities.doctor import Request
from trainkit.cluster.machine import NVIDIA_DRIVER, detect_machine
from trainkit.config import LoadedConfig
from trainkit.job.preflight import Finding, warn_if
from trainkit.launch.environment import find_interpreter
from trainkit.launch.packages import NoAnswer, Packages, ask, find_packages, trainkit_problem
from trainkit.plan.torch_build import TorchBuild, release_problem

PYTHONS = ((3, 10), (3, 13))
"""The oldest and newest Python versions that trainkit is tested with."""
TIMEOUT_S = 120.0
COMPARED = (
    "trainkit",
    "torch",
    "torchao",
    "numpy",
    "transformers",
    "tokenizers",
    "datasets",
    "pyarrow",
    "safetensors",
    "peft",
    "accelerate",
    "deepspeed",
    "lightning",
    "submitit",
    "pydantic",
)
"""Packages whose versions must be the same on all nodes."""
IMPORT_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LD_PRELOAD")
"""Variables in `launch.env` that determine which packages an interpreter imports."""
_TORCH = """
import json, sys, torch
nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
print(sys.argv[1], json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda or "none", "gpus": torch.cuda.device_count(),
    "nccl": "none" if nccl is None else ".".join(map(str, nccl)),
    "distributed": torch.distributed.is_available(),
}))
"""
"""The script runs in a separate process, because importing torch takes seconds and a broken torch may
crash."""


@lru_cache
def _packages(request: Request) -> Packages | NoAnswer:
    """Return the `COMPARED` packages installed in the ranks' environment; the result is cached."""
    try:
        return find_packages(request.python, COMPARED, dict(request.env), timeout_s=TIMEOUT_S)
    except NoAnswer as error:
        return error


@dataclass(frozen=True)
class Torch:
    """The installed torch; `cuda` and `nccl` are ``none`` if torch was built without CUDA or NCCL."""

    version: str
    cuda: str
    gpus: int
    nccl: str
    distributed: bool


@lru_cache
def _torch(request: Request) -> Torch | NoAnswer:
    """Return the properties of the torch package that the ranks use.

    The first call takes several seconds; the result is cached.
    """
    try:
        return Torch(**ask(request.python, _TORCH, (), dict(request.env), timeout_s=TIMEOUT_S))
    except NoAnswer as error:
        return error


def num_gpus(request: Request) -> int:
    """Return the number of GPUs that the ranks' torch package can use.

    Returns 0 for a quick check, which does not import torch.
    """
    found = None if request.quick else _torch(request)
    return found.gpus if isinstance(found, Torch) else 0


def check_python(request: Request) -> Finding:
    """Check whether the ranks' interpreter runs, and whether trainkit is tested with its Python version."""
    found = _packages(request)
    if isinstance(found, NoAnswer):
        hint = "set launch.venv or launch.python to an environment on a shared filesystem"
        return Finding("Python", "failure", str(found), hint)
    version = tuple(map(int, found.python.split(".")[:2]))
    value = f"{found.python} ({found.program})"
    oldest, newest = (".".join(map(str, item)) for item in PYTHONS)
    if version < PYTHONS[0]:
        return Finding("Python", "failure", value, f"use Python {oldest} to {newest}")
    problem = trainkit_problem(found, found.program)
    if problem is not None:
        return Finding("Python", "failure", f"{value} {problem[0]}", problem[1])
    is_new = version > PYTHONS[1]
    return warn_if(
        is_new,
        "Python",
        value,
        f"trainkit is not tested with this version, only with Python {oldest} to {newest}",
    )


def check_torch(request: Request) -> Finding:
    """Check the version of torch, and whether torch can use the GPUs."""
    found = _torch(request)
    if isinstance(found, NoAnswer):
        hint = f"`{request.python[0]} -c 'import torch'` shows the complete error"
        if found.is_slow:
            hint = "the environment's filesystem is slow: copy it to a local disk, or use a container"
        return Finding("torch", "failure", str(found), hint)
    value = f"{found.version}, CUDA {found.cuda}, NCCL {found.nccl}"
    build = TorchBuild(request.python[0], found.version, None if found.cuda == "none" else found.cuda)
    has_driver = NVIDIA_DRIVER.exists()
    if (problem := release_problem(found.version)) is not None:
        return Finding("torch", "failure", value, problem[1])
    if not found.distributed:
        value += ": built without torch.distributed"
        return Finding("torch", "failure", value, "install another torch")
    if has_driver and (unusable := build.problem(driver=detect_machine().driver_cuda)):
        return Finding("torch", "failure", f"{value}: {unusable[0]}", unusable[1])
    if has_driver and not found.gpus:
        hint = "install a torch build for the CUDA version shown in the line `driver`, or update the driver"
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            hint = "CUDA_VISIBLE_DEVICES is empty, which hides the GPUs: unset it"
        return Finding("torch", "failure", f"{value}: torch finds no GPU", hint)
    return Finding("torch", "ok", value)


def versions(request: Request) -> dict[str, str]:
    """Return the Python version and package versions that must be the same on all nodes.

    If the interpreter or torch does not run, the corresponding versions are omitted; `check_python` or
    `check_torch` reports the problem.
    """
    values = {}
    found = _packages(request)
    if isinstance(found, Packages):
        values = {"Python": found.python, **found.versions}
        if not request.quick and isinstance(torch := _torch(request), Torch):
            values |= {"CUDA of torch": torch.cuda, "NCCL": torch.nccl}
    return values


def with_interpreter(
    request: Request, loaded: LoadedConfig, cwd: Path, *, on_slurm: bool
) -> tuple[Request, list[Finding]]:
    """Add a job's interpreter to a request, and check the settings that select this interpreter.

    A run without a batch script ignores the settings for containers, conda, modules and setup commands.
    """
    launch = loaded.config.launch
    if not on_slurm:
        unused = {"container": None, "conda": None, "modules": (), "setup": ()}
        launch = launch.model_copy(update=unused)
    found, problems = find_interpreter(launch, cwd)
    checks = [Finding("environment", "failure", f"{key} {text}", hint) for key, text, hint in problems]
    before = [name for name in ("modules", "setup") if getattr(launch, name)]
    is_known = launch.container is None and ("/" in found.argv[0] or not (launch.conda or before))
    argv = (*found.argv, *found.options) if is_known else (sys.executable,)
    chosen = [name for name in ("container", "conda", "python") if getattr(launch, name) is not None]
    if lacks := [*([] if is_known else chosen), *before]:
        names = " and ".join(f"launch.{name}" for name in lacks)
        hint = "run `trainkit doctor` in the environment of the job, or read the first lines of a job's log"
        text = f"checked {argv[0]} without {names}, which the job applies before starting its ranks"
        if not is_known:
            text = f"checked the environment of this command, but the job uses the environment in {names}"
        checks.append(Finding("environment", "warning", text, hint))
    env = tuple((name, launch.env[name]) for name in IMPORT_VARIABLES if name in launch.env)
    return replace(request, python=argv, env=env), checks
