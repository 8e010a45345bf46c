"""Plan a run: inspect the machine, data and environment, check the config, and make the launch plan."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path, PurePath

from trainkit.cluster.machine import Machine, detect_machine
from trainkit.cluster.target import Target, choose_backend, make_target
from trainkit.config import InvalidConfig, LoadedConfig, RunConfig
from trainkit.config.running import LaunchConfig
from trainkit.data.checks import DataFacts, inspect_data
from trainkit.errors import ConfigError, KeyProblem, TrainkitError, UsageError
from trainkit.folders import shown_path
from trainkit.launch.environment import command_python, container_problems, container_program
from trainkit.launch.gpu_hours import with_gpu_hours
from trainkit.launch.packages import find_environment
from trainkit.launch.secrets import refuse_secrets
from trainkit.launch.trainer_process import find_code_problems
from trainkit.plan.facts import Environment, Facts
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.make_plan import problems, with_parts
from trainkit.plan.node_range import plan_nodes
from trainkit.plan.workload import SHELLS, TRAINER, Workload
from trainkit.quoting import quote
from trainkit.run.rundir import MANIFEST_NAME, RunDir

_BATCH_ONLY = ("modules", "conda", "container", "setup")
"""Launch settings that are used only in batch scripts."""
_EXPERIMENTAL = {"conda": "conda", "container": "Apptainer or pyxis"}
"""Maps each setting that was tested only with a substitute program to the name of the real program."""


class Gatherer:
    """Collects facts for configs that share their target and most of their data, such as a group's trials."""

    def __init__(self, target: Target | None = None, code_dir: Path | None = None) -> None:
        self._target = target
        self._code_dir = Path() if code_dir is None else code_dir
        """The base folder for relative paths of the user's code files."""
        self._machine: Machine | None = None
        self._data: dict[str, DataFacts] = {}
        self._environments: dict[tuple[str, bool, bool], Environment] = {}

    def facts(self, loaded: LoadedConfig, workload: Workload = TRAINER, *, resumes: bool = False) -> Facts:
        """Return the facts about the machine, cluster, environment and data to which a config refers.

        Set `resumes` if the run has a checkpoint to resume from.

        Raises ConfigError if the cluster profile is invalid or does not exist.
        """
        if self._target is None:
            self._target = self._find_target(loaded, workload)
        if self._machine is None:
            self._machine = detect_machine()
        environment = self._environment_of(loaded.config, self._target.submits_job, workload)
        launch, cluster = loaded.config.launch, self._target.cluster
        if cluster is not None:
            cwd = str(Path.cwd())
            found = container_problems(launch, cwd, cluster.containers)
            environment = replace(environment, problems=(*environment.problems, *found))
        data: DataFacts | None = None
        missing: tuple[KeyProblem, ...] = ()
        if not workload.is_command:
            data, missing = (
                self._data_of(loaded.config),
                tuple(_missing(loaded.config, resumes, self._code_dir)),
            )
        return Facts(self._machine, self._target, data, missing, environment)

    def _find_target(self, loaded: LoadedConfig, workload: Workload) -> Target:
        """Return the target; check the interpreter and the data while waiting for Slurm's response."""
        launch = loaded.config.launch
        if choose_backend(launch.backend, launch.cluster)[0] == "local":
            return make_target(loaded)

        # Imported here because the import is slow and needed only for Slurm.
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor() as threads:
            # An exception in the thread is ignored here, because a later call with the same arguments raises
            # it again.
            threads.submit(self._environment_of, loaded.config, True, workload)
            if not workload.is_command:
                threads.submit(self._data_of, loaded.config)
            return make_target(loaded)

    def _environment_of(self, config: RunConfig, on_slurm: bool, workload: Workload) -> Environment:
        used = config.model_dump_json(by_alias=True, include={"launch", "logging", "device"})
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
    code_dir: Path | None = None,
) -> Facts:
    """Return `Gatherer.facts` for one config; if `target` is given, the cluster is not detected."""
    return Gatherer(target, code_dir).facts(loaded, workload, resumes=resumes)


def _missing(config: RunConfig, resumes: bool, code_dir: Path) -> Iterator[KeyProblem]:
    """Yield a problem for each config key that refers to a missing file or run."""
    # A run that has its own checkpoint does not load init_from.
    source = None if resumes else config.model.init_from
    # Accept a run that has no checkpoint yet, because it may save one before the new run starts (--after).
    if source and not (Path(source, MANIFEST_NAME).is_file() or RunDir(Path(source)).exists()):
        message = f"is {source}, which is neither a run folder nor a checkpoint"
        yield "model.init_from", message, "`trainkit ckpt ls RUN` lists the checkpoints of a run"
    optimizer, schedule = ("optimizer.name", config.optimizer.name), ("schedule.name", config.schedule.name)
    for key, name in (config.model_source, optimizer, schedule):
        file, _, _ = name.rpartition(":")
        # A task may also be defined in an installed module, but other code is always defined in a file.
        if file and (key != "task" or file.endswith(".py")) and not (code_dir / file).is_file():
            message = f"is {name}, but there is no file {shown_path((code_dir / file).absolute())}"
            yield key, message, "FILE.py is relative to the current folder"


def plan_run(
    loaded: LoadedConfig,
    facts: Facts,
    workload: Workload = TRAINER,
    *,
    code_dir: Path | None = None,
    before: LaunchPlan | None = None,
) -> LaunchPlan:
    """Return the launch plan for running a config on this machine or on the cluster.

    `code_dir` is the ranks' working directory, by default the current directory. `before` is passed to
    `plan_nodes`. Raises a ConfigError that lists every problem.
    """
    config, launch, cluster, cwd = loaded.config, loaded.config.launch, facts.target.cluster, Path.cwd()
    plan = plan_nodes(loaded, facts, workload, before)
    reasons, warnings = dict(plan.reasons), list(plan.warnings)
    untested = next((key for key in _EXPERIMENTAL if getattr(launch, key) is not None), None)
    if plan.is_job and untested is not None:
        program = _EXPERIMENTAL[untested]
        note = f"launch.{untested} has not been validated with a real {program}; try a short run first"
        reasons["experimental"] = note
    plan = with_parts(replace(plan, reasons=reasons, warnings=tuple(warnings)), loaded, facts)
    reasons, warnings, environment = dict(plan.reasons), list(plan.warnings), plan.environment
    if not workload.is_command and (found := find_code_problems(loaded, code_dir or cwd)):
        raise ConfigError(found)
    if launch.container is not None and cluster is not None:
        runtime = container_program(launch, cluster.containers)
        environment = replace(environment, container_program=runtime)
    if workload.is_command:
        refuse_missing(workload.argv, launch, workload.launcher, code_dir or cwd)
        refuse_secrets(workload.argv, config.secrets)
        environment = replace(environment, python=command_python(launch, workload.argv, cwd))
    if not plan.is_job and facts.environment is not None:
        # This run's agents are not started by a batch script, so they use the interpreter selected in
        # `launch`.
        interpreter = facts.environment.interpreter
        if unused := [f"launch.{name}" for name in _BATCH_ONLY if getattr(launch, name)]:
            warnings.append(f"{', '.join(unused)}: no effect outside of Slurm batch jobs")
        if launch.container is None and any((launch.venv, launch.uv, launch.python)):
            reasons["python"] = f"{interpreter.argv[0]}, as set in launch"
            environment = replace(environment, venv=interpreter.venv)
            if not workload.is_command:
                environment = replace(environment, python=(*interpreter.argv, *interpreter.options))
    if not plan.is_job and config.resources.max_gpu_hours is not None:
        warnings.append("resources.max_gpu_hours: no effect, because a run on this machine has no time limit")
    plan = replace(plan, reasons=reasons, warnings=tuple(warnings), environment=environment)
    return with_gpu_hours(loaded, [plan])[0]


def planning_error(invalid: InvalidConfig, workload: Workload, *, target: Target | None) -> ConfigError:
    """Return an error with an invalid config's problems, and problems found by planning its valid keys."""
    try:
        facts = gather(invalid.rest, workload, target=target)
        return invalid.with_problems_of_rest(problems(invalid.rest, facts, workload))
    # If Slurm cannot be queried or a file cannot be read, report at least the problems found when loading the
    # config.
    except TrainkitError as error:
        return invalid.with_problems_of_rest(error.problems if isinstance(error, ConfigError) else [])


def refuse_missing(command: Sequence[str], launch: LaunchConfig, launcher: str, cwd: Path) -> None:
    """Raise UsageError for a command that cannot start in its working directory `cwd`."""
    elsewhere = (launch.venv, launch.conda, launch.uv, launch.container, launch.python)
    runs_unchanged = launcher == "python" and not any(elsewhere) and not launch.modules and not launch.setup
    if runs_unchanged and shutil.which(command[0], path=os.environ.get("PATH", os.defpath)) is None:
        hint = "specify its path, or set launch.venv, conda, modules or container in the config"
        if command[0].endswith(".py") and (cwd / command[0]).is_file():
            hint = f"`-- python {quote(command[0])} …` runs the file with this name in the current folder"
        elif "/" in command[0] and (cwd / command[0]).is_file():
            hint = f"`chmod +x {quote(command[0])}` makes this file executable"
        elif " " in command[0].strip() and len(command) == 1:
            hint = f"remove the quotes: -- {command[0]}"
        elif command[0] in BUILTINS:
            hint = f"{command[0]} is a shell built-in: use -- bash -c {quote(shlex.join(command))}"
        raise UsageError(f"command not found on PATH: {command[0]!r}", hint=hint)
    script = _script_of(command)
    # launch.setup may change the working directory or create the script, so the script cannot be checked.
    folder_is_known = launch.container is None and not launch.setup
    if script is not None and folder_is_known and not (cwd / script).exists():
        raise UsageError(
            f"there is no {shown_path(cwd / script)}", hint="commands start in the current folder"
        )


BUILTINS = ("cd", "source", ".", "export", "set", "exec", "ulimit", "alias", "eval")
"""Commands that are built into the shell and therefore do not exist as programs."""


def _script_of(command: Sequence[str]) -> str | None:
    """Return the Python script that a command runs, or None if there is no script or several are possible."""
    if PurePath(command[0]).name in SHELLS:
        return None  # The argument is a shell script, which may run any files.
    before = takewhile(lambda word: word not in ("-m", "-c"), command)
    # An argument that contains a space may be a whole command line, as in `env -S`.
    return next((word for word in before if word.endswith(".py") and " " not in word), None)
