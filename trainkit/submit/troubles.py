"""What is wrong with the surroundings that a config asks for, before anything is submitted."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path, PurePath

from trainkit.config.running import LaunchConfig
from trainkit.errors import UsageError
from trainkit.submit.containers import container_troubles, runtimes
from trainkit.submit.interpreters import Trouble, find_interpreter
from trainkit.submit.surroundings import launch_troubles

SHELLS = ("sh", "bash", "dash", "zsh")


def command_python(launch: LaunchConfig, cwd: Path) -> tuple[str, ...]:
    """The interpreter that a launcher of ranks runs with."""
    return find_interpreter(launch, sys.executable, os.environ, cwd)[0].argv


def refuse_missing(command: Sequence[str], launch: LaunchConfig, launcher: str, cwd: Path) -> None:
    """Raise UsageError when a command cannot start where it is going to run, as far as can be told."""
    elsewhere = (launch.venv, launch.conda, launch.uv, launch.container, launch.python)
    as_it_is = launcher == "python" and not any(elsewhere) and not launch.modules and not launch.setup
    if as_it_is and shutil.which(command[0], path=os.environ.get("PATH", os.defpath)) is None:
        raise UsageError(
            f"there is no program {command[0]!r} on PATH",
            hint="name it by its path, or say launch.venv, conda, modules or container in the config",
        )
    script = _script_of(command)
    # A line of launch.setup may change the folder, or make the script.
    as_submitted = launch.container is None and not launch.setup
    if script is not None and as_submitted and not (cwd / script).exists():
        raise UsageError(f"there is no {script} in {cwd}", hint="commands are started from this folder")


def _script_of(command: Sequence[str]) -> str | None:
    """The Python script that a command starts; None where it starts something else, or cannot be told."""
    if PurePath(command[0]).name in SHELLS:
        return None  # which are given a program, in which a file may be named any way
    before = takewhile(lambda word: word not in ("-m", "-c"), command)
    return next((word for word in before if word.endswith(".py")), None)


def find_troubles(launch: LaunchConfig, cwd: Path, containers: Sequence[str]) -> Iterator[Trouble]:
    """(key, message, hint) for everything that would fail in the job: modules, interpreter, container.

    `containers` is what the cluster has to run them with.
    """
    yield from launch_troubles(launch)
    yield from find_interpreter(launch, sys.executable, os.environ, cwd)[1]
    yield from container_troubles(launch, [str(cwd)], runtimes(containers), cwd=str(cwd))
