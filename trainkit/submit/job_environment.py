"""The environment that a batch script sets up before the ranks start, as data for its template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainkit.config.running import LaunchConfig
from trainkit.plan.facts import Interpreter
from trainkit.submit.containers import container_argv

SRUN_DROPS_CPUS_PER_TASK = ((22, 5), (23, 11))
"""srun ignores the --cpus-per-task of sbatch from the first version until before the second."""
RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "ROLE_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
"""Environment variables of a rank, which a job submitted from inside a job must not inherit."""


@dataclass(frozen=True)
class JobEnvironment:
    """The environment of the ranks; `context` is for templates/partials/environment.sh.j2."""

    workdir: str
    """The working directory of the job: in the copy of the code, or the folder it was submitted from."""
    rank_python: tuple[str, ...]
    """The argv prefix of Python in a task of the step: container, interpreter, options."""
    host_python: tuple[str, ...]
    """The argv prefix of Python in the script itself, outside of any container."""
    srun_options: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    venv: str | None = None
    conda: str | None = None
    conda_script: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    python_path: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    sets_cpus_per_task: bool = True
    """Whether the script must repeat --cpus-per-task for srun."""

    @property
    def rank_names(self) -> tuple[str, ...]:
        return RANK_VARIABLES

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
    """The environment for a launch section and its interpreter.

    `env` are its variables, by default those of `launch`. A container mounts `folders`
    in addition to the run folder and `workdir`; `runtime` is the result of `container_runtime`. The path of
    an image is relative to `cwd`, by default `workdir`.
    """
    variables = launch.env if env is None else env
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


def _sets_cpus_per_task(version: tuple[int, ...]) -> bool:
    """True for an unknown version too: repeating the job's own value is harmless."""
    first, after = SRUN_DROPS_CPUS_PER_TASK
    return not version or first <= version < after
