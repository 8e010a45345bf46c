"""Checks before a run is created: its name, launch section, command, and secrets in its files."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path, PurePath
from urllib.parse import quote as url_quote

from trainkit.config import RunConfig
from trainkit.config.running import MAIL_TYPES, WEBHOOK_VARIABLE, LaunchConfig, NotifyConfig
from trainkit.config.validation import MIN_SECRET_CHARS, written_secrets
from trainkit.errors import UsageError
from trainkit.job.notifications import url_problem
from trainkit.plan.gpus import cuda_torch_hint, release_problem
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.workload import SHELLS
from trainkit.slurm.conf_file import conf_file
from trainkit.slurm.quoting import quote
from trainkit.submit.containers import container_problems, runtimes
from trainkit.submit.interpreters import (
    LaunchProblem,
    cpu_only_torch,
    find_interpreter,
    find_torch,
    has_module,
    installed_torch,
    package_problem,
)
from trainkit.submit.job_environment import RANK_VARIABLES

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SLURM_VARIABLE = re.compile(r"(SLURM|SBATCH|SRUN)_\w+")


RESERVED_NAME = re.compile(r"last|local-\d+|\d+(_\d+)?")


def check_name(name: str) -> None:
    """Raise UsageError for a name that commands would not take for a run name: `last` or a job id."""
    if RESERVED_NAME.fullmatch(name):
        raise UsageError(
            f"a run cannot be called {name!r}",
            hint="`last` and job ids are reserved; choose another --name",
        )


def launch_problems(launch: LaunchConfig) -> Iterator[LaunchProblem]:
    """(key, message, hint) for values that are invalid on any machine."""
    for name in launch.modules:
        if name.startswith("-") or len(name.split()) != 1:
            hint = "list one name per entry; put other `module` commands in launch.setup"
            yield "launch.modules", f"has {name!r}, which is not a module name", hint
    if launch.conda is not None and launch.conda.startswith("-"):
        yield "launch.conda", f"is {launch.conda!r}, which is an option, not an environment", ""
    for name, value in launch.env.items():
        key = f"launch.env.{name}"
        if not _VARIABLE.fullmatch(name):
            yield key, "is not a valid environment variable name", "use letters, digits and _"
        elif name in RANK_VARIABLES or _SLURM_VARIABLE.fullmatch(name):
            yield key, "is set by the job in every process", "remove it"
        elif "\0" in value:
            yield key, "has a NUL character, which an environment variable cannot contain", ""
    for line in launch.setup:
        if "\0" in line:
            yield "launch.setup", "has a NUL character, which a script cannot contain", ""
    for key in ("modules", "venv", "conda", "uv", "python", "container", "container_mounts"):
        value = getattr(launch, key)
        for text in (value,) if isinstance(value, str) else value or ():
            if "\n" in text or "\0" in text:
                yield (
                    f"launch.{key}",
                    f"has {text!r}, which contains a line break or NUL",
                    "write it on one line",
                )


def command_python(
    launch: LaunchConfig, command: Sequence[str], cwd: Path, environ: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """The interpreter of a launcher such as torchrun: the one that would run the command without it.

    That is the one that the config or the command names, else that of the active environment, else this one.
    """
    if any((launch.venv, launch.conda, launch.uv, launch.container, launch.python)):
        return find_interpreter(launch, sys.executable, environ, cwd)[0].argv
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
        raise UsageError(f"command not found on PATH: {command[0]!r}", hint=hint)
    script = _script_of(command)
    # launch.setup may change the folder or create the script.
    folder_is_known = launch.container is None and not launch.setup
    if script is not None and folder_is_known and not (cwd / script).exists():
        raise UsageError(f"there is no {script} in {cwd}", hint="commands are started in this folder")


def _script_of(command: Sequence[str]) -> str | None:
    """The Python script that a command starts; None if it starts something else or cannot be determined."""
    if PurePath(command[0]).name in SHELLS:
        return None  # the argument is a shell program, which may name any files
    before = takewhile(lambda word: word not in ("-m", "-c"), command)
    return next((word for word in before if word.endswith(".py")), None)


def find_launch_problems(
    launch: LaunchConfig, cwd: Path, containers: Sequence[str], *, is_command: bool
) -> Iterator[LaunchProblem]:
    """(key, message, hint) for settings that would fail in the job: modules, interpreter, container.

    `containers` are the container programs of the cluster.
    """
    yield from launch_problems(launch)
    elsewhere = (launch.venv, launch.conda, launch.uv, launch.container, launch.python, launch.modules)
    if not is_command and not any(elsewhere) and not launch.setup:
        yield from _own_torch_problem()
    yield from find_interpreter(launch, sys.executable, os.environ, cwd)[1]
    yield from container_problems(launch, [str(cwd)], runtimes(containers), cwd=str(cwd))


def find_local_problems(
    launch: LaunchConfig, cwd: Path, *, is_command: bool, environ: Mapping[str, str] = os.environ
) -> Iterator[LaunchProblem]:
    """(key, message, hint) for an environment in which workers on this machine could not run."""
    key = next((name for name in ("python", "venv", "uv") if getattr(launch, name) is not None), None)
    if key is None or launch.container is not None:
        if not is_command:
            yield from _own_torch_problem()
        return
    interpreter, problems = find_interpreter(launch, sys.executable, environ, cwd)
    yield from problems
    if problems or is_command:
        return  # a command may need neither torch nor trainkit
    problem = package_problem((*interpreter.argv, *interpreter.options), {**environ, **launch.env}, cwd)
    if problem is not None:
        yield (f"launch.{key}", *problem)


SYSTEM_FOLDER = "/usr"
"""What is installed below it may differ between this host and the nodes of a cluster."""


def find_torch_problem(
    plan: LaunchPlan, launch: LaunchConfig, cwd: Path, environ: Mapping[str, str] = os.environ
) -> LaunchProblem | None:
    """(key, message, hint) for a run on GPUs whose torch was built without CUDA, if that is known here.

    The ranks check it too.
    """
    on_slurm = plan.slurm is not None
    is_known = not plan.workload.is_command and not (on_slurm and _may_be_another(launch, environ))
    if plan.device != "cuda" or not is_known:
        return None
    # Without a batch script, neither conda nor a container is used.
    in_effect = launch if on_slurm else launch.model_copy(update={"container": None, "conda": None})
    interpreter, problems = find_interpreter(in_effect, sys.executable, environ, cwd)
    program = interpreter.argv[0]
    if problems or "/" not in program:
        return None  # on another host, PATH may lead to another program of this name
    env = tuple((name, launch.env[name]) for name in ("PYTHONPATH", "PYTHONHOME") if name in launch.env)
    folder = find_torch((*interpreter.argv, *interpreter.options), env)
    if folder is None or (on_slurm and folder.is_relative_to(SYSTEM_FOLDER)):
        return None
    version = cpu_only_torch(folder)
    if version is None:
        return None
    keys = (f"launch.{name}" for name in ("python", "venv", "uv", "conda") if getattr(in_effect, name))
    message = f"the run uses GPUs, but torch {version} of {program} was built without CUDA"
    return next(keys, "device"), message, cuda_torch_hint(program)


def find_tracker_problems(
    config: RunConfig, cwd: Path, *, on_slurm: bool, environ: Mapping[str, str] = os.environ
) -> Iterator[LaunchProblem]:
    """(key, message, hint) for trackers whose module the interpreter of the job lacks, if that is known here.

    Where it is not known, the job warns and trains, and `trainkit sync` sends the metrics later.
    """
    trackers, launch = config.logging.trackers, config.launch
    if not trackers or "PYTHONPATH" in launch.env:
        return
    # Without a batch script, none of these is used.
    unused = {"container": None, "conda": None, "modules": (), "setup": ()}
    launch = launch if on_slurm else launch.model_copy(update=unused)
    if launch.container is not None or launch.modules or launch.setup:
        return
    interpreter, problems = find_interpreter(launch, sys.executable, environ, cwd)
    program = interpreter.argv[0]
    if problems or "/" not in program:
        return
    for name in trackers:
        if not has_module((*interpreter.argv, *interpreter.options), name):
            hint = f"`{quote(program)} -m pip install 'trainkit[{name}]'` installs it"
            yield f"logging.{name}", f"is set, but {program} has no {name}", hint


def _may_be_another(launch: LaunchConfig, environ: Mapping[str, str]) -> bool:
    """Whether a job may import another torch than its interpreter does here."""
    if launch.container is not None or launch.modules or launch.setup:
        return True
    has_sbatch = shutil.which("sbatch", path=environ.get("PATH", os.defpath)) is not None
    # Else it is planned here for another cluster, by the profile of that one.
    return not has_sbatch or (launch.cluster is not None and conf_file(environ) is None)


def _own_torch_problem() -> Iterator[LaunchProblem]:
    """The problem of the torch of this interpreter, for ranks that use it; of no key of the config."""
    problem = release_problem(installed_torch() or "")
    if problem is not None:
        yield "", f"{sys.executable} {problem[0]}", problem[1]


def with_local_environment(plan: LaunchPlan, launch: LaunchConfig, cwd: Path) -> LaunchPlan:
    """The plan of a run whose agents no batch script starts, so that they use the interpreter of `launch`.

    What needs a batch script is named among the reasons of the plan.
    """
    unused = [name for name in ("modules", "conda", "container", "setup") if getattr(launch, name)]
    if unused:
        keys = ", ".join(f"launch.{name}" for name in unused)
        plan = replace(plan, reasons={**plan.reasons, "launch": f"{keys}: only batch jobs of Slurm use it"})
    if launch.container is not None or not any((launch.venv, launch.uv, launch.python)):
        return plan
    interpreter, _ = find_interpreter(launch, sys.executable, os.environ, cwd)
    plan = replace(plan, reasons={**plan.reasons, "python": f"{interpreter.argv[0]}, as launch says"})
    if not plan.workload.is_command:
        plan = replace(plan, python=(*interpreter.argv, *interpreter.options))
    return replace(plan, venv=interpreter.venv)


def experimental_settings(launch: LaunchConfig) -> str | None:
    """A note on a setting that was tested with a stand-in only; None without such a setting."""
    for key, program in (("conda", "conda"), ("container", "Apptainer or pyxis")):
        if getattr(launch, key) is not None:
            return f"launch.{key} has not been validated with a real {program}; try a short run first"
    return None


def webhook_problem(notify: NotifyConfig, environ: Mapping[str, str]) -> Iterator[LaunchProblem]:
    """(key, message, hint) if the value of the variable that `notify.webhook` names is not a URL."""
    url = environ.get(notify.webhook or "", "")
    problem = url_problem(url) if url else None
    if problem is not None:
        hint = f"export {notify.webhook}=https://…, as the chat program shows it, in the shell that submits"
        yield "notify.webhook", f"is {notify.webhook}, whose value {problem}", hint


def with_notifications(plan: LaunchPlan, notify: NotifyConfig, environ: Mapping[str, str]) -> LaunchPlan:
    """The plan with what it reports and to where, and warnings about what it cannot report."""
    found, warnings = [], list(plan.warnings)
    if notify.on and environ.get(notify.webhook or ""):
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
    reasons = {**plan.reasons, "notify": "; ".join(found)} if found else plan.reasons
    return replace(plan, reasons=reasons, warnings=tuple(warnings))


def present_secrets(names: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """The named variables that are set, which the job inherits."""
    return tuple(name for name in names if environ.get(name))


def refuse_leaks(text: str, where: str, names: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise UsageError when a text that will be written contains the value of a named variable.

    `where` names the text, for example ``submit.sbatch``. The value is searched for verbatim and as escaped
    in scripts, JSON and URLs; the error contains only the name of the variable.
    """
    for name in present_secrets(names, environ):
        # A multi-line key may be indented in the text, so search for its longest line.
        line = max(environ[name].strip().splitlines() or [""], key=len)
        if len(line) >= MIN_SECRET_CHARS and any(spelling in text for spelling in _spellings(line)):
            raise UsageError(
                f"the value of {name} would be written into {where}",
                hint=f"remove it from config and command line: the job inherits {name} from this shell",
            )


def refuse_secrets(command: Sequence[str], names: Sequence[str]) -> None:
    """Raise UsageError for a command that sets a secret, since plan.json contains the command."""
    found = [name for word in command for name in written_secrets(word, names)]
    if found:
        raise UsageError(
            f"the command sets {found[0]}, which looks like a secret, and would be written to plan.json",
            hint=f"export {found[0]} in the shell instead: the job inherits it",
        )


def _spellings(value: str) -> Iterator[str]:
    yield value
    yield json.dumps(value)[1:-1]
    yield json.dumps(value, ensure_ascii=False)[1:-1]
    yield value.replace("'", "'\"'\"'")  # in a word of bash in single quotes
    yield quote(value + "\n").removeprefix("$'").removesuffix("\\n'")  # in a $'…' word of bash
    yield url_quote(value, safe="")
