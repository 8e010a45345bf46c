"""Plans a run: gathers its facts, checks its config against them, and makes its plan."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from trainkit.cluster.machine import Machine, detect_machine
from trainkit.cluster.target import Target, make_target
from trainkit.config import InvalidConfig, LoadedConfig, RunConfig
from trainkit.data.checks import DataFacts, inspect_data
from trainkit.errors import ConfigError, TrainkitError
from trainkit.plan.facts import Facts
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.make_plan import make_plan
from trainkit.plan.workload import TRAINER, Workload
from trainkit.run.manifest import MANIFEST_NAME
from trainkit.run.rundir import RunDir
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


class Gatherer:
    """Gathers the facts of configs that share a place and mostly the data, such as the points of a group."""

    def __init__(self, target: Target | None = None) -> None:
        self._target = target
        self._machine: Machine | None = None
        self._data: dict[str, DataFacts] = {}

    def facts(self, loaded: LoadedConfig, workload: Workload = TRAINER, *, resumes: bool = False) -> Facts:
        """The facts of a config; `resumes`, whether the run has a checkpoint of its own.

        Raises ConfigError for a cluster profile that is invalid or does not exist.
        """
        if self._target is None:
            self._target = make_target(loaded)
        if self._machine is None:
            self._machine = detect_machine()
        if workload.is_command:
            return Facts(self._machine, self._target)
        missing = frozenset(_missing(loaded.config, resumes))
        return Facts(self._machine, self._target, self._data_of(loaded.config), missing)

    def _data_of(self, config: RunConfig) -> DataFacts | None:
        if config.has_user_task:
            return None
        key = config.data.model_dump_json()
        if key not in self._data:
            self._data[key] = inspect_data(config.data)
        return self._data[key]


def gather(
    loaded: LoadedConfig,
    workload: Workload = TRAINER,
    *,
    target: Target | None = None,
    resumes: bool = False,
) -> Facts:
    """The facts of a config, as `Gatherer.facts` finds them; `target` skips the detection of the cluster."""
    return Gatherer(target).facts(loaded, workload, resumes=resumes)


def _missing(config: RunConfig, resumes: bool) -> Iterator[str]:
    """The keys that name a file or run which does not exist."""
    source = None if resumes else config.model.init_from  # a run with its own checkpoint does not read it
    # A run that others wait for may have no checkpoint yet.
    if source and not (Path(source, MANIFEST_NAME).is_file() or RunDir(Path(source)).exists()):
        yield "model.init_from"
    for key, name in (("task", config.task), ("model.architecture", config.model.architecture)):
        file, _, _ = name.rpartition(":")
        # A task may also be in a module; an architecture is always in a file.
        if file and (key != "task" or file.endswith(".py")) and not Path(file).is_file():
            yield key


def plan_run(
    loaded: LoadedConfig,
    facts: Facts,
    workload: Workload = TRAINER,
    *,
    code_dir: Path | None = None,
) -> LaunchPlan:
    """The launch plan of a config on this machine or the cluster.

    `code_dir` is the working directory of the command, by default the current one. Raises ConfigError with
    all problems.
    """
    check_name(loaded.config.name)
    launch, cwd, cluster = loaded.config.launch, Path.cwd(), facts.target.cluster
    plan = _check(loaded, facts, workload)
    if workload.argv is None and (problems := find_code_problems(loaded)):
        raise ConfigError(problems)
    if launch.container is not None and cluster is not None:
        plan = dataclasses.replace(plan, container_program=container_program(launch, cluster.containers))
    if workload.argv is not None:
        refuse_missing(workload.argv, launch, workload.launcher, code_dir or cwd)
        refuse_secrets(workload.argv, loaded.config.secrets)
        plan = dataclasses.replace(plan, python=command_python(launch, workload.argv, cwd))
    return plan if plan.slurm is not None else with_local_environment(plan, launch, cwd)


def planning_error(
    invalid: InvalidConfig, workload: Workload = TRAINER, *, target: Target | None = None
) -> ConfigError:
    """All problems of an invalid config: those of loading it, and those of planning with its valid keys."""
    try:
        _check(invalid.rest, gather(invalid.rest, workload, target=target), workload)
    except ConfigError as error:
        return invalid.with_problems_of_rest(error.problems)
    except TrainkitError:
        return invalid  # Slurm or a file cannot be read: report at least the problems of the load
    return invalid


def _check(loaded: LoadedConfig, facts: Facts, workload: Workload) -> LaunchPlan:
    """The plan of a config; raises ConfigError with all problems, those of its launch section included."""
    on_slurm, cluster = facts.target.backend in ("sbatch", "submitit"), facts.target.cluster
    if on_slurm:
        containers = () if cluster is None else cluster.containers
        found = find_launch_problems(
            loaded.config.launch, Path.cwd(), containers, is_command=workload.is_command
        )
    else:
        found = find_local_problems(loaded.config.launch, Path.cwd(), is_command=workload.is_command)
    trackers = find_tracker_problems(loaded.config, Path.cwd(), on_slurm=on_slurm)
    webhook = webhook_problem(loaded.config.notify, os.environ)
    problems = [loaded.problem(*item) for item in (*found, *trackers, *webhook)]
    try:
        plan = make_plan(loaded, facts, workload)
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
