"""Provides programs that tests run, and the list of programs that `make test` installs if it can."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from trainkit.job.processes import environ_of, parent_pid, proc_file
from trainkit.job.rank_env import RUN_DIR_VARIABLE
from trainkit.run.rundir import RunDir

FORWARDS = "trap 'kill -TERM $pid' TERM; {} & pid=$!; wait $pid; wait $pid"
PASSES_NOTHING_ON = "trap 'echo heard' TERM; {} & pid=$!; while kill -0 $pid; do wait $pid; done; wait $pid"
"""Scripts with a trap, formatted with the line that starts a training run."""


def run_program(*argv: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, without input. `options` are options of `subprocess.run`."""
    given = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 300, **options}
    return subprocess.run(argv, **given)


def wait_for(
    condition: Callable[[], Any], timeout_s: float = 120.0, what: str = "", poll_s: float = 0.02
) -> Any:
    """Wait until a condition is true, and return its value."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        # The deadline is checked before the condition, so that a test that was itself suspended tries once
        # more.
        is_last = time.monotonic() >= deadline_s
        value = condition()
        if value:
            return value
        assert not is_last, f"waited {timeout_s:g} s for {what or 'a condition'}"
        time.sleep(poll_s)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@dataclass(frozen=True)
class RunProcesses:
    """The pids of the processes of a run on this machine, anywhere in its process tree."""

    supervisors: tuple[int, ...]
    agents: Mapping[int, int]
    """Maps a node rank to the pid of its agent."""
    ranks: Mapping[int, int]
    """Maps a rank to its pid, also for ranks of a launcher, but without the launcher."""

    @property
    def everything(self) -> tuple[int, ...]:
        return (*self.supervisors, *self.agents.values(), *self.ranks.values())

    @classmethod
    def of(cls, run: RunDir) -> RunProcesses:
        supervisors, agents, with_rank = list[int](), dict[int, int](), dict[int, int]()
        for pid in (int(entry.name) for entry in Path("/proc").glob("[0-9]*")):
            words = proc_file(pid, "cmdline").decode(errors="replace").split("\0")
            if str(run.path) in words and "trainkit.job.supervisor" in words:
                supervisors.append(pid)
            elif str(run.path) in words and "trainkit.job.node.agent" in words and "--node-rank" in words:
                agents[int(words[words.index("--node-rank") + 1])] = pid
            else:
                environ = environ_of(pid)
                if environ.get(RUN_DIR_VARIABLE) == str(run.path) and environ.get("RANK", "").isdigit():
                    with_rank[pid] = int(environ["RANK"])
        # Children of a rank, such as data loaders, have its environment too.
        ranks = {rank: pid for pid, rank in with_rank.items() if parent_pid(pid) not in with_rank}
        return cls(tuple(supervisors), agents, ranks)


def ranks_of(run: RunDir) -> Mapping[int, int]:
    """Return the pid of every rank by rank, also on other hosts of a test cluster."""
    return RunProcesses.of(run).ranks


def program(name: str) -> str:
    """Return the path of a program. Without the program, skip the test, or fail it if CI=true."""
    path = shutil.which(name)
    if path is None:
        missing(name)
    return str(path)


def missing(name: str) -> NoReturn:
    """Skip the test because a program is missing, or fail it if CI=true."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{name} is not installed, although .ci/install-programs ran")
    pytest.skip(f"needs {name}: .ci/install-programs installs it")
