"""What is wrong with the surroundings that a config asks for, before anything is submitted."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from trainkit.config.running import LaunchConfig
from trainkit.submit.containers import container_troubles
from trainkit.submit.interpreters import Trouble, find_interpreter
from trainkit.submit.surroundings import launch_troubles


def find_troubles(launch: LaunchConfig, cwd: Path) -> Iterator[Trouble]:
    """(key, message, hint) for everything that would fail in the job: modules, interpreter, container."""
    yield from launch_troubles(launch)
    yield from find_interpreter(launch, sys.executable, os.environ, cwd)[1]
    yield from container_troubles(launch, [str(cwd)], cwd=str(cwd))
