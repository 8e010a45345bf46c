"""Plans a run: checks its config against this machine, the cluster and the data."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from trainkit.backends import BACKENDS
from trainkit.cluster.machine import detect_machine
from trainkit.cluster.target import Target, make_target
from trainkit.config import InvalidConfig, LoadedConfig
from trainkit.errors import ConfigError, TrainkitError
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.make_plan import DataFacts, check_config
from trainkit.plan.workload import TRAINER, Workload
from trainkit.submit.containers import container_program
from trainkit.submit.preflight_checks import (
    check_name,
    command_python,
    experimental_settings,
    find_launch_problems,
    find_local_problems,
    find_torch_problem,
    find_tracker_problems,
    refuse_missing,
    refuse_secrets,
    webhook_problem,
    with_local_environment,
    with_notifications,
)
from trainkit.submit.user_code_check import find_code_problems


def plan_run(
    loaded: LoadedConfig,
    workload: Workload = TRAINER,
    *,
    target: Target | None = None,
    data: DataFacts | None = None,
    code_dir: Path | None = None,
    resumes: bool = False,
) -> LaunchPlan:
    """The launch plan of a config on this machine or the cluster.

    `target` and `data` skip the detection of the cluster and the data; `code_dir` is the working directory of
    the command, by default the current one; `resumes`, whether the run has a checkpoint of its own. Raises
    ConfigError with all problems.
    """
    check_name(loaded.config.name)
    launch, cwd = loaded.config.launch, Path.cwd()
    target = target or make_target(loaded)
    containers = () if target.cluster is None else target.cluster.containers
    plan = _check(loaded, workload, target, data, resumes=resumes)
    if workload.argv is None and (problems := find_code_problems(loaded)):
        raise ConfigError(problems)
    if launch.container is not None and target.cluster is not None:
        plan = dataclasses.replace(plan, container_program=container_program(launch, containers))
    if workload.argv is not None:
        refuse_missing(workload.argv, launch, workload.launcher, code_dir or cwd)
        refuse_secrets(workload.argv, loaded.config.secrets)
        plan = dataclasses.replace(plan, python=command_python(launch, workload.argv, cwd))
    return plan if plan.slurm is not None else with_local_environment(plan, launch, cwd)


def planning_error(
    invalid: InvalidConfig,
    workload: Workload = TRAINER,
    *,
    target: Target | None = None,
    data: DataFacts | None = None,
) -> ConfigError:
    """All problems of an invalid config: those of loading it, and those of planning with its valid keys.

    The arguments are those of `plan_run`.
    """
    try:
        _check(invalid.rest, workload, target or make_target(invalid.rest), data)
    except ConfigError as error:
        return invalid.with_problems_of_rest(error.problems)
    except TrainkitError:
        return invalid  # Slurm or a file cannot be read: report at least the problems of the load
    return invalid


def _check(
    loaded: LoadedConfig,
    workload: Workload,
    target: Target,
    data: DataFacts | None,
    *,
    resumes: bool = False,
) -> LaunchPlan:
    """The plan of a config; raises ConfigError with all problems, those of its launch section included."""
    on_slurm = BACKENDS[target.backend].template is not None
    if on_slurm:
        containers = () if target.cluster is None else target.cluster.containers
        found = find_launch_problems(
            loaded.config.launch, Path.cwd(), containers, is_command=workload.is_command
        )
    else:
        found = find_local_problems(loaded.config.launch, Path.cwd(), is_command=workload.is_command)
    trackers = find_tracker_problems(loaded.config, Path.cwd(), on_slurm=on_slurm)
    webhook = webhook_problem(loaded.config.notify, os.environ)
    problems = [loaded.problem(*item) for item in (*found, *trackers, *webhook)]
    try:
        plan = check_config(loaded, detect_machine(), target, workload, data, resumes=resumes)
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems]) from None
    torch_problem = find_torch_problem(plan, loaded.config.launch, Path.cwd())
    if torch_problem is not None:
        problems.append(loaded.problem(*torch_problem))
    if problems:
        raise ConfigError(problems)
    note = experimental_settings(loaded.config.launch) if plan.slurm is not None else None
    if note is not None:
        plan = dataclasses.replace(plan, reasons={**plan.reasons, "experimental": note})
    return with_notifications(plan, loaded.config.notify, os.environ)
