"""Plans a run: gathers its facts, checks its config against them, and makes its plan."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path, PurePath
from threading import Thread
from typing import Any

from trainkit.cluster.machine import Machine, detect_machine
from trainkit.cluster.target import Target, choose_backend, make_target
from trainkit.config import InvalidConfig, LoadedConfig, RunConfig
from trainkit.config.running import MAIL_TYPES, WEBHOOK_VARIABLE, LaunchConfig, NotifyConfig
from trainkit.data.checks import DataFacts, inspect_data
from trainkit.errors import ConfigError, KeyProblem, TrainkitError, UsageError
from trainkit.folders import shown_path
from trainkit.launch.environment import (
    NoAnswer,
    Packages,
    container_problems,
    container_program,
    find_interpreter,
    find_packages,
    own_packages,
    package_problem,
)
from trainkit.launch.secrets import refuse_secrets
from trainkit.launch.trainer_process import find_code_problems
from trainkit.plan.facts import Environment, Facts, Interpreter
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.make_plan import problems
from trainkit.plan.node_range import plan_nodes
from trainkit.plan.torch_build import release_problem
from trainkit.plan.workload import SHELLS, TRAINER, Workload
from trainkit.run.rundir import MANIFEST_NAME, RunDir
from trainkit.slurm.environment import RANK_VARIABLES, conf_file
from trainkit.slurm.quoting import quote


class Gatherer:
    """Gathers the facts of configs that share a place and mostly the data, such as the points of a group."""

    def __init__(self, target: Target | None = None, code_dir: Path | None = None) -> None:
        self._target = target
        self._code_dir = Path() if code_dir is None else code_dir
        """The folder that files of the user's code are relative to."""
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
        environment = self._environment_of(loaded.config, self._target.submits_job, workload)
        if resumes:  # earlier versions wrote `true` for what nobody had set: the ranks say what is missing
            others = (item for item in environment.problems if item[0] != "logging.tensorboard")
            environment = replace(environment, problems=tuple(others))
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
        """The target; while Slurm answers, another interpreter is asked, and the data is read."""
        launch = loaded.config.launch
        if choose_backend(launch.backend, launch.cluster)[0] == "local":
            return make_target(loaded)

        def look(at: Callable[[], object]) -> None:
            with suppress(Exception):  # raised again when it is needed
                at()

        looks: list[Callable[[], object]] = [partial(self._environment_of, loaded.config, True, workload)]
        looks += [] if workload.is_command else [partial(self._data_of, loaded.config)]
        others = [Thread(target=look, args=(at,)) for at in looks]
        for other in others:
            other.start()
        try:
            return make_target(loaded)
        finally:
            for other in others:
                other.join()

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
    code_dir: Path | None = None,
) -> Facts:
    """The facts of a config, as `Gatherer.facts` finds them; `target` skips the detection of the cluster."""
    return Gatherer(target, code_dir).facts(loaded, workload, resumes=resumes)


def _missing(config: RunConfig, resumes: bool, code_dir: Path) -> Iterator[KeyProblem]:
    """A problem for each key that names a file or run which does not exist; code is in `code_dir`."""
    source = None if resumes else config.model.init_from  # a run with its own checkpoint does not read it
    # A run that others wait for may have no checkpoint yet.
    if source and not (Path(source, MANIFEST_NAME).is_file() or RunDir(Path(source)).exists()):
        message = f"is {source}, which is neither a run folder nor a checkpoint"
        yield "model.init_from", message, "`trainkit ckpt ls RUN` lists those of a run"
    key, name = config.model_source
    file, _, _ = name.rpartition(":")
    # A task may also be in a module; an architecture is always in a file.
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
    """The launch plan of a config on this machine or the cluster.

    `code_dir` is the working directory of the ranks, by default the current one; `before` is that of
    `plan_nodes`. Raises ConfigError with all problems.
    """
    config, launch, cluster, cwd = loaded.config, loaded.config.launch, facts.target.cluster, Path.cwd()
    plan = plan_nodes(loaded, facts, workload, before)
    reasons, warnings, values = dict(plan.reasons), list(plan.warnings), dict[str, Any]()
    untested = next((key for key in _EXPERIMENTAL if getattr(launch, key) is not None), None)
    if plan.slurm is not None and untested is not None:
        program = _EXPERIMENTAL[untested]
        note = f"launch.{untested} has not been validated with a real {program}; try a short run first"
        reasons["experimental"] = note
    if reports := _notifications(config.notify, plan, warnings):
        reasons["notify"] = reports
    if not workload.is_command and (found := find_code_problems(loaded, code_dir or cwd)):
        raise ConfigError(found)
    if launch.container is not None and cluster is not None:
        values["container_program"] = container_program(launch, cluster.containers)
    if workload.is_command:
        refuse_missing(workload.argv, launch, workload.launcher, code_dir or cwd)
        refuse_secrets(workload.argv, config.secrets)
        values["python"] = command_python(launch, workload.argv, cwd)
    if plan.slurm is None and facts.environment is not None:
        # No batch script starts the agents of this run, so they use the interpreter of `launch`.
        interpreter = facts.environment.interpreter
        if unused := [f"launch.{name}" for name in _BATCH_ONLY if getattr(launch, name)]:
            warnings.append(f"{', '.join(unused)}: only batch jobs of Slurm use it")
        if launch.container is None and any((launch.venv, launch.uv, launch.python)):
            reasons["python"] = f"{interpreter.argv[0]}, as launch says"
            values["venv"] = interpreter.venv
            if not workload.is_command:
                values["python"] = (*interpreter.argv, *interpreter.options)
    return replace(plan, reasons=reasons, warnings=tuple(warnings), **values)


def _notifications(notify: NotifyConfig, plan: LaunchPlan, warnings: list[str]) -> str:
    """What a run reports and to where, if anything; adds what it cannot report to the warnings."""
    found = []
    if notify.on and os.environ.get(notify.webhook or ""):
        found.append(f"{', '.join(notify.on)} to the URL in {notify.webhook}")
    elif notify.on and notify.webhook not in (None, WEBHOOK_VARIABLE):
        warnings.append(f"notify.webhook is {notify.webhook}, which is not set in this shell")
    if notify.mail is not None and plan.slurm is None:
        warnings.append("notify.mail has no effect: Slurm sends the emails, and this run starts here")
    elif notify.mail is not None:
        by_mail = [event for event in notify.on if event in MAIL_TYPES]
        unknown = [event for event in notify.on if event not in MAIL_TYPES]
        without = f"; Slurm does not know {', '.join(unknown)}" if unknown else ""
        found.append(f"{', '.join(by_mail)} by email to {notify.mail}{without}")
    return "; ".join(found)


def planning_error(invalid: InvalidConfig, workload: Workload, *, target: Target | None) -> ConfigError:
    """All problems of an invalid config: those of loading it, and those of planning with its valid keys."""
    try:
        facts = gather(invalid.rest, workload, target=target)
        return invalid.with_problems_of_rest(problems(invalid.rest, facts, workload))
    except TrainkitError as error:  # Slurm or a file cannot be read: report at least the problems of the load
        return invalid.with_problems_of_rest(error.problems if isinstance(error, ConfigError) else [])


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_JOB_VARIABLE = re.compile(r"(SLURM|SBATCH|SRUN|TRAINKIT_JOB)_\w+")


def launch_problems(launch: LaunchConfig) -> Iterator[KeyProblem]:
    """(key, message, hint) for values that are invalid on any machine."""
    for name in launch.modules:
        if name.startswith("-") or len(name.split()) != 1:
            hint = "list one name per entry; put other `module` commands in launch.setup"
            yield "launch.modules", f"has {name!r}, which is not a module name", hint
    if launch.conda is not None and launch.conda.startswith("-"):
        yield "launch.conda", f"is {launch.conda!r}, which is an option, not an environment", ""
    if any("\0" in line for line in launch.setup):
        yield "launch.setup", "has a NUL character, which a script cannot contain", ""
    for name, value in launch.env.items():
        key = f"launch.env.{name}"
        if not _VARIABLE.fullmatch(name):
            yield key, "is not a valid environment variable name", "use letters, digits and _"
        elif name in RANK_VARIABLES or _JOB_VARIABLE.fullmatch(name):
            yield key, "is set by the job in every process", "remove it"
        elif "\0" in value:
            yield key, "has a NUL character, which an environment variable cannot contain", ""


def command_python(
    launch: LaunchConfig, command: Sequence[str], cwd: Path, environ: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """The interpreter of a launcher such as torchrun: the one that would run the command without it.

    That is the one that the config or the command names, else that of the active environment, else this one.
    """
    if any((launch.venv, launch.conda, launch.uv, launch.container, launch.python)):
        return find_interpreter(launch, cwd, environ)[0].argv
    if "/" in command[0] and PurePath(command[0]).name.startswith("python"):
        return (os.path.normpath(cwd / Path(command[0]).expanduser()),)
    active = environ.get("VIRTUAL_ENV") or environ.get("CONDA_PREFIX")
    python = None if active is None else shutil.which("python", path=environ.get("PATH", os.defpath))
    is_active = python is not None and PurePath(python).is_relative_to(str(active))
    return (str(python) if is_active else sys.executable,)


def refuse_missing(command: Sequence[str], launch: LaunchConfig, launcher: str, cwd: Path) -> None:
    """Raise UsageError for a command that cannot start in `cwd`, its working directory."""
    elsewhere = (launch.venv, launch.conda, launch.uv, launch.container, launch.python)
    runs_unchanged = launcher == "python" and not any(elsewhere) and not launch.modules and not launch.setup
    if runs_unchanged and shutil.which(command[0], path=os.environ.get("PATH", os.defpath)) is None:
        hint = "give its path, or set launch.venv, conda, modules or container in the config"
        if command[0].endswith(".py") and (cwd / command[0]).is_file():
            hint = f"`-- python {quote(command[0])} …` runs the file of that name here"
        elif "/" in command[0] and (cwd / command[0]).is_file():
            hint = f"`chmod +x {quote(command[0])}` makes that file a program"
        raise UsageError(f"command not found on PATH: {command[0]!r}", hint=hint)
    script = _script_of(command)
    # launch.setup may change the folder or create the script.
    folder_is_known = launch.container is None and not launch.setup
    if script is not None and folder_is_known and not (cwd / script).exists():
        raise UsageError(
            f"there is no {shown_path(cwd / script)}", hint="commands are started in this folder"
        )


def _script_of(command: Sequence[str]) -> str | None:
    """The Python script that a command starts; None if it starts something else or cannot be determined."""
    if PurePath(command[0]).name in SHELLS:
        return None  # the argument is a shell program, which may name any files
    before = takewhile(lambda word: word not in ("-m", "-c"), command)
    return next((word for word in before if word.endswith(".py")), None)


SYSTEM_FOLDER = "/usr"
"""What is installed below it may differ between this host and the nodes of a cluster."""
_BATCH_ONLY = ("modules", "conda", "container", "setup")
"""What only a batch script uses."""
_EXPERIMENTAL = {"conda": "conda", "container": "Apptainer or pyxis"}
"""Settings that were tested with a stand-in only, and what it stood in for."""


LAUNCHER_MODULES = {
    "torchrun": "torch",
    "megatron": "torch",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
}
"""Launcher -> the package that has it."""


def find_environment(config: RunConfig, on_slurm: bool, workload: Workload, cwd: Path) -> Environment:
    """The environment of the ranks, and what would fail in it, as far as that is known here.

    Where a package is not known, the ranks check it, or the job warns and trains.
    """
    launch, trackers = config.launch, tuple(config.logging.trackers)
    if config.logging.tensorboard is True and not workload.is_command:
        trackers = ("tensorboard", *trackers)
    key = next((name for name in ("python", "venv", "uv", "conda") if getattr(launch, name)), None)
    if not on_slurm and (launch.container is not None or key in (None, "conda")):
        key, launch = None, LaunchConfig(env=launch.env)
    interpreter, found = find_interpreter(launch, cwd)
    program, named = interpreter.argv[0], "device" if key is None else f"launch.{key}"
    # On another host, PATH may lead to another program of this name.
    is_known = not found and "/" in program and launch.container is None
    is_known = is_known and not (on_slurm and (launch.modules or launch.setup))
    trains_here = not workload.is_command and (key is None or not on_slurm)
    may_use_gpus = not workload.is_command and config.device != "cpu"
    may_use_gpus = may_use_gpus and (not on_slurm or _is_cluster_of_host(launch))
    module = LAUNCHER_MODULES.get(workload.launcher)
    is_of_nodes = on_slurm and PurePath(program).is_relative_to(SYSTEM_FOLDER)
    if module and (is_of_nodes or command_python(config.launch, workload.argv, cwd) != interpreter.argv):
        module = None  # the command starts with another Python
    if "PYTHONPATH" in launch.env:
        trackers, module = (), None
    packages, torch = None, None
    if is_known and (trackers or module or trains_here or may_use_gpus):
        names = ("torch", "trainkit", *trackers, *filter(None, (module,)))
        try:
            packages = _packages_of(interpreter, names, launch.env, cwd)
        except NoAnswer as error:
            if trains_here and key is not None:
                reason = str(error).removeprefix(f"{program} does not run: ")
                message = f"uses {program}, which does not run: {reason}"
                found.append((named, message, f"`{quote(program)} -V` shows it"))
    if on_slurm:
        found = [*launch_problems(launch), *found]
    if packages is not None:
        if trains_here and key is None and (problem := release_problem(packages.torch.version)):
            found.append(("", f"{program} {problem[0]}", problem[1]))
        elif trains_here and key is not None and (problem := package_problem(packages, program)):
            found.append((named, f"uses {program}, which {problem[0]}", problem[1]))
        for name in (name for name in trackers if name not in packages.files):
            hint = f"`{quote(program)} -m pip install 'trainkit[{name}]'` installs it"
            found.append((f"logging.{name}", f"is set, but {program} has no {name}", hint))
        if module is not None and module not in packages.files:
            hint = f"`{quote(program)} -m pip install {module}` installs it; launch.venv names another Python"
            found.append(("", f"--launcher {workload.launcher} starts {module}, which {program} lacks", hint))
        is_of_host = on_slurm and packages.is_below("torch", SYSTEM_FOLDER)
        torch = packages.torch if may_use_gpus and not is_of_host else None
    webhook = config.notify.webhook
    if url := os.environ.get(webhook or ""):
        from trainkit.job.notifications import url_problem  # slow to import, and seldom needed

    if url and (what := url_problem(url)) is not None:
        hint = f"export {webhook}=https://…, as the chat program shows it, in the shell that submits"
        found.append(("notify.webhook", f"is {webhook}, whose value {what}", hint))
    return Environment(interpreter, tuple(found), torch, named)


def _packages_of(
    interpreter: Interpreter, names: Sequence[str], env: Mapping[str, str], cwd: Path
) -> Packages:
    if interpreter.argv[0] == sys.executable and not {"PYTHONPATH", "PYTHONHOME"} & env.keys():
        return own_packages(*names)
    return find_packages((*interpreter.argv, *interpreter.options), names, env, cwd)


def _is_cluster_of_host(launch: LaunchConfig) -> bool:
    """Whether a job runs on the cluster of this host, not on one that only a profile describes."""
    has_sbatch = shutil.which("sbatch", path=os.environ.get("PATH", os.defpath)) is not None
    return has_sbatch and (launch.cluster is None or conf_file(os.environ) is not None)
