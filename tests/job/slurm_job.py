"""A Slurm that says what a test wants, and a job in it."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    """What Slurm says, and what it was asked to do."""

    job: JobDetails | None = RUNNING
    lost: tuple[str, ...] | None = ()
    down: tuple[str, ...] = ()
    """Hosts that are down when it is asked about them."""
    refuses: bool = False
    requeued: int = 0

    def requeue(self, job_id: str, patience_s: float) -> None:
        if self.refuses:
            raise SlurmRefused(f"scontrol: Job {job_id} may not be requeued")
        self.requeued += 1


def reasons(run: RunDir) -> list[tuple[int, str, str]]:
    return [(entry.attempt, entry.job_id, entry.reason) for entry in read_job(run).attempts]


def step(run: RunDir, code: str, *writes: Any) -> tuple[int, dict[str, Any]]:
    """The exit code of a job whose step runs some Python, and the newest end.json."""
    add_slurm_attempt(run, 1, "7", "submit", "sbatch")
    for write in writes:
        write()
    result = supervise_job(run, [sys.executable, "-c", code])
    end = read_json(run.attempt(run.attempt_numbers()[-1]).end_file)
    assert end["exit_code"] == result
    return result, end


def record_signal(run: RunDir, name: str) -> Callable[[], None]:
    return lambda: log_event(run, 1, "signal", signal=name)
