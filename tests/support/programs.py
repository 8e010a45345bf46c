"""Programs that tests run, and those that `make test` installs where it can."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from trainkit.run.rundir import RunDir


def run_program(*argv: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, without input; `options` are those of `subprocess.run`."""
    given = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 300, **options}
    return subprocess.run(argv, **given)


def wait_for(condition: Callable[[], Any], timeout_s: float = 120.0) -> Any:
    """The first true value of a condition."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        # Before it is asked: a test that stood still itself asks once more.
        is_last = time.monotonic() >= deadline_s
        value = condition()
        if value:
            return value
        assert not is_last, "waited too long"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ranks_of(run: RunDir) -> dict[int, int]:
    """The process of every rank of the built-in trainer, by rank, also on other hosts of a test cluster."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, KeyError):  # no process, or one that ends or starts right now
            arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if str(run.path) in arguments and "trainkit.trainer" in arguments:
                variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                found[int(dict(v.partition("=")[::2] for v in variables)["RANK"])] = int(entry.name)
    return found


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
