"""Finds the Python interpreter of a job and how to activate its environment."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from trainkit import __version__
from trainkit.config.running import LaunchConfig
from trainkit.job.processes import PYTHON_OPTIONS
from trainkit.plan.gpus import release_problem

LaunchProblem = tuple[str, str, str]
"""A problem of the launch section: key, message, hint."""
_VERSION = re.compile(r"python(\d+)\.(\d+)$")


@dataclass(frozen=True)
class Interpreter:
    """The Python interpreter of agents and ranks."""

    argv: tuple[str, ...]
    """The argv prefix of a rank; inside the container if there is one."""
    host_argv: tuple[str, ...]
    """The argv prefix of the supervisor, which runs outside of any container."""
    options: tuple[str, ...] = ("-u",)
    """Options of the interpreter; includes ``-P`` only if it is known to be newer than 3.10."""
    host_options: tuple[str, ...] = PYTHON_OPTIONS
    venv: str | None = None
    """The folder of the bin/activate that the script sources."""
    conda: str | None = None
    """The argument of ``conda activate``: a name or a folder."""
    conda_script: str | None = None
    """The conda.sh that defines ``conda activate``; None uses the `conda` on PATH."""


def find_interpreter(
    launch: LaunchConfig, executable: str, environ: Mapping[str, str], cwd: Path
) -> tuple[Interpreter, list[LaunchProblem]]:
    """The interpreter of a launch section, and its problems; folders are relative to `cwd`.

    `executable` is the submitting interpreter: the default of the job.
    """
    problems = list(_contradictions(launch))
    venv, conda, script = None, None, None
    argv: tuple[str, ...] = (executable,)
    in_container = launch.container is not None
    if in_container:
        argv = ("python3",)
    if launch.venv is not None:
        venv = _absolute(launch.venv, cwd)
        problems += _venv_problems("launch.venv", launch.venv, venv, in_container)
        argv = (f"{venv}/bin/python",)
    elif launch.uv is not None:
        # Not `uv run`: it adds a process per rank, and forwards signals that Slurm already sends to every
        # process of the step.
        venv, problem = _uv_environment(launch.uv, environ, cwd)
        problems += problem
        argv = (f"{venv}/bin/python",)
    elif launch.conda is not None:
        conda, script, prefix, problem = _conda_environment(launch, environ, cwd)
        problems += problem
        argv = ("python",) if prefix is None else (f"{prefix}/bin/python",)
    if launch.python is not None:
        argv = (launch.python if in_container else _program(launch.python, cwd),)
        if not in_container and shutil.which(argv[0], path=environ.get("PATH", os.defpath)) is None:
            message = f"is {launch.python!r}, which is not an executable program"
            problems += (
                [] if launch.modules else [("launch.python", message, "give the path of an interpreter")]
            )
    options = ("-u",) if in_container else _options(argv[0], executable)
    found = Interpreter(
        argv=argv,
        host_argv=(executable,) if in_container else argv,
        options=options,
        host_options=PYTHON_OPTIONS if in_container else options,
        venv=None if in_container else venv,
        conda=conda,
        conda_script=script,
    )
    return found, problems


def installed_torch() -> str | None:
    """The version of torch of this interpreter; None without torch."""
    found = find_spec("torch")
    return None if found is None else _torch_version(found.submodule_search_locations or ())


def _torch_version(folders: Iterable[str]) -> str | None:
    found = (_torch_facts(Path(folder)).get("__version__") for folder in folders)
    return next((version for version in found if isinstance(version, str)), None)


def _torch_facts(folder: Path) -> dict[str, object]:
    """The constants of the version.py of a torch, which importing it would take seconds to tell."""
    try:
        tree = ast.parse((folder / "version.py").read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return {}
    facts: dict[str, object] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(value := getattr(node, "value", None), ast.Constant):
            facts |= {target.id: value.value for target in targets if isinstance(target, ast.Name)}
    return facts


_PACKAGES = """
import importlib.util, json
specs = {name: importlib.util.find_spec(name) for name in ("torch", "trainkit")}
missing = [name for name, spec in specs.items() if spec is None]
folders = [] if "torch" in missing else list(specs["torch"].submodule_search_locations or ())
version = "" if "trainkit" in missing else __import__("trainkit").__version__
print("packages:", json.dumps({"trainkit": version, "missing": missing, "torch": folders}))
"""
_TORCH = """
import importlib.util
found = importlib.util.find_spec("torch")
print("torch:", "" if found is None else found.origin, sep=" ")
"""
_PACKAGES_TIMEOUT_S = 60.0


def package_problem(argv: tuple[str, ...], environ: Mapping[str, str], cwd: Path) -> tuple[str, str] | None:
    """Why ranks of the built-in trainer cannot run with an interpreter, and a hint; None when they can.

    `argv` is the interpreter with its options.
    """
    program = argv[0]
    try:
        done = subprocess.run(
            [*argv, "-c", _PACKAGES],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PACKAGES_TIMEOUT_S,
            env=dict(environ),
            cwd=cwd,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"uses {program}, which does not run: {error}", f"`{shlex.quote(program)} -V` shows it"
    line = next((line for line in done.stdout.splitlines() if line.startswith("packages:")), None)
    if line is None:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return f"uses {program}, which does not run: {last}", f"`{shlex.quote(program)} -V` shows it"
    found = json.loads(line.removeprefix("packages: "))
    version, missing = found["trainkit"], found["missing"]
    if missing:
        message = f"uses {program}, which has no {' and no '.join(missing)}"
        if missing == ["torch"]:
            return message, f"`{shlex.quote(program)} -m pip install torch` installs it"
        return message, "install trainkit there too, or remove the key: then this interpreter is used"
    if version != __version__:
        message = f"uses {program}, which has trainkit {version}, and this is trainkit {__version__}"
        return message, "install the same version there, or use the `trainkit` of that environment"
    problem = release_problem(_torch_version(found["torch"]) or "")
    return None if problem is None else (f"uses {program}, which {problem[0]}", problem[1])


def _contradictions(launch: LaunchConfig) -> Iterator[LaunchProblem]:
    named = [key for key in ("venv", "conda", "uv") if getattr(launch, key) is not None]
    for key in named[1:]:
        message = f"is {getattr(launch, key)!r} while launch.{named[0]} is {getattr(launch, named[0])!r}"
        yield f"launch.{key}", message, "a job has one environment: set all but one to null"
    if launch.conda is not None and launch.container is not None:
        message = f"is {launch.conda!r} and launch.container is set: conda cannot be activated in a container"
        yield "launch.conda", message, "launch.python names an interpreter in the container"


@lru_cache
def find_torch(argv: tuple[str, ...], env: tuple[tuple[str, str], ...] = ()) -> Path | None:
    """The folder of the torch that an interpreter imports; None if it has none or does not run here.

    `argv` is the interpreter with its options; this one is not started again, unless the variables `env` are
    set for the other. Cached, since all points of a sweep use the same interpreter.
    """
    if argv[0] == sys.executable and not env:
        found = find_spec("torch")
        return None if found is None or found.origin is None else Path(found.origin).parent
    try:
        done = subprocess.run(
            [*argv, "-c", _TORCH],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PACKAGES_TIMEOUT_S,
            env={**os.environ, **dict(env)},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.splitlines()
    origin = next((line.removeprefix("torch: ") for line in lines if line.startswith("torch: /")), None)
    return None if origin is None else Path(origin).parent


_HAS_MODULE = (
    "import importlib.util, sys; found = importlib.util.find_spec(sys.argv[1]);"
    " print('module:', bool(found and found.origin))"
)


@lru_cache
def has_module(argv: tuple[str, ...], name: str) -> bool:
    """Whether an interpreter can import a module; True if the interpreter does not run here.

    `argv` is as for `find_torch`. A folder of that name, such as W&B's ``wandb/``, is no module.
    """
    if argv[0] == sys.executable:
        found = find_spec(name)
        return found is not None and found.origin is not None
    try:
        done = subprocess.run(
            [*argv, "-c", _HAS_MODULE, name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PACKAGES_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return True
    return "module: False" not in done.stdout


def cpu_only_torch(folder: Path) -> str | None:
    """The version of the torch in a folder if it was built without CUDA and ROCm; None if not, or unknown."""
    facts = _torch_facts(folder)
    if facts.get("cuda", "") is not None or facts.get("hip") is not None:
        return None
    return str(facts.get("__version__", "of unknown version"))


def _venv_problems(key: str, given: str, folder: str, in_container: bool) -> Iterator[LaunchProblem]:
    if in_container:
        return  # the folder may exist only in the container
    if not os.access(f"{folder}/bin/python", os.X_OK):
        message = f"is {given!r}, and there is no {folder}/bin/python"
        yield key, message, f"`python3 -m venv {given}` creates a virtual environment"
    elif not Path(folder, "bin", "activate").is_file():
        message = f"is {given!r}, and there is no {folder}/bin/activate"
        yield key, message, "for an interpreter without an environment to activate, set launch.python"


def _uv_environment(given: str, environ: Mapping[str, str], cwd: Path) -> tuple[str, list[LaunchProblem]]:
    """The environment folder of a uv project, and problems; a workspace has it above its members."""
    project = _absolute(given, cwd)
    hint = f"`uv sync --project {given}` creates it"
    if not Path(project, "pyproject.toml").is_file():
        message = f"is {given!r}, and there is no {project}/pyproject.toml"
        return f"{project}/.venv", [("launch.uv", message, "give the folder of a uv project")]
    if environ.get("UV_PROJECT_ENVIRONMENT"):
        folder = _absolute(environ["UV_PROJECT_ENVIRONMENT"], Path(project))
        return folder, list(_venv_problems("launch.uv", given, folder, in_container=False))
    for parent in (Path(project), *Path(project).parents):
        if (parent / ".venv" / "pyvenv.cfg").is_file() and (parent / "pyproject.toml").is_file():
            folder = str(parent / ".venv")
            return folder, list(_venv_problems("launch.uv", given, folder, in_container=False))
    message = f"is {given!r}, which has no environment yet: there is no {project}/.venv"
    return f"{project}/.venv", [("launch.uv", message, hint)]


def _conda_environment(
    launch: LaunchConfig, environ: Mapping[str, str], cwd: Path
) -> tuple[str, str | None, str | None, list[LaunchProblem]]:
    """(name or folder to activate, conda.sh, folder of the environment if known here, problems)."""
    assert launch.conda is not None
    base = _conda_base(environ)
    script = None if base is None else base / "etc" / "profile.d" / "conda.sh"
    found_script = str(script) if script is not None and script.is_file() else None
    if "/" in launch.conda or launch.conda.startswith("~"):
        prefix = _absolute(launch.conda, cwd)
        if not os.access(f"{prefix}/bin/python", os.X_OK):
            message = f"is {launch.conda!r}, and there is no {prefix}/bin/python"
            return (
                prefix,
                found_script,
                prefix,
                [("launch.conda", message, "`conda env list` lists the environments and their folders")],
            )
        return prefix, found_script, prefix, _no_conda(launch, base)
    if base is None:
        return launch.conda, None, None, _no_conda(launch, base)
    for folder in _conda_folders(launch.conda, base, environ):
        if os.access(folder / "bin" / "python", os.X_OK):
            return launch.conda, found_script, str(folder), []
    message = f"is {launch.conda!r}, which is not an environment of {base}"
    problems = [("launch.conda", message, "`conda env list` lists the environments")]
    return launch.conda, found_script, None, [] if launch.modules else problems


def _no_conda(launch: LaunchConfig, base: Path | None) -> list[LaunchProblem]:
    """A module may provide conda; without modules it must be on PATH."""
    if base is not None or launch.modules:
        return []
    message = f"is {launch.conda!r}, and there is no conda on PATH"
    return [
        ("launch.conda", message, "add the module that provides it to launch.modules, or set launch.python")
    ]


def _conda_base(environ: Mapping[str, str]) -> Path | None:
    """Where conda is installed: two folders above its executable."""
    program = environ.get("CONDA_EXE") or shutil.which("conda", path=environ.get("PATH", os.defpath))
    if not program or not Path(program).is_file():
        return None
    return Path(program).resolve().parents[1]


def _conda_folders(name: str, base: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    """The possible folders of an environment with this name."""
    if name == "base":
        yield base
    for folder in filter(None, environ.get("CONDA_ENVS_PATH", "").split(os.pathsep)):
        yield Path(folder, name)
    yield base / "envs" / name
    home = Path(environ.get("HOME", "/"))
    yield home / ".conda" / "envs" / name
    try:
        known = (home / ".conda" / "environments.txt").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    yield from (Path(line) for line in known if Path(line).name == name)


def _absolute(folder: str, cwd: Path) -> str:
    return os.path.normpath(cwd / Path(folder).expanduser())


def _program(name: str, cwd: Path) -> str:
    """A path, made absolute from `cwd`, or a plain name, which the job looks up on PATH."""
    return _absolute(name, cwd) if "/" in name else name


def _options(program: str, executable: str) -> tuple[str, ...]:
    """The options of an interpreter; its version is read from the name of the file that it links to."""
    if program == executable:
        return PYTHON_OPTIONS
    match = _VERSION.search(str(Path(program).resolve()))
    newer = match is not None and (int(match[1]), int(match[2])) >= (3, 11)
    return ("-u", "-P") if newer else ("-u",)
