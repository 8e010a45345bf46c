"""The batch script of a Slurm job, as a function of plan, config and run folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainkit import __version__
from trainkit.backends import BACKENDS, JobScript
from trainkit.config import RunConfig
from trainkit.config.schema import MULTIMODAL
from trainkit.errors import UsageError
from trainkit.job.failed_starts import STARTS_FOLDER
from trainkit.job.processes import PYTHON_OPTIONS
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.slurm_request import Options, SlurmRequest, option_argv
from trainkit.run.group import RunGroup
from trainkit.run.record import submission_token
from trainkit.run.rundir import RunDir
from trainkit.slurm.quoting import log_path
from trainkit.submit.interpreters import find_interpreter
from trainkit.submit.job_environment import JobEnvironment, make_job_environment
from trainkit.submit.templates import render


def script_for(
    run: RunDir,
    attempt: int,
    plan: LaunchPlan,
    config: RunConfig,
    cwd: Path,
    code: Mapping[str, Any] | None,
    array: str | None = None,
) -> JobScript:
    """The batch script of an attempt; `cwd` is the folder the run was submitted from.

    `code` describes the copy of the code; None without one. With an `array`, such as ``0-9%4``, `run` is the
    folder of a group, in which each task finds its run. Templates in ``cwd/templates`` override the shipped
    ones. Raises UsageError for values that a script cannot
    contain.
    """
    backend = BACKENDS[plan.backend]
    assert plan.slurm is not None
    assert backend.template is not None
    environment = _job_environment(run, plan, config, cwd, code)
    agent = (*environment.rank_python, "-m", "trainkit.job.node.agent", str(run.path))
    step = ("srun", *option_argv(plan.slurm.srun), *environment.srun_options, *agent)
    context: dict[str, Any] = {
        "version": __version__,
        "summary": _summary(run, plan),
        "directives": directives(run, attempt, plan.slurm, array),
        "workdir": environment.workdir,
        "other_workdir": _other_workdir(run, plan, code),
        "starts": str(run.path / STARTS_FOLDER),
        "restarts": _restarts_of_starts(plan),
        "run_dir": str(run.path),
        "is_array": array is not None,
        "per": plan.per,
        "step": step[:-1],
        "supervisor": (*environment.host_python, "-m", "trainkit.job.supervisor"),
        **environment.context,
    }
    text = render(backend.template, context, cwd)
    script = JobScript(text, context["directives"], text, step, environment.host_python)
    return backend.finish_script(run, script)


def _other_workdir(run: RunDir, plan: LaunchPlan, code: Mapping[str, Any] | None) -> str | None:
    """Where a job works whose folder of submission is gone; None if it needs the files in that folder."""
    if plan.workload.is_command:
        return None  # it works in its copy already, or has none
    return str(run.path if code is None else code["workdir"])


def _restarts_of_starts(plan: LaunchPlan) -> int:
    """How often in a row the script requeues a job that ended before its supervisor began."""
    assert plan.slurm is not None
    may_requeue = "crash" in plan.requeue.on and "requeue" in plan.slurm.sbatch
    return min(plan.requeue.max, plan.requeue.max_crashes) if may_requeue else 0


def _job_environment(
    run: RunDir, plan: LaunchPlan, config: RunConfig, cwd: Path, code: Mapping[str, Any] | None
) -> JobEnvironment:
    launch = config.launch
    interpreter, _ = find_interpreter(launch, sys.executable, os.environ, cwd)
    if plan.workload.is_command and launch.container is None:
        # The environment of a command may lack trainkit, so its agent uses this interpreter.
        ours: Any = {"argv": (sys.executable,), "options": PYTHON_OPTIONS}
        interpreter = replace(interpreter, **ours, host_argv=ours["argv"], host_options=ours["options"])
    program = plan.container_program
    workdir, python_path, folders = str(cwd), (), [str(cwd)]
    if code is not None:
        folders.append(str(code["code"]))  # a run of a group shares the copy in the group's folder
        python_path = tuple(code["import_path"])
        workdir = str(code["workdir"]) if plan.workload.is_command else workdir
    if not plan.workload.is_command:
        folders += _data_paths(config)
    return make_job_environment(
        launch,
        interpreter,
        run_dir=str(run.path),
        workdir=workdir,
        cwd=str(cwd),
        slurm_version=() if plan.slurm is None else plan.slurm.version,
        env=plan.env,
        python_path=python_path,
        folders=folders,
        runtime=program if program in (None, "pyxis") else "apptainer",
        container_program=program or "apptainer",
        gpus=plan.device == "cuda",
    )


def _data_paths(config: RunConfig) -> list[str]:
    """The paths that a container must mount: texts or shards, tokenizer, cache, and weights to start from."""
    data = config.data
    listed = [[value] if isinstance(value, str) else value or [] for value in (data.source, data.val_source)]
    named = [*listed[0], *listed[1], data.tokenizer, data.cache_dir, config.model.init_from]
    if config.model.hf is not None:
        folder = Path(config.model.hf)
        # The files of a downloaded model are links to blobs next to its snapshots.
        named.append(str(folder.parents[1] if folder.parent.name == "snapshots" else folder))
    if config.task == MULTIMODAL:
        files = (config.task_args.get(name) for name in ("train", "val"))
        named += [str(Path(file).parent) for file in files if isinstance(file, str)]
    paths = [Path(name) for name in named if name is not None]
    return [str(path) for path in paths if path.is_absolute() and path.exists()]


def directives(run: RunDir, attempt: int, request: SlurmRequest, array: str | None = None) -> Options:
    """The options of the `#SBATCH` lines by name; True for an option without a value."""
    comment = " ".join(
        filter(None, (submission_token(run, attempt), str(request.sbatch.get("comment") or "")))
    )
    log = log_path(str(run.attempt(attempt).supervisor_log))
    options = {**request.sbatch, "comment": comment, "output": log, "open-mode": "append"}
    if array is not None:
        options |= {"array": array, "output": _array_log(RunGroup(run.path))}
    if attempt > 1:
        options.pop("dependency", None)  # only the first attempt waits for it
    return {name: value for name, value in options.items() if value is not False}


def _array_log(group: RunGroup) -> str:
    if "\\" in str(group.path):
        raise UsageError(
            f"{group.path} contains a backslash, so Slurm would write all tasks of an array to the same log",
            hint="choose a folder without one with --run-dir",
        )
    return f"{log_path(str(group.logs_dir))}/{group.log_file('%a').name}"


def _summary(run: RunDir, plan: LaunchPlan) -> str:
    nodes = f"{plan.num_nodes} node{'s' if plan.num_nodes > 1 else ''}"
    each = f"{plan.workers_per_node} worker{'s' if plan.workers_per_node > 1 else ''}"
    spare = f", and {plan.spare_nodes} spare" if plan.spare_nodes else ""
    return f"{run.name}: {nodes} with {each} each{spare}, one Slurm task per {plan.per}"
