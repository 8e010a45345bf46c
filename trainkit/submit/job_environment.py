"""What a batch script does before the ranks start, as plain data for its template; no look at the disk."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path, PurePath
from typing import Any

from trainkit.config.running import LaunchConfig
from trainkit.errors import UsageError
from trainkit.submit.containers import container_argv, container_troubles, runtimes
from trainkit.submit.interpreters import Interpreter, Trouble, find_interpreter

SRUN_READS_ITS_OWN = ((22, 5), (23, 11))
"""From and before which version srun does not take over what sbatch was told about CPUs a task."""
RANK_NAMES = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "ROLE_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
"""What makes a process a rank; a script that is submitted by hand from inside a job must not inherit it."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SET_BY_OTHERS = re.compile(r"(SLURM|SBATCH|SRUN)_\w+")


@dataclass(frozen=True)
class JobEnvironment:
    """What stands around the ranks; `context` is what templates/partials/environment.sh.j2 needs."""

    workdir: str
    """Where the job runs: in the snapshot, or where it was submitted."""
    rank_python: tuple[str, ...]
    """What starts Python in a task of the step: the container, the interpreter and its options."""
    host_python: tuple[str, ...]
    """What starts Python in the script itself, outside of any container."""
    srun_options: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    venv: str | None = None
    conda: str | None = None
    conda_script: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    python_path: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    sets_cpus_per_task: bool = True
    """Whether srun has to be told again what a task gets."""

    @property
    def rank_names(self) -> tuple[str, ...]:
        return RANK_NAMES

    @property
    def context(self) -> dict[str, Any]:
        return {"environment": self}


def make_job_environment(
    launch: LaunchConfig,
    interpreter: Interpreter,
    *,
    run_dir: str,
    workdir: str,
    cwd: str | None = None,
    slurm_version: tuple[int, ...] = (),
    python_path: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    folders: Sequence[str] = (),
    runtime: str | None = None,
    container_program: str = "apptainer",
    gpus: bool = False,
) -> JobEnvironment:
    """Everything between sbatch's directives and the ranks.

    `env` is what the cluster's profile adds; `launch.env` comes after it. `folders` are mounted into a
    container besides the run folder and `workdir`; `runtime` is what `container_runtime` found. The path of
    an image is counted from `cwd`, which is `workdir` unless that is in a copy of the code.
    """
    variables = {**(env or {}), **launch.env}
    options: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    if launch.container is not None:
        assert runtime is not None
        names = [*variables, *(["PYTHONPATH"] if python_path else [])]
        options, prefix = container_argv(
            launch,
            runtime,
            folders=[run_dir, workdir, *folders],
            workdir=workdir,
            cwd=cwd or workdir,
            gpus=gpus,
            program=container_program,
            variables=names,
        )
    return JobEnvironment(
        workdir=workdir,
        rank_python=(*prefix, *interpreter.argv, *interpreter.options),
        host_python=(*interpreter.host_argv, *interpreter.host_options),
        srun_options=options,
        modules=launch.modules,
        venv=interpreter.venv,
        conda=interpreter.conda,
        conda_script=interpreter.conda_script,
        env=tuple(variables.items()),
        python_path=tuple(python_path),
        setup=launch.setup,
        sets_cpus_per_task=_sets_cpus_per_task(slurm_version),
    )


def launch_troubles(launch: LaunchConfig) -> Iterator[Trouble]:
    """What is wrong with the values themselves, whatever the disk holds."""
    for name in launch.modules:
        if name.startswith("-") or len(name.split()) != 1:
            hint = "list one name an entry; write other commands of `module` into launch.setup"
            yield "launch.modules", f"has {name!r}, which is no name of a module", hint
    if launch.conda is not None and launch.conda.startswith("-"):
        yield "launch.conda", f"is {launch.conda!r}, which is an option and no environment", ""
    for name, value in launch.env.items():
        key = f"launch.env.{name}"
        if not _VARIABLE.fullmatch(name):
            yield key, "is no name that a shell variable can have", "use letters, digits and _"
        elif name in RANK_NAMES or _SET_BY_OTHERS.fullmatch(name):
            yield key, "is set for every process when the job runs", "leave it out"
        elif "\0" in value:
            yield key, "has a NUL character, which no variable can hold", ""
    for line in launch.setup:
        if "\0" in line:
            yield "launch.setup", "has a NUL character, which no script can hold", ""
    for key in ("modules", "venv", "conda", "uv", "python", "container", "container_mounts"):
        value = getattr(launch, key)
        for text in (value,) if isinstance(value, str) else value or ():
            if "\n" in text or "\0" in text:
                yield f"launch.{key}", f"has {text!r}, with a line break or NUL in it", "write it on one line"


def _sets_cpus_per_task(version: tuple[int, ...]) -> bool:
    """Not knowing the version it is set too, which does no harm: the value is that of the job itself."""
    first, after = SRUN_READS_ITS_OWN
    return not version or first <= version < after


SHELLS = ("sh", "bash", "dash", "zsh")


def command_python(launch: LaunchConfig, cwd: Path) -> tuple[str, ...]:
    """The interpreter that a launcher of ranks runs with."""
    return find_interpreter(launch, sys.executable, os.environ, cwd)[0].argv


def refuse_missing(command: Sequence[str], launch: LaunchConfig, launcher: str, cwd: Path) -> None:
    """Raise UsageError when a command cannot start where it is going to run, as far as can be told."""
    elsewhere = (launch.venv, launch.conda, launch.uv, launch.container, launch.python)
    as_it_is = launcher == "python" and not any(elsewhere) and not launch.modules and not launch.setup
    if as_it_is and shutil.which(command[0], path=os.environ.get("PATH", os.defpath)) is None:
        raise UsageError(
            f"there is no program {command[0]!r} on PATH",
            hint="name it by its path, or say launch.venv, conda, modules or container in the config",
        )
    script = _script_of(command)
    # A line of launch.setup may change the folder, or make the script.
    as_submitted = launch.container is None and not launch.setup
    if script is not None and as_submitted and not (cwd / script).exists():
        raise UsageError(f"there is no {script} in {cwd}", hint="commands are started from this folder")


def _script_of(command: Sequence[str]) -> str | None:
    """The Python script that a command starts; None where it starts something else, or cannot be told."""
    if PurePath(command[0]).name in SHELLS:
        return None  # which are given a program, in which a file may be named any way
    before = takewhile(lambda word: word not in ("-m", "-c"), command)
    return next((word for word in before if word.endswith(".py")), None)


def find_troubles(launch: LaunchConfig, cwd: Path, containers: Sequence[str]) -> Iterator[Trouble]:
    """(key, message, hint) for everything that would fail in the job: modules, interpreter, container.

    `containers` is what the cluster has to run them with.
    """
    yield from launch_troubles(launch)
    yield from find_interpreter(launch, sys.executable, os.environ, cwd)[1]
    yield from container_troubles(launch, [str(cwd)], runtimes(containers), cwd=str(cwd))
