"""The run folder: its paths."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from trainkit.folders import ensure_folder

STARTS_FOLDER = "starts"
RUNS_FOLDER = "runs"


CHECKPOINT_PREFIX = "step-"


PARTIAL_SUFFIX = ".partial"


REJECTED_SUFFIX = ".rejected"


class RunDir:
    """The paths of one run folder."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config_file(self) -> Path:
        """The effective config of the newest attempt."""
        return self.path / "config.yaml"

    @property
    def plan_file(self) -> Path:
        """The launch plan of the newest attempt."""
        return self.path / "plan.json"

    @property
    def provenance_file(self) -> Path:
        return self.path / "provenance.json"

    @property
    def job_file(self) -> Path:
        return self.path / "job.json"

    @property
    def script_file(self) -> Path:
        """The batch script of the newest attempt."""
        return self.path / "submit.sbatch"

    @property
    def step_file(self) -> Path:
        """The argv of the step that a submitit job starts, as JSON."""
        return self.path / "step.json"

    @property
    def code_dir(self) -> Path:
        """The snapshot of the code at submission."""
        return self.path / "code"

    @property
    def work_dir(self) -> Path:
        """The folder in which a command runs, made from the snapshot at its first start."""
        return self.path / "work"

    @property
    def work_file(self) -> Path:
        """Which snapshot the files in `work_dir` come from."""
        return self.path / "work.json"

    @property
    def events_file(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def heartbeat_file(self) -> Path:
        """A command that prints nothing for long writes or touches it, to show that it does not hang."""
        return self.path / "heartbeat"

    @property
    def tensorboard_dir(self) -> Path:
        return self.path / "tensorboard"

    @property
    def trackers_dir(self) -> Path:
        """How far each tracker, such as MLflow, has the metrics."""
        return self.path / "trackers"

    @property
    def health_dir(self) -> Path:
        return self.path / "health"

    def health_file(self, host: str) -> Path:
        """Samples of a node: processors, memory, network, disks and GPUs."""
        return self.health_dir / f"{host}.jsonl"

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    @property
    def attempts_dir(self) -> Path:
        return self.path / "attempts"

    @property
    def lock_file(self) -> Path:
        """Locked while a command changes what the run does next."""
        return self.path / ".lock"

    @property
    def supervisor_lock_file(self) -> Path:
        """Locked by the run's supervisor until it exits."""
        return self.path / ".supervisor.lock"

    def checkpoint_dir(self, step: int) -> Path:
        return self.checkpoints_dir / f"{CHECKPOINT_PREFIX}{step:08d}"

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self, number)

    def latest_number(self) -> int | None:
        """The attempt that ``attempts/latest`` points to; None without the link."""
        try:
            name = (self.attempts_dir / "latest").readlink().name
        except OSError:
            return None
        return int(name) if name.isdigit() else None

    def attempt_numbers(self) -> list[int]:
        """The numbers of the existing attempts, oldest first; they start at 1."""
        if not self.attempts_dir.is_dir():
            return []
        return sorted(int(p.name) for p in self.attempts_dir.iterdir() if p.name.isdigit())

    def exists(self) -> bool:
        """Whether this folder exists and contains a run."""
        return self.config_file.is_file() and self.attempts_dir.is_dir()


class AttemptDir:
    """The paths of one attempt: one start of the workers, with its config and plan."""

    def __init__(self, run: RunDir, number: int) -> None:
        self.run = run
        self.number = number
        self.path = run.attempts_dir / f"{number:03d}"

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def logs_dir(self) -> Path:
        return self.path / "logs"

    @property
    def supervisor_log(self) -> Path:
        return self.logs_dir / "supervisor.log"

    @property
    def trackers_log(self) -> Path:
        return self.logs_dir / "trackers.log"

    @property
    def batch_host_log(self) -> Path:
        """Separate from the supervisor's log, in which srun's messages about tasks refer to the ranks."""
        return self.logs_dir / "batch-host.log"

    def node_log(self, node_rank: int) -> Path:
        return self.logs_dir / f"node-{node_rank:04d}.log"

    def rank_log(self, rank: int) -> Path:
        return self.logs_dir / f"rank-{rank:04d}.log"

    @property
    def errors_dir(self) -> Path:
        return self.path / "errors"

    def rank_error(self, rank: int) -> Path:
        return self.errors_dir / f"rank-{rank:04d}.json"

    @property
    def hangs_dir(self) -> Path:
        """Created by the first rank that hangs."""
        return self.path / "hangs"

    def rank_hang(self, rank: int) -> Path:
        return self.hangs_dir / f"rank-{rank:04d}.json"

    @property
    def stacks_dir(self) -> Path:
        return self.path / "stacks"

    def rank_stacks(self, rank: int) -> Path:
        return self.stacks_dir / f"rank-{rank:04d}.txt"

    @property
    def profile_dir(self) -> Path:
        return self.path / "profile"

    def rank_profile(self, rank: int) -> Path:
        return self.profile_dir / f"rank-{rank:04d}.json"

    @property
    def ranks_dir(self) -> Path:
        return self.path / "ranks"

    def rank_record(self, rank: int) -> Path:
        """What a rank computed by itself, on the steps that were logged."""
        return self.ranks_dir / f"rank-{rank:04d}.jsonl"

    @property
    def done_file(self) -> Path:
        """Created by a command to say that it is done: exit code 0 after a notice then means finished."""
        return self.path / "done"

    @property
    def rendezvous_file(self) -> Path:
        """The address at which the ranks of several hosts connect; empty until the first host writes it."""
        return self.path / "rendezvous.json"

    def host_file(self, node_rank: int) -> Path:
        """What a host without Slurm says of itself; empty until it has joined."""
        return self.path / f"host-{node_rank:04d}.json"

    def host_lock_file(self, node_rank: int) -> Path:
        """Locked by that host until it leaves."""
        return self.path / f".host-{node_rank:04d}.lock"

    @property
    def script_file(self) -> Path:
        """The batch script that was submitted for this attempt."""
        return self.path / "submit.sbatch"

    @property
    def end_file(self) -> Path:
        """How the attempt ended; absent while it runs and if its supervisor was killed."""
        return self.path / "end.json"

    def create(self) -> None:
        """Create the folders of a new attempt.

        Raises FileExistsError when another command has already created it, OSError when it cannot be written.
        """
        ensure_folder(self.run.attempts_dir, 0o700)
        self.path.mkdir(mode=0o700)
        try:
            for folder in (self.logs_dir, self.errors_dir):
                folder.mkdir(mode=0o700)
            self.make_latest()
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)  # a partial folder would count as an attempt
            raise

    def make_latest(self) -> None:
        """Point the symlink ``attempts/latest`` to this attempt."""
        latest = self.run.attempts_dir / "latest"
        staged = self.run.attempts_dir / f".latest-{self.number:03d}"
        staged.unlink(missing_ok=True)  # of a command that was killed before the next lines
        staged.symlink_to(self.path.name)
        staged.replace(latest)
