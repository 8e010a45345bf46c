"""What `submit`, `run` and `resume` share: from a config to a started run."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainkit.cli.options import named_folder
from trainkit.errors import ConfigError, Problem, TrainkitError
from trainkit.job.record import run_lock
from trainkit.rundir import RunDir
from trainkit.submit.beside import beside
from trainkit.submit.create import CodeCopier, check_name, create_run, wants_copy
from trainkit.submit.start import start_attempt

if TYPE_CHECKING:
    from trainkit.cluster.model import Target
    from trainkit.config import LoadedConfig, RunConfig
    from trainkit.config.training import DataConfig
    from trainkit.plan.launch import LaunchPlan
    from trainkit.plan.make_plan import DataLook


def plan_for(
    loaded: LoadedConfig,
    command: Sequence[str] | None = None,
    launcher: str = "python",
    target: Target | None = None,
    look: Callable[[DataConfig], DataLook] | None = None,
    code_dir: Path | None = None,
) -> LaunchPlan:
    """What would run, on this machine or on the cluster; ConfigError lists everything that is wrong.

    `look` takes the place of a look at the data for who has looked already; `code_dir` is where a command
    is started, if not here.
    """
    from trainkit.cluster.machine import detect_machine
    from trainkit.plan.make_plan import check_config, look_at_data

    check_name(loaded.config.name)
    look = look or look_at_data
    if target is None:
        target, look = _find_target(loaded, look, has_data=command is None)
    problems: list[Problem] = []
    if target.backend in ("sbatch", "submitit"):
        from trainkit.submit.job_environment import find_troubles

        launch = loaded.config.launch
        containers = () if target.cluster is None else target.cluster.containers
        problems = [loaded.problem(*trouble) for trouble in find_troubles(launch, Path.cwd(), containers)]
    try:
        plan = check_config(loaded, detect_machine(), target, command, launcher, look)
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems]) from None
    if problems:
        raise ConfigError(problems)
    if loaded.config.launch.container is not None and target.cluster is not None:
        from trainkit.submit.containers import container_program

        program = container_program(loaded.config.launch, target.cluster.containers)
        plan = dataclasses.replace(plan, container_program=program)
    if command is None:
        return plan
    from trainkit.submit.job_environment import command_python, refuse_missing
    from trainkit.submit.secrets import refuse_secrets

    refuse_missing(command, loaded.config.launch, launcher, code_dir or Path.cwd())
    refuse_secrets(command, loaded.config.launch.secrets)
    return dataclasses.replace(plan, python=command_python(loaded.config.launch, Path.cwd()))


def _find_target(
    loaded: LoadedConfig, look: Callable[[DataConfig], DataLook], has_data: bool
) -> tuple[Target, Callable[[DataConfig], DataLook]]:
    """Where it would run, and the look at the data: both take a moment, so one is taken beside the other."""
    from trainkit.cluster.target import choose_backend, make_target

    launch = loaded.config.launch
    if not has_data or choose_backend(launch.backend, launch.cluster)[0] == "local":
        return make_target(loaded), look
    # Loaded here and not there, since what submits needs the most of it again.
    importlib.import_module("trainkit.cluster.target")
    importlib.import_module("trainkit.cluster.discovery")
    with beside("asking Slurm", lambda: make_target(loaded)) as target:
        try:
            seen = look(loaded.config.data)
        except TrainkitError:
            target()  # what is wrong with the cluster is told first
            raise
        importlib.import_module("jinja2")  # for the script: Slurm takes longer than the look
        return target(), lambda data: seen


def look_once() -> Callable[[DataConfig], DataLook]:
    """A look at the data that is taken once for all configs with the same data."""
    looks: dict[str, DataLook] = {}

    def look(data: DataConfig) -> DataLook:
        from trainkit.plan.make_plan import look_at_data

        key = data.model_dump_json()
        if key not in looks:
            looks[key] = look_at_data(data)
        return looks[key]

    return look


def start_new_run(
    loaded: LoadedConfig,
    plan: LaunchPlan,
    run_dir: str | None,
    reason: str,
    quiet: bool = False,
    collect: Callable[[], dict[str, Any]] | None = None,
) -> tuple[RunDir, dict[str, Any]]:
    """Make the run folder and start its first attempt; `reason` is ``submit`` or ``run``.

    `quiet` does not tell which code is copied, for who starts the same again. `collect` is `create_run`'s.
    """
    run, name = create_run(
        loaded,
        None if run_dir is None else named_folder(run_dir),
        ["trainkit", *sys.argv[1:]],
        plan.backend,
        code_copier(loaded.config, plan, quiet),
        collect,
    )
    try:
        with run_lock(run):
            entry = start_attempt(run, loaded.config, plan, reason, foreground=reason == "run")
    except BaseException:
        if not run.attempt_numbers():
            shutil.rmtree(run.path, ignore_errors=True)  # made a moment ago; a refusal leaves no trace
        raise
    return run, {"run_dir": str(run.path), "name": name, **started(entry, plan.backend)}


def code_copier(config: RunConfig, plan: LaunchPlan, quiet: bool = False) -> CodeCopier | None:
    """What puts a copy of the code into a new run, and tells about it unless it is `quiet`."""
    if not wants_copy(config, plan):
        return None

    def copy(run: RunDir) -> dict[str, Any]:
        from trainkit.submit.code.copy import copy_code

        return copy_code(run, plan, Path.cwd())

    def tell(code: dict[str, Any]) -> None:
        if quiet:
            return
        click.echo(f"  code                {code['num_files']:,} files of {code['source']} copied", err=True)
        for note in code["notes"]:
            click.echo(f"  note: {note}", err=True)

    return CodeCopier(copy, tell)


def started(entry: dict[str, Any], backend: str) -> dict[str, Any]:
    """What a command that started an attempt tells about it."""
    return {"job_id": entry["job_id"], "attempt": entry["attempt"], "backend": backend}


def print_started(value: dict[str, Any], as_json: bool) -> None:
    """The run folder and the job id on stdout."""
    if as_json:
        click.echo(json.dumps(value, ensure_ascii=False))
    else:
        click.echo(value["run_dir"])
        click.echo(value["job_id"])
