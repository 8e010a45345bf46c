"""Find the packages that an interpreter would import, and report required packages that are missing."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any

from trainkit import __version__
from trainkit.cluster.target import is_cluster_of_host
from trainkit.config import RunConfig
from trainkit.config.running import LaunchConfig
from trainkit.config.schema import capabilities_of
from trainkit.extras import install_line, own_install_line
from trainkit.job.processes import kill_group
from trainkit.launch.environment import command_python, find_interpreter, launch_problems
from trainkit.plan.facts import Environment, Interpreter
from trainkit.plan.torch_build import ELSEWHERE, REQUIREMENT, TorchBuild, release_problem
from trainkit.plan.workload import Workload
from trainkit.quoting import quote
from trainkit.shipped import launchers, load


class NoAnswer(Exception):
    """Raised with a reason if an interpreter does not start or cannot report its packages."""

    def __init__(self, reason: str, *, is_slow: bool = False) -> None:
        super().__init__(reason)
        self.is_slow = is_slow


_MARK = "trainkit-answer:"
"""Marks the output line with the JSON result, because imported packages may also print to stdout."""
_PACKAGES = """
import importlib.util, json, platform, sys
from importlib import metadata
files, versions = {}, {}
for name in sys.argv[2:]:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:
        files[name] = spec.origin
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
if "trainkit" in files:
    trainkit = __import__("trainkit")
    is_ours = getattr(trainkit, "DISTRIBUTION", None) == "trainkit-hpc"
    versions["trainkit"] = trainkit.__version__ if is_ours else ""
print(sys.argv[1], json.dumps({
    "python": platform.python_version(), "program": sys.executable, "files": files, "versions": versions,
}))
"""
TIMEOUT_S = 60.0


def ask(
    argv: Sequence[str],
    script: str,
    args: Sequence[str],
    env: Mapping[str, str],
    cwd: Path | None = None,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """Run a script in an interpreter, and return the JSON object that the script prints.

    The script receives `_MARK` as its first argument, and prints it in front of the JSON object. `env` is
    added to the environment variables of this process. Raises NoAnswer if the script fails.
    """
    try:
        with subprocess.Popen(
            [*argv, "-c", script, _MARK, *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **env},
            cwd=cwd,
            start_new_session=True,
        ) as process:
            try:
                output, errors = process.communicate(timeout=timeout_s)
            except BaseException:
                kill_group(process)  # Also kill the script's child processes, such as ranks.
                raise
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{argv[0]} did not finish within {timeout_s:.0f} s", is_slow=True) from None
    except OSError as error:
        raise NoAnswer(f"{argv[0]} does not run: {error.strerror or error}") from None
    line = next((line for line in output.splitlines() if line.startswith(_MARK)), None)
    if process.returncode or line is None:
        lines = [line for line in errors.splitlines() if line.strip()]
        raise NoAnswer((lines or [f"{argv[0]} ended with exit code {process.returncode}"])[-1])
    found: dict[str, Any] = json.loads(line.removeprefix(_MARK))
    return found


@dataclass(frozen=True)
class Packages:
    """The packages that an interpreter would import, with their versions.

    A folder without code that has the name of a package, such as W&B's ``wandb/``, is not considered a
    package.
    """

    python: str
    program: str
    files: Mapping[str, str]
    """Maps a package name to the file that Python would import first."""
    versions: Mapping[str, str]

    @cached_property
    def torch(self) -> TorchBuild:
        """Return the build information in torch's version.py; unknown values are None."""
        return TorchBuild.read(self.program, self.files.get("torch"))


def find_packages(
    argv: Sequence[str],
    names: Sequence[str],
    env: Mapping[str, str],
    cwd: Path | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Packages:
    """Return the packages in `names` that the interpreter `argv` would import; raise NoAnswer on failure."""
    return Packages(**ask(argv, _PACKAGES, names, env, cwd, timeout_s))


def own_packages(*names: str) -> Packages:
    """Return the packages of the current interpreter, without starting another process."""
    specs = ((name, find_spec(name)) for name in names)
    files = {name: spec.origin for name, spec in specs if spec is not None and spec.origin is not None}
    return Packages(platform.python_version(), sys.executable, files, {"trainkit": __version__})


def package_problem(packages: Packages, program: str) -> tuple[str, str] | None:
    """Return (reason, hint) if the interpreter `program` cannot run the built-in trainer; None if it can."""
    if packages.files.keys().isdisjoint(("torch", "trainkit")):
        return "has no torch and no trainkit", f"{_install_hint(program)}, or {OWN_PYTHON}"
    return trainkit_problem(packages, program) or torch_problem(packages, program)


def trainkit_problem(packages: Packages, program: str) -> tuple[str, str] | None:
    """Return (reason, hint) if the trainkit package of the interpreter `program` is not usable, else None."""
    if "trainkit" not in packages.files:
        return "has no trainkit", f"{_install_hint(program)}, or {OWN_PYTHON}"
    version = packages.versions["trainkit"]
    if not version:
        message = f"imports another package called trainkit from {packages.files['trainkit']}"
        return message, f"uninstall the other package, then {_install_hint(program)}"
    if version != __version__:
        message = f"has trainkit {version}, but this is trainkit {__version__}"
        return message, f"{_install_hint(program)}, or use the `trainkit` of that environment"
    return None


OWN_PYTHON = "remove this key to use the current interpreter"


def _install_hint(program: str) -> str:
    line = own_install_line(program)
    return f"install trainkit {__version__} there" + (f": `{line}`" if line else "")


def torch_problem(packages: Packages, program: str) -> tuple[str, str] | None:
    """Return (reason, hint) if the trainer cannot use torch from the interpreter `program`, else None."""
    if "torch" in packages.files:
        return release_problem(packages.torch.version)
    install = f"`{shlex.quote(program)} -m pip install {shlex.quote(REQUIREMENT)}` installs it"
    return "lacks torch, which the trainer requires", f"{install}, or {ELSEWHERE}"


SYSTEM_FOLDER = "/usr"
"""Packages below this folder may differ between the current host and the cluster nodes."""


def find_environment(config: RunConfig, on_slurm: bool, workload: Workload, cwd: Path) -> Environment:
    """Return the environment of the ranks, with all problems that can be detected on this host.

    If a package cannot be checked on this host, either the ranks check it, or the job prints a warning and
    trains anyway.
    """
    launch, asked_by = config.launch, dict[str, str]()
    if config.logging.tensorboard is True and not workload.is_command:
        asked_by["tensorboard"] = "logging.tensorboard"
    for capability in map(load, capabilities_of(config)):
        asked_by |= capability.packages(config)
    key = next((name for name in ("python", "venv", "uv", "conda") if getattr(launch, name)), None)
    if not on_slurm and (launch.container is not None or key in (None, "conda")):
        key, launch = None, LaunchConfig(env=launch.env)
    interpreter, found = find_interpreter(launch, cwd)
    program, named = interpreter.argv[0], "device" if key is None else f"launch.{key}"
    # On another host, PATH may find a different program with the same name.
    is_known = not found and "/" in program and launch.container is None
    is_known = is_known and not (on_slurm and (launch.modules or launch.setup))
    trains_here = not workload.is_command and (key is None or not on_slurm)
    may_use_gpus = not workload.is_command and config.device != "cpu"
    may_use_gpus = may_use_gpus and (not on_slurm or is_cluster_of_host(launch.cluster))
    modules = launchers().get(workload.launcher, ())
    is_of_nodes = on_slurm and PurePath(program).is_relative_to(SYSTEM_FOLDER)
    if modules and (is_of_nodes or command_python(config.launch, workload.argv, cwd) != interpreter.argv):
        modules = ()  # The COMMAND uses a different Python interpreter.
    if "PYTHONPATH" in launch.env:
        asked_by, modules = {}, ()
    packages, torch = None, None
    if is_known and (asked_by or modules or trains_here or may_use_gpus):
        names = ("torch", "trainkit", *asked_by, *modules)
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
        # The cluster nodes may have torch even if this host does not.
        is_unknown = is_of_nodes and "torch" not in packages.files
        if trains_here and key is None and not is_unknown and (problem := torch_problem(packages, program)):
            found.append(("", f"{program} {problem[0]}", problem[1]))
        elif trains_here and key is not None and (problem := package_problem(packages, program)):
            found.append((named, f"uses {program}, which {problem[0]}", problem[1]))
        for name in (name for name in asked_by if name not in packages.files):
            hint = f"`{install_line(name, python=program)}` installs it"
            found.append((asked_by[name], f"is set, but {program} has no {name}", hint))
        if modules and packages.files.keys().isdisjoint(modules):
            name = modules[0]
            hint = f"`{quote(program)} -m pip install {name}` installs it; launch.venv selects another Python"
            found.append(("", f"--launcher {workload.launcher} needs {name}, which {program} lacks", hint))
        is_of_host = on_slurm and PurePath(packages.files.get("torch", "")).is_relative_to(SYSTEM_FOLDER)
        torch = packages.torch if may_use_gpus and not is_of_host else None
    return Environment(interpreter, tuple(found), torch, named)


def _packages_of(
    interpreter: Interpreter, names: Sequence[str], env: Mapping[str, str], cwd: Path
) -> Packages:
    if interpreter.argv[0] == sys.executable and not {"PYTHONPATH", "PYTHONHOME"} & env.keys():
        return own_packages(*names)
    return find_packages((*interpreter.argv, *interpreter.options), names, env, cwd)
