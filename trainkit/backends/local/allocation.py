"""This machine as the place where a run's attempts execute."""

from __future__ import annotations

import contextlib
import errno
import os
import signal

from trainkit.backends.local.attempt_watch import LocalAttemptWatch
from trainkit.backends.local.queue import QueuePlace
from trainkit.errors import EXIT_FAILED, EXIT_STOPPED
from trainkit.job import processes
from trainkit.job.allocation import CANCELLED, Allocation, refused
from trainkit.job.attempt import Attempt
from trainkit.job.attempt_watch import AttemptWatch
from trainkit.job.decision import (
    Decision,
)
from trainkit.job.processes import log_line
from trainkit.locks import LockBusy
from trainkit.run.events import log_event
from trainkit.run.record import (
    AUTO_RESTART,
    add_attempt,
    read_job,
)
from trainkit.run.rundir import AttemptDir, RunDir, refuse_missing, run_lock

QUEUE_POLL_S = 1.0
QUEUE_PATIENCE = 60
"""Errors of the queue after which a run starts without it."""
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
"""Errors of a folder that no waiting helps against."""


class LocalAllocation(Allocation):
    """This machine, on which all nodes of the plan run."""

    lock_timeout_s = 10.0

    def __init__(self, run: RunDir, number: int, *, now: bool = False) -> None:
        """`number` is the first attempt, which the command that started this process has recorded."""
        super().__init__(run)
        self._number, self._now, self._queue_errors = number, now, 0
        self._place: QueuePlace | None = None
        """The GPUs and cores that the run holds until this process exits."""

    def claim(self) -> AttemptDir | Decision:
        refuse_missing(self.run)
        # The command that started this process holds the lock until it has recorded the attempt.
        with run_lock(self.run):
            entry = read_job(self.run).of_attempt(self._number)
        if (entry.pid, entry.host) != (os.getpid(), os.uname().nodename):
            reason = (
                f"attempt {self._number} is not in {self.run.job_file}: the command that started it was"
                " interrupted"
            )
            log_line(reason)
            return Decision("failed", reason, EXIT_FAILED)
        if (refusal := refused(self.run.attempt(self._number), entry)) is not None:
            return refusal
        if entry.in_foreground:
            processes.fail_on_disk_error()
        return self.run.attempt(self._number)

    def register(self, attempt: AttemptDir) -> str:
        # `trainkit requeue` signals with the lock held: what is pending was for the attempt before.
        if signal.SIGUSR2 in signal.sigpending():
            signal.sigwait({signal.SIGUSR2})
        return add_attempt(self.run, attempt.number, os.getpid(), AUTO_RESTART).job_id

    def wait_for_turn(self, attempt: Attempt) -> Decision | None:
        if self._place is not None:
            return None
        self._place, said = QueuePlace(attempt.folder, attempt.plan), ""
        while (reason := self._waits_for(self._place)) is not None:
            if reason != said:
                said = reason
                log_line(f"attempt {attempt.number} {reason}")
                with contextlib.suppress(OSError):  # it is in the log of the supervisor
                    log_event(self.run, attempt.number, "waiting", reason=reason)
            received = processes.wait_for_notice(QUEUE_POLL_S)
            attempt.update()  # a command that was killed may have sent no signal
            if received is not None or attempt.entry.is_cancelled:
                self._place.leave()
                return Decision("stopped", CANCELLED, EXIT_STOPPED)
        return None

    def _waits_for(self, place: QueuePlace) -> str | None:
        try:
            return place.take(now=self._now)
        except LockBusy as busy:
            return f"waits for {busy}"
        except OSError as error:
            self._queue_errors += 1
            may_pass = not self._now and error.errno not in NOT_WRITABLE
            if may_pass and self._queue_errors < QUEUE_PATIENCE:
                return f"waits for the queue of this machine ({error.strerror})"
            log_line(f"starts without waiting for its turn: the queue of this machine has failed ({error})")
            place.leave()
            return None

    def watch(self, attempt: Attempt) -> AttemptWatch:
        return LocalAttemptWatch(attempt)
