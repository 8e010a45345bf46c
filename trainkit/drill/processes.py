"""The processes of a run on this machine, found by what the kernel shows of them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

from trainkit.frozen import dataclass
from trainkit.job.children import descendants
from trainkit.job.worker_env import RUN_DIR_VARIABLE
from trainkit.rundir import RunDir

PROC = Path("/proc")


@dataclass(frozen=True)
class RunProcesses:
    """The pids of a run at one moment."""

    supervisors: tuple[int, ...]
    agents: Mapping[int, int]
    """By node rank."""
    ranks: Mapping[int, int]
    """By rank; those that a launcher has started too, but not the launcher."""

    @property
    def everything(self) -> tuple[int, ...]:
        return (*self.supervisors, *self.agents.values(), *self.ranks.values())


def find_processes(run: RunDir) -> RunProcesses:
    """The processes of a local run, wherever in the tree they are."""
    supervisors: list[int] = []
    agents: dict[int, int] = {}
    with_rank: dict[int, int] = {}
    for pid in (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()):
        words = _words(pid, "cmdline")
        if str(run.path) in words and "trainkit.job.supervisor" in words:
            supervisors.append(pid)
        elif str(run.path) in words and "trainkit.job.agent" in words and "--node-rank" in words:
            agents[int(words[words.index("--node-rank") + 1])] = pid
        else:
            environ = dict(word.partition("=")[::2] for word in _words(pid, "environ"))
            if environ.get(RUN_DIR_VARIABLE) == str(run.path) and environ.get("RANK", "").isdigit():
                with_rank[pid] = int(environ["RANK"])
    # What a rank has started itself, to load data for example, has the rank's environment too.
    ranks = {rank: pid for pid, rank in with_rank.items() if _parent(pid) not in with_rank}
    return RunProcesses(tuple(supervisors), agents, ranks)


def _words(pid: int, file: str) -> list[str]:
    """The NUL-separated words of a file of a process; none when it has ended or is somebody else's."""
    try:
        return (PROC / str(pid) / file).read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _parent(pid: int) -> int | None:
    try:
        return int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def kill_all(pids: Iterable[int]) -> int:
    """SIGKILL for processes; how many of them were still there."""
    num_killed = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            num_killed += 1
    return num_killed


def kill_node(run: RunDir, node_rank: int) -> int:
    """SIGKILL for an agent and everything below it, as when its machine dies; how many processes."""
    agent = find_processes(run).agents.get(node_rank)
    return 0 if agent is None else kill_all((agent, *descendants(agent)))
