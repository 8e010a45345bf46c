"""Plans a run: gathers its facts, checks its config against them, and makes its plan."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from trainkit.cluster.machine import Machine, detect_machine
from trainkit.cluster.target import Target, choose_backend, make_target
from trainkit.config import InvalidConfig, LoadedConfig, RunConfig
from trainkit.data.checks import DataFacts, inspect_data
from trainkit.errors import ConfigError, TrainkitError
from trainkit.plan.facts import Environment, Facts
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.make_plan import make_plan, problems
from trainkit.plan.workload import TRAINER, Workload
from trainkit.run.manifest import MANIFEST_NAME
from trainkit.run.rundir import RunDir
from trainkit.submit.containers import container_problems, container_program, runtimes
from trainkit.submit.preflight_checks import (
    check_name,
    command_python,
    experimental_settings,
    find_environment,
    refuse_missing,
    refuse_secrets,
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
        self._environments: dict[tuple[str, bool, bool], Environment] = {}

    def facts(self, loaded: LoadedConfig, workload: Workload = TRAINER, *, resumes: bool = False) -> Facts:
        """The facts of a config; `resumes`, whether the run has a checkpoint of its own.

        Raises ConfigError for a cluster profile that is invalid or does not exist.
        """
        if self._target is None:
            self._target = self._find_target(loaded, workload)
        if self._machine is None:
            self._machine = detect_machine()
        environment = self._environment_of(loaded.config, self._target.is_slurm, workload)
        launch, cluster = loaded.config.launch, self._target.cluster
        if cluster is not None:
            cwd = str(Path.cwd())
            found = container_problems(launch, [cwd], runtimes(cluster.containers), cwd=cwd)
            environment = dataclasses.replace(environment, problems=(*environment.problems, *found))
        data, missing = None, frozenset[str]()
        if not workload.is_command:
            data, missing = self._data_of(loaded.config), frozenset(_missing(loaded.config, resumes))
        return Facts(self._machine, self._target, data, missing, environment)

    def _find_target(self, loaded: LoadedConfig, workload: Workload) -> Target:
        """The target; while Slurm answers, the data is read and another interpreter is asked."""
        config, launch = loaded.config, loaded.config.launch
        if choose_backend(launch.backend, launch.cluster)[0] == "local":
            return make_target(loaded)
        # Imported only where something is waited for.
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(2) as threads:
            target = threads.submit(make_target, loaded)
            threads.submit(self._environment_of, config, True, workload)
            if not workload.is_command:
                self._data_of(config)
            return target.result()

    def _environment_of(self, config: RunConfig, on_slurm: bool, workload: Workload) -> Environment:
        used = config.model_dump_json(by_alias=True, include={"launch", "logging", "notify", "device"})
        key = used, on_slurm, workload.is_command
        if key not in self._environments:
            self._environments[key] = find_environment(config, on_slurm, workload, Path.cwd())
        return self._environments[key]

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
    config, cwd, cluster = loaded.config, Path.cwd(), facts.target.cluster
    launch = config.launch
    plan = make_plan(loaded, facts, workload)
    note = experimental_settings(launch) if plan.slurm is not None else None
    if note is not None:
        plan = dataclasses.replace(plan, reasons={**plan.reasons, "experimental": note})
    plan = with_notifications(plan, config.notify, os.environ)
    if workload.argv is None and (found := find_code_problems(loaded)):
        raise ConfigError(found)
    if launch.container is not None and cluster is not None:
        plan = dataclasses.replace(plan, container_program=container_program(launch, cluster.containers))
    if workload.argv is not None:
        refuse_missing(workload.argv, launch, workload.launcher, code_dir or cwd)
        refuse_secrets(workload.argv, config.secrets)
        plan = dataclasses.replace(plan, python=command_python(launch, workload.argv, cwd))
    if plan.slurm is not None or facts.environment is None:
        return plan
    return with_local_environment(plan, launch, facts.environment.interpreter)


def planning_error(
    invalid: InvalidConfig, workload: Workload = TRAINER, *, target: Target | None = None
) -> ConfigError:
    """All problems of an invalid config: those of loading it, and those of planning with its valid keys."""
    try:
        facts = gather(invalid.rest, workload, target=target)
        return invalid.with_problems_of_rest(problems(invalid.rest, facts, workload))
    except TrainkitError as error:  # Slurm or a file cannot be read: report at least the problems of the load
        return invalid.with_problems_of_rest(error.problems if isinstance(error, ConfigError) else [])
