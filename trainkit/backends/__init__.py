"""Where runs execute: each backend is a class in a file."""

from __future__ import annotations

from trainkit.backends.base import SUPERVISOR_EXIT_S, Backend, JobScript, JobStatus, NewAttempt
from trainkit.backends.local import HostsBackend, LocalBackend
from trainkit.backends.slurm import SbatchBackend, StepBackend
from trainkit.backends.submitit import SubmititBackend
from trainkit.run.record import AttemptRecord

__all__ = ["BACKENDS", "SUPERVISOR_EXIT_S", "Backend", "JobScript", "JobStatus", "NewAttempt", "backend_of"]

BACKENDS: dict[str, Backend] = {
    "local": LocalBackend(),
    "hosts": HostsBackend(),
    "sbatch": SbatchBackend(),
    "submitit": SubmititBackend(),
    "srun": StepBackend(),
}


def backend_of(entry: AttemptRecord) -> Backend:
    """The backend that runs an attempt; it is not recorded without Slurm."""
    return BACKENDS.get(entry.backend or "local", BACKENDS["local"])
