"""Programs that tests run, and those that `make test` installs where it can."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, NoReturn

import pytest


def run_program(*argv: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, without input; `options` are those of `subprocess.run`."""
    given = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 300, **options}
    return subprocess.run(argv, **given)


def program(name: str) -> str:
    """The path of a program; without it the test is skipped, or fails where CI=true promises it."""
    path = shutil.which(name)
    if path is None:
        missing(name)
    return str(path)


def missing(name: str) -> NoReturn:
    """Skip the test because a program is missing, or fail it where CI=true promises that it is there."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{name} is not installed, although .ci/install-programs ran")
    pytest.skip(f"needs {name}: .ci/install-programs installs it")
