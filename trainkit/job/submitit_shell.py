"""What submitit runs in the batch shell of a job: the supervisor that every Slurm job has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BatchShell:
    """The callable that submitit pickles; it holds nothing but the run folder's path.

    submitit's own requeue never begins: the supervisor takes the signals for itself, and asks Slurm to
    requeue the job when the ranks have saved.
    """

    run_dir: str

    def __call__(self) -> None:
        from trainkit.job.batch import supervise
        from trainkit.rundir import RunDir, read_json

        run = RunDir(Path(self.run_dir))
        code = supervise(run, read_json(run.step_file))
        if code:
            # An exception would be pickled, and the job would end well for Slurm.
            raise SystemExit(code)
