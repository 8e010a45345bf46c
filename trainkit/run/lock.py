"""The locks of a run: of the command that changes it, and of its supervisor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainkit.errors import TrainkitError, UsageError
from trainkit.locks import (
    NEEDS_FLOCK,
    LockBusy,
    LockStopped,
    LockUnsupported,
    acquire_lock,
    file_lock,
    is_locked,
)
from trainkit.run.rundir import AttemptDir, RunDir

CLAIM_TIMEOUT_S = 2.0
"""Another host may ask at this moment whether a place is taken."""


class RunLocked(TrainkitError):
    """A lock of a run is still held by another process; with `stopped`, a stop signal ended the wait."""

    def __init__(self, file: Path, busy: LockBusy) -> None:
        hint = f"if the host of that process is down for good, remove {file}"
        super().__init__(str(busy), hint)
        self.stopped = isinstance(busy, LockStopped)


@contextmanager
def run_lock(run: RunDir, timeout_s: float | None = None) -> Iterator[None]:
    """Hold the run's lock, so that only one command at a time changes what the run does next.

    Raises UsageError when the folder cannot be written or locked; RunLocked when another process still has
    the lock after `timeout_s` or a stop signal ends the wait, as `acquire_lock` describes.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(file_lock(run.lock_file, timeout_s))
        except LockBusy as busy:
            raise RunLocked(run.lock_file, busy) from None
        except LockUnsupported as error:
            raise UsageError(
                f"{run.lock_file} cannot be locked: {error.strerror}",
                hint=NEEDS_FLOCK,
            ) from error
        except OSError as error:
            raise UsageError(
                f"{run.path} cannot be changed: {error.strerror}",
                hint="only users with write access to its folder can control a run",
            ) from error
        yield


def become_sole_supervisor(run: RunDir, timeout_s: float) -> None:
    """Lock the run for this supervisor until it exits; raises RunLocked like `run_lock`.

    Two supervisors in one folder would damage the run, and job.json, which can be lost or edited, does not
    prevent that.
    """
    try:
        acquire_lock(run.supervisor_lock_file, timeout_s)  # held until this process exits
    except LockBusy as busy:
        raise RunLocked(run.supervisor_lock_file, busy) from None


def is_supervised(run: RunDir) -> bool:
    """Whether some process holds the lock of `become_sole_supervisor`."""
    return is_locked(run.supervisor_lock_file)


def claim_place(attempt: AttemptDir, node_rank: int) -> None:
    """Lock the place of this host without Slurm until its process exits; raises UsageError if it is taken."""
    try:
        acquire_lock(attempt.host_lock_file(node_rank), CLAIM_TIMEOUT_S)  # held until this process exits
    except LockBusy as busy:
        raise UsageError(
            f"node rank {node_rank} is taken: {busy}",
            hint="give every host its own --node-rank, and every run its own --master-port",
        ) from None


def is_there(attempt: AttemptDir, node_rank: int) -> bool:
    """Whether the host that has claimed a place is still there."""
    return is_locked(attempt.host_lock_file(node_rank))
