"""Runs scripts without handlers that Slurm ends, where ranks die before their agents get the signal."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.on_slurm.login import Login, settings
from tests.support.programs import ranks_of
from trainkit.job.processes import parent_pid
from trainkit.run.files import read_json
from trainkit.run.rundir import RunDir

WITHOUT_HANDLER = """
import os, time
print("attempt", os.environ["TRAINKIT_JOB_ATTEMPT"], "rank", os.environ["RANK"], flush=True)
time.sleep(600)
"""
HASTE = 10
"""The difference in nice values between the signalled processes and the process that sends the signals."""


@dataclass(frozen=True)
class Shape:
    """Describes how a run is started."""

    hosts: int
    ranks_per_host: int
    per: str
    backend: str

    @property
    def num_ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    def submit(self, login: Login, *more: str) -> RunDir:
        """Submit the script in this shape, with one crash allowed."""
        login.script(WITHOUT_HANDLER, "without_handler.py")
        return login.submit(
            *("--nodes", str(self.hosts), "--gpus-per-node", str(self.ranks_per_host), "--per", self.per),
            *("--backend", self.backend, "--partition", "low", "--no-snapshot"),
            *settings("requeue.max_crashes=1", "resources.cpus_per_gpu=1", "resources.mem=4G"),
            *(*more, "--", "python", "without_handler.py"),
        )

    def wait_for_ranks(self, login: Login, run: RunDir, attempt: int) -> None:
        """Wait until every rank of an attempt runs the script."""
        for rank in range(self.num_ranks):
            login.wait_for_log(run, f"attempt {attempt} rank {rank}", rank, attempt)

    def __str__(self) -> str:
        return f"{self.hosts} x {self.ranks_per_host} ranks, per {self.per}, {self.backend}"


def hurry(run: RunDir) -> None:
    """Let a signalled rank die, and its agent notice this, before slurmstepd signals the next rank."""
    for pid in ranks_of(run).values():
        agent = parent_pid(pid) or 0
        stepd = parent_pid(agent) or 0
        for one, nice in ((pid, -HASTE), (agent, -HASTE), (stepd, HASTE)):
            for thread in _threads(one):
                with suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, thread, nice)
                    os.sched_setaffinity(thread, {min(os.sched_getaffinity(0))})


def notes_about_nodes(login: Login) -> list[dict[str, Any]]:
    """Return the records of failed nodes that a person's runs have written."""
    folder = Path(login.env["XDG_STATE_HOME"], "trainkit/bad_nodes")
    return [note for file in folder.glob("*.json") for note in read_json(file)["notes"]]


def _threads(pid: int) -> Iterator[int]:
    with suppress(OSError):
        yield from (int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir())
