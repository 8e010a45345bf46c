"""What a drill does to a run: the same on this machine and on Slurm, with the rights of its owner."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from typing import Protocol

from trainkit.drill.processes import find_processes, kill_all, kill_node
from trainkit.errors import UsageError
from trainkit.job.record import Liveness, mark_cancelled, newest_entry, run_lock
from trainkit.job.worker_env import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE
from trainkit.manifest import Checkpoint, published
from trainkit.rundir import RunDir
from trainkit.slurm.beside import run_on_nodes
from trainkit.slurm.control import kill_step, requeue
from trainkit.submit.follow_ups import cancel_follow_ups
from trainkit.submit.steer import (
    ASK_SOON_S,
    kill,
    live_entry,
    liveness,
    recall,
    slurm_job,
    step_of,
    tell,
)

GONE_WITHIN_S = 120.0
FLIPPED_BYTES = 8

# Every process whose environment has all of these words; what has ended meanwhile is no error.
_KILL_BY_ENVIRONMENT = """
files=$(ls -d /proc/[0-9]*/environ)
for word; do files=$(grep -lzsFx -e "$word" $files); [ -n "$files" ] || exit 0; done
for file in $files; do pid=${file#/proc/}; kill -9 "${pid%/environ}" && echo killed; done
exit 0
"""


class Hand(Protocol):
    """What interrupts a run; each way gives False when nothing was there to be struck any more."""

    poll_s: float
    """How often the run's files may be looked at."""

    def kill_rank(self, rank: int) -> bool: ...

    def kill_node(self, node_rank: int) -> bool: ...

    def kill_ranks(self) -> bool: ...


@dataclass
class LocalHand:
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
class SlurmHand:
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
        return "killed" in run_on_nodes(job.job_id, job.num_nodes, argv, environ=environ)


def hand_for(run: RunDir, backend: str) -> Hand:
    """What can strike a run of this backend."""
    return LocalHand(run) if backend == "local" else SlurmHand(run)


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
