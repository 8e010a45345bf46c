"""Injects faults into a run: kills, signals, requeues and damaged checkpoints, both locally and on Slurm."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass

from trainkit.backend import backend_of
from trainkit.backends.slurm.backend import step_of
from trainkit.control.cancel import cancel_run
from trainkit.errors import print_note
from trainkit.job.processes import descendants, proc_file, rank_of, ranks_below, signal_all
from trainkit.job.rank_env import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE
from trainkit.run.manifest import Checkpoint, published
from trainkit.run.record import AttemptRecord, read_job
from trainkit.run.rundir import RunDir
from trainkit.slurm.control import kill_steps, run_step

GONE_WITHIN_S = 120.0
POLL_S = 1.0
FLIPPED_BYTES = 8

# The script kills every process whose environment contains all given assignments, and skips processes that
# have already exited.
_KILL_BY_ENVIRONMENT = """
files=$(ls -d /proc/[0-9]*/environ)
for word; do files=$(grep -lzsFx -e "$word" $files); [ -n "$files" ] || exit 0; done
for file in $files; do pid=${file#/proc/}; kill -9 "${pid%/environ}" && echo killed; done
exit 0
"""


@dataclass
class FaultInjector:
    """Kills processes of a run on this machine. Methods return False if they found no process to kill."""

    run: RunDir

    def kill_rank(self, rank: int) -> bool:
        return _kill([pid for pid in ranks_below(self._supervisor) if rank_of(pid) == rank])

    def kill_node(self, node_rank: int) -> bool:
        option = f"\0--node-rank\0{node_rank}\0".encode()
        agents = [pid for pid in descendants(self._supervisor) if option in proc_file(pid, "cmdline")]
        return _kill([*agents, *(pid for agent in agents for pid in descendants(agent))])

    def kill_ranks(self) -> bool:
        return _kill(ranks_below(self._supervisor))

    @property
    def _supervisor(self) -> int:
        """Return the process id of the supervisor, or -1 if the supervisor has exited.

        No process has -1 as its parent process id.
        """
        entry = newest(self.run)
        return entry.pid if entry.pid is not None and entry.alive() else -1


def _kill(pids: list[int]) -> bool:
    signal_all(pids, signal.SIGKILL)
    return bool(pids)


@dataclass
class SlurmFaultInjector(FaultInjector):
    """Kills processes of a run's Slurm job by starting a job step on its nodes.

    Slurm allows users to start job steps only in their own jobs.
    """

    def kill_rank(self, rank: int) -> bool:
        return self._kill_where(f"RANK={rank}")

    def kill_node(self, node_rank: int) -> bool:
        # Requiring a step id excludes the batch script's shell, where SLURM_NODEID is not meaningful.
        step_id = step_of(self.run, newest(self.run))
        words = f"SLURM_STEP_ID={step_id}", f"SLURM_NODEID={node_rank}"
        return step_id is not None and self._kill_where(*words)

    def kill_ranks(self) -> bool:
        entry = newest(self.run)
        step_id = step_of(self.run, entry)
        if step_id is not None:
            kill_steps([(entry.job, step_id)])
        return step_id is not None

    def _kill_where(self, *words: str) -> bool:
        entry = newest(self.run)
        job = backend_of(entry).job(entry)
        if job is None or not job.num_nodes:
            return False
        own = [f"{RUN_DIR_VARIABLE}={self.run.path}", f"{ATTEMPT_VARIABLE}={entry.attempt}"]
        without = (RUN_DIR_VARIABLE, ATTEMPT_VARIABLE)
        environ = {name: value for name, value in os.environ.items() if name not in without}
        argv = ["sh", "-c", _KILL_BY_ENVIRONMENT, "sh", *own, *words]
        return "killed" in run_step(entry.job, job.num_nodes, argv, environ=environ)


def newest(run: RunDir) -> AttemptRecord:
    """Return the newest attempt of a run."""
    return read_job(run).newest or AttemptRecord()


def kill_job(run: RunDir) -> bool:
    """Kill a run as `trainkit cancel --now` does, and wait until its processes have exited.

    Returns False if the run had already ended.
    """
    entry = newest(run)
    if cancel_run(run, now=True, wait=False, warn=print_note).state == "ended":
        return False
    # The end of the run is recorded immediately, but Slurm needs some time to clean up the nodes.
    deadline_s = time.monotonic() + GONE_WITHIN_S
    while backend_of(entry).alive(run, entry) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return True


def flip_bytes(run: RunDir, rng: random.Random) -> Checkpoint:
    """Flip some bytes in the largest file of a run's newest checkpoint, and return that checkpoint."""
    checkpoint = published(run.checkpoints_dir)[-1]
    files = checkpoint.manifest().files
    name = max(files, key=lambda name: files[name]["bytes"])
    with (checkpoint.path / name).open("r+b") as stream:
        stream.seek(rng.randrange(max(1, files[name]["bytes"] - FLIPPED_BYTES)))
        position = stream.tell()
        old = stream.read(FLIPPED_BYTES)
        stream.seek(position)
        stream.write(bytes(byte ^ 0xFF for byte in old))
    return checkpoint
