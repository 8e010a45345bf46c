"""Provides a Slurm with chosen answers, and a job in it."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import make_attempt
from trainkit.backends.slurm import allocation, claim_attempt
from trainkit.backends.slurm.attempt_watch import SlurmAttemptWatch
from trainkit.job import supervisor
from trainkit.job.supervisor import supervise_job
from trainkit.run.events import log_event
from trainkit.run.files import read_json
from trainkit.run.record import add_slurm_attempt, read_job
from trainkit.run.rundir import RunDir
from trainkit.scheduler import JobState
from trainkit.slurm.client import SlurmRefused
from trainkit.slurm.jobs import JobDetails

RUNNING = JobDetails(
    JobState.RUNNING, "RUNNING", is_preempted=False, may_requeue=True, end_time=None, restarts=0
)


@dataclass
class Slurm:
    """A Slurm with chosen answers, which records its calls."""

    job: JobDetails | None = RUNNING
    lost: tuple[str, ...] | None = ()
    down: tuple[str, ...] = ()
    """The hosts that are down in the answer to a query."""
    refuses: bool = False
    requeued: int = 0

    def requeue(self, job_id: str, patience_s: float) -> None:
        if self.refuses:
            raise SlurmRefused(f"scontrol: Job {job_id} may not be requeued")
        self.requeued += 1


def reasons(run: RunDir) -> list[tuple[int, str, str]]:
    return [(entry.attempt, entry.job_id, entry.reason) for entry in read_job(run).attempts]


def start(run: RunDir, code: str = "pass", *writes: Any) -> int:
    add_slurm_attempt(run, 1, "7", "submit", "sbatch")
    for write in writes:
        write()
    return supervise_job(run, [sys.executable, "-c", code])


def step(run: RunDir, code: str, *writes: Any) -> tuple[int, dict[str, Any]]:
    """Return the exit code of a job whose step runs some Python, and the newest end.json."""
    result = start(run, code, *writes)
    end = read_json(run.attempt(run.attempt_numbers()[-1]).end_file)
    assert end["exit_code"] == result
    return result, end


def record_signal(run: RunDir, name: str) -> Callable[[], None]:
    return lambda: log_event(run, 1, "signal", signal=name)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(claim_attempt, "ENTRY_TIMEOUT_S", 0.2)
    return make_attempt(tmp_path / "run", ["requeue.max_crashes=1"]).run


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """Return a Slurm with chosen answers and a job on one host."""
    slurm = Slurm()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node1")
    monkeypatch.setattr(SlurmAttemptWatch, "poll_interval_s", 0.05)
    monkeypatch.setattr(supervisor, "redirect_output", lambda log: None)
    monkeypatch.setattr(supervisor.processes, "adopt_orphans", lambda: None)
    monkeypatch.setattr(allocation, "expand_hosts", lambda text: [text])
    monkeypatch.setattr(allocation, "query_job", lambda job_id, patience_s=0.0: slurm.job)
    monkeypatch.setattr(allocation, "lost_hosts", lambda job_id, hosts, is_running: slurm.lost)
    monkeypatch.setattr(
        allocation, "node_states", lambda hosts: {host: "down*" for host in hosts if host in slurm.down}
    )
    monkeypatch.setattr(allocation.shutil, "which", lambda program, **_: program)
    monkeypatch.setattr(allocation, "requeue", slurm.requeue)
    return slurm
