"""Where runs execute: each backend is a class in a file, which is imported when it is used."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from trainkit.backends.base import SUPERVISOR_EXIT_S, Backend, JobScript, JobStatus, NewAttempt
from trainkit.run.record import AttemptRecord

__all__ = [
    "SUPERVISOR_EXIT_S",
    "Backend",
    "JobScript",
    "JobStatus",
    "NewAttempt",
    "backend_named",
    "backend_of",
]

_CLASSES = {
    "local": "local.LocalBackend",
    "hosts": "local.HostsBackend",
    "sbatch": "slurm.SbatchBackend",
    "submitit": "submitit.SubmititBackend",
    "srun": "slurm.StepBackend",
}


@cache
def backend_named(name: str) -> Backend:
    """The backend of a plan."""
    module, _, kind = _CLASSES[name].partition(".")
    found: Backend = getattr(import_module(f"trainkit.backends.{module}"), kind)()
    return found


def backend_of(entry: AttemptRecord) -> Backend:
    """The backend that runs an attempt; it is not recorded without Slurm."""
    return backend_named(entry.backend if entry.backend in _CLASSES else "local")
