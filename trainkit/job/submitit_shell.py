"""What submitit runs in the batch shell of a job, the supervisor that every Slurm job has, and its files."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from trainkit.rundir import RunDir, read_json


@dataclass(frozen=True)
class BatchShell:
    """The callable that submitit pickles; it holds nothing but the run folder's path.

    submitit's own requeue never begins: the supervisor takes the signals for itself, and asks Slurm to
    requeue the job when the ranks have saved.
    """

    run_dir: str

    def __call__(self) -> None:
        from trainkit.job.batch import supervise

        run = RunDir(Path(self.run_dir))
        code = supervise(run, read_json(run.step_file))
        if code:
            # An exception would be pickled, and the job would end well for Slurm.
            raise SystemExit(code)


def submitit_file(run: RunDir, job_id: str, what: str) -> Path:
    """Where submitit keeps something of a job; only jobs that it submitted have it."""
    return run.path / "submitit" / f"{job_id}_{what}"


def give_submitit_files(run: RunDir, job_id: str, new_id: str) -> None:
    """Give a job what submitit gave to the one before it: its script looks for a pickle by its own id."""
    for what in ("submitted.pkl", "submission.sh"):
        file = submitit_file(run, job_id, what)
        if file.exists():
            shutil.copyfile(file, submitit_file(run, new_id, what))
