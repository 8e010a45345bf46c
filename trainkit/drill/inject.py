"""What a drill does to a run: the same on this machine and on Slurm, with the rights of its owner."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainkit.control.follow_ups import cancel_follow_ups
from trainkit.control.jobs import ASK_SOON_S, kill, live_entry, liveness, recall, slurm_job, step_of, tell
from trainkit.errors import UsageError
from trainkit.job.node.worker_env import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE
from trainkit.job.processes import descendants
from trainkit.job.record import Liveness, mark_cancelled, newest_entry, run_lock
from trainkit.manifest import Checkpoint, published
from trainkit.rundir import RunDir
from trainkit.slurm.control import kill_step, requeue, run_step

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
        elif str(run.path) in words and "trainkit.job.node.agent" in words and "--node-rank" in words:
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


GONE_WITHIN_S = 120.0
FLIPPED_BYTES = 8

# Every process whose environment has all of these words; what has ended meanwhile is no error.
_KILL_BY_ENVIRONMENT = """
files=$(ls -d /proc/[0-9]*/environ)
for word; do files=$(grep -lzsFx -e "$word" $files); [ -n "$files" ] || exit 0; done
for file in $files; do pid=${file#/proc/}; kill -9 "${pid%/environ}" && echo killed; done
exit 0
"""


class FaultInjector(Protocol):
    """What interrupts a run; each way gives False when nothing was there to be struck any more."""

    poll_s: float
    """How often the run's files may be looked at."""

    def kill_rank(self, rank: int) -> bool: ...

    def kill_node(self, node_rank: int) -> bool: ...

    def kill_ranks(self) -> bool: ...


@dataclass
class LocalFaultInjector:
    """Strikes the processes of a run on this machine."""

    run: RunDir
    poll_s: float = 0.002

    def kill_rank(self, rank: int) -> bool:
        ranks = find_processes(self.run).ranks
        return rank in ranks and kill_all([ranks[rank]]) > 0

    def kill_node(self, node_rank: int) -> bool:
        return kill_node(self.run, node_rank) > 0

    def kill_ranks(self) -> bool:
        return kill_all(find_processes(self.run).ranks.values()) > 0


@dataclass
class SlurmFaultInjector:
    """Strikes the processes of a run's job through Slurm, which lets nobody else's be touched."""

    run: RunDir
    poll_s: float = 0.02

    def kill_rank(self, rank: int) -> bool:
        return self._kill_where(f"RANK={rank}")

    def kill_node(self, node_rank: int) -> bool:
        entry = newest_entry(self.run)
        step_id = None if entry is None else step_of(self.run, entry)
        # The batch shell is no part of the step, and its own node number says nothing.
        return step_id is not None and self._kill_where(
            f"SLURM_STEP_ID={step_id}", f"SLURM_NODEID={node_rank}"
        )

    def kill_ranks(self) -> bool:
        entry = newest_entry(self.run)
        step_id = None if entry is None else step_of(self.run, entry)
        if entry is None or step_id is None:
            return False
        kill_step(str(entry["job_id"]), step_id)
        return True

    def _kill_where(self, *words: str) -> bool:
        entry = newest_entry(self.run)
        job = None if entry is None else slurm_job(entry)
        if entry is None or job is None or not job.num_nodes:
            return False
        ours = [f"{RUN_DIR_VARIABLE}={self.run.path}", f"{ATTEMPT_VARIABLE}={entry['attempt']}"]
        environ = {
            name: value
            for name, value in os.environ.items()
            if name not in (RUN_DIR_VARIABLE, ATTEMPT_VARIABLE)
        }
        argv = ["sh", "-c", _KILL_BY_ENVIRONMENT, "sh", *ours, *words]
        return "killed" in run_step(job.job_id, job.num_nodes, argv, environ=environ)


def injector_for(run: RunDir, backend: str) -> FaultInjector:
    """What can strike a run of this backend."""
    return LocalFaultInjector(run) if backend == "local" else SlurmFaultInjector(run)


def notify(run: RunDir) -> bool:
    """Tell a run to save and come back; False when it does not run any more."""
    entry = newest_entry(run)
    return entry is not None and tell(run, entry, signal.SIGUSR2) == "told"


def requeue_job(run: RunDir) -> bool:
    """Have Slurm put a run's job back into the queue, whatever it is doing.

    Raises SlurmRefused where this cluster does not allow it.
    """
    entry = newest_entry(run)
    if entry is None:
        return False
    requeue(str(entry["job_id"]))
    return True


def kill_job(run: RunDir) -> bool:
    """End a run at once and for good, as `trainkit cancel --now` does; False when it had ended.

    Returns when nothing of it is left.
    """
    with run_lock(run):
        recall(run)
        entry = live_entry(run, "cancel")
        if entry is None:
            return False
        mark_cancelled(run)
        # First, because what is killed has not ended well: they would start.
        cancel_follow_ups(run, but=str(entry["job_id"]))
        kill(run, entry)
    # It has written its end by now; Slurm takes a while to take the job off its nodes.
    deadline_s = time.monotonic() + GONE_WITHIN_S
    while liveness(entry) is Liveness.ALIVE and time.monotonic() < deadline_s:
        time.sleep(ASK_SOON_S)
    return True


def flip_bytes(run: RunDir, chance: random.Random) -> Checkpoint:
    """Change a few bytes in the largest file of a run's newest checkpoint, and not its size."""
    checkpoints = published(run.checkpoints_dir)
    if not checkpoints:
        raise UsageError(f"{run.checkpoints_dir} has no checkpoint to damage")
    newest = checkpoints[-1]
    files = newest.manifest()["files"]
    name = max(files, key=lambda name: files[name]["bytes"])
    with (newest.path / name).open("r+b") as stream:
        stream.seek(chance.randrange(max(1, files[name]["bytes"] - FLIPPED_BYTES)))
        place = stream.tell()
        old = stream.read(FLIPPED_BYTES)
        stream.seek(place)
        stream.write(bytes(byte ^ 0xFF for byte in old))
    return newest
