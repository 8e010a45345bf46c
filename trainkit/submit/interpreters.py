"""Finds the Python of a job and how its environment is entered; the part that looks at the disk."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainkit.config.running import LaunchConfig
from trainkit.job.processes import PYTHON_OPTIONS

Trouble = tuple[str, str, str]
"""What is wrong before anything is submitted: key, message, hint."""
_VERSION = re.compile(r"python(\d+)\.(\d+)$")


@dataclass(frozen=True)
class Interpreter:
    """The Python that the agents and ranks run with."""

    argv: tuple[str, ...]
    """What a rank's command begins with; within the container when there is one."""
    host_argv: tuple[str, ...]
    """What the supervisor's begins with: it runs outside of any container."""
    options: tuple[str, ...] = ("-u",)
    """Its options; ``-P``, which Python 3.10 does not know, only where it is seen to be newer."""
    host_options: tuple[str, ...] = PYTHON_OPTIONS
    venv: str | None = None
    """The folder whose bin/activate the script sources."""
    conda: str | None = None
    """What ``conda activate`` is given: a name or a folder."""
    conda_script: str | None = None
    """The conda.sh that makes ``conda activate`` work; None asks the `conda` on PATH."""


def find_interpreter(
    launch: LaunchConfig, executable: str, environ: Mapping[str, str], cwd: Path
) -> tuple[Interpreter, list[Trouble]]:
    """The interpreter that `launch` means, and what is wrong with it; folders are counted from `cwd`.

    `executable` is the submitting interpreter, which a job takes when the config names no other.
    """
    troubles = list(_contradictions(launch))
    venv, conda, script = None, None, None
    argv: tuple[str, ...] = (executable,)
    in_container = launch.container is not None
    if in_container:
        argv = ("python3",)
    if launch.venv is not None:
        venv = _absolute(launch.venv, cwd)
        troubles += _venv_troubles("launch.venv", launch.venv, venv, in_container)
        argv = (f"{venv}/bin/python",)
    elif launch.uv is not None:
        # Not `uv run`: it would stand between Slurm and the ranks, start a process more in each of them, and
        # hand on signals that Slurm has sent to every process of the step already.
        venv, problem = _uv_environment(launch.uv, environ, cwd)
        troubles += problem
        argv = (f"{venv}/bin/python",)
    elif launch.conda is not None:
        conda, script, prefix, problem = _conda_environment(launch, environ, cwd)
        troubles += problem
        argv = ("python",) if prefix is None else (f"{prefix}/bin/python",)
    if launch.python is not None:
        argv = (launch.python if in_container else _program(launch.python, cwd),)
        if not in_container and shutil.which(argv[0], path=environ.get("PATH", os.defpath)) is None:
            message = f"is {launch.python!r}, which is no program that can be run"
            troubles += (
                [] if launch.modules else [("launch.python", message, "name an interpreter by its path")]
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
    return found, troubles


def _contradictions(launch: LaunchConfig) -> Iterator[Trouble]:
    named = [key for key in ("venv", "conda", "uv") if getattr(launch, key) is not None]
    for key in named[1:]:
        message = f"is {getattr(launch, key)!r} while launch.{named[0]} is {getattr(launch, named[0])!r}"
        yield f"launch.{key}", message, "a job has one environment: set one of them to null"
    if launch.conda is not None and launch.container is not None:
        message = f"is {launch.conda!r} and launch.container is set: conda cannot be activated in a container"
        yield "launch.conda", message, "launch.python names an interpreter within the container"


def _venv_troubles(key: str, given: str, folder: str, in_container: bool) -> Iterator[Trouble]:
    if in_container:
        return  # it may exist nowhere else
    if not os.access(f"{folder}/bin/python", os.X_OK):
        message = f"is {given!r}, and there is no {folder}/bin/python"
        yield key, message, f"`python3 -m venv {given}` makes a virtual environment"
    elif not Path(folder, "bin", "activate").is_file():
        message = f"is {given!r}, and there is no {folder}/bin/activate"
        yield key, message, "launch.python takes an interpreter that cannot be activated"


def _uv_environment(given: str, environ: Mapping[str, str], cwd: Path) -> tuple[str, list[Trouble]]:
    """The environment of a uv project; that of a workspace lies in a folder above its members."""
    project = _absolute(given, cwd)
    hint = f"`uv sync --project {given}` makes it"
    if not Path(project, "pyproject.toml").is_file():
        message = f"is {given!r}, and there is no {project}/pyproject.toml"
        return f"{project}/.venv", [("launch.uv", message, "name the folder of a uv project")]
    if environ.get("UV_PROJECT_ENVIRONMENT"):
        folder = _absolute(environ["UV_PROJECT_ENVIRONMENT"], Path(project))
        return folder, list(_venv_troubles("launch.uv", given, folder, in_container=False))
    for parent in (Path(project), *Path(project).parents):
        if (parent / ".venv" / "pyvenv.cfg").is_file() and (parent / "pyproject.toml").is_file():
            folder = str(parent / ".venv")
            return folder, list(_venv_troubles("launch.uv", given, folder, in_container=False))
    message = f"is {given!r}, which has no environment yet: there is no {project}/.venv"
    return f"{project}/.venv", [("launch.uv", message, hint)]


def _conda_environment(
    launch: LaunchConfig, environ: Mapping[str, str], cwd: Path
) -> tuple[str, str | None, str | None, list[Trouble]]:
    """What to activate, conda.sh, the environment's folder (None: not known here), and what is wrong."""
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
                [("launch.conda", message, "`conda env list` shows where they are")],
            )
        return prefix, found_script, prefix, _no_conda(launch, base)
    if base is None:
        return launch.conda, None, None, _no_conda(launch, base)
    for folder in _conda_folders(launch.conda, base, environ):
        if os.access(folder / "bin" / "python", os.X_OK):
            return launch.conda, found_script, str(folder), []
    message = f"is {launch.conda!r}, which {base} does not know"
    troubles = [("launch.conda", message, "`conda env list` shows the names that there are")]
    return launch.conda, found_script, None, [] if launch.modules else troubles


def _no_conda(launch: LaunchConfig, base: Path | None) -> list[Trouble]:
    """A module may bring conda; without modules it has to be here."""
    if base is not None or launch.modules:
        return []
    message = f"is {launch.conda!r}, and there is no conda on PATH"
    return [
        ("launch.conda", message, "name the module that brings it in launch.modules, or use launch.python")
    ]


def _conda_base(environ: Mapping[str, str]) -> Path | None:
    """Where conda is installed: two folders above its program."""
    program = environ.get("CONDA_EXE") or shutil.which("conda", path=environ.get("PATH", os.defpath))
    if not program or not Path(program).is_file():
        return None
    return Path(program).resolve().parents[1]


def _conda_folders(name: str, base: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    """Where an environment of this name can lie."""
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
    """A program by its path, which is counted from `cwd`, or by its name, which PATH resolves in the job."""
    return _absolute(name, cwd) if "/" in name else name


def _options(program: str, executable: str) -> tuple[str, ...]:
    """How to start modules with an interpreter, whose version is read off the file that it is in the end."""
    if program == executable:
        return PYTHON_OPTIONS
    match = _VERSION.search(str(Path(program).resolve()))
    newer = match is not None and (int(match[1]), int(match[2])) >= (3, 11)
    return ("-u", "-P") if newer else ("-u",)
