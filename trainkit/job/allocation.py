"""The interface of the machine, or of a job's hosts, on which the attempts of a run execute.

An allocation claims attempts, starts their processes and lists the ways to restart the run. When a run
continues in another allocation, this one is released. An `AttemptWatch` follows the processes of one attempt.
The supervisor treats all kinds of allocation alike.
"""

from __future__ import annotations

import contextlib
import signal
import time
from typing import ClassVar

from trainkit.capability import Hosts
from trainkit.errors import EXIT_FAILED, EXIT_NO_RESTART, EXIT_STOPPED, UsageError
from trainkit.job.attempt import Attempt, AttemptCapabilities
from trainkit.job.attempt_end import (
    write_end,
)
from trainkit.job.decision import (
    RESTART_SIGNAL,
    Decision,
    Outcome,
    PlannedStop,
    RestartOptions,
)
from trainkit.job.hangs import HangWatch
from trainkit.job.outcome import NOT_RUN, outcome_of
from trainkit.job.processes import KILL_MARGIN_S, ProcessGroup, log_line
from trainkit.plan.launch import LaunchPlan
from trainkit.run.end import RankFailure
from trainkit.run.events import log_event
from trainkit.run.record import (
    AUTO_RESTART,
    AttemptRecord,
    JobRecord,
    reopen_attempt,
)
from trainkit.run.rundir import AttemptDir, RunDir, RunLocked, run_lock
from trainkit.run.submitted import read_submitted
from trainkit.trust import open_trusted

CANCELLED = "cancelled before the ranks started"
CANCELLED_AGAIN = "cancelled before the restart"
DELETED_AFTER_S = 10.0
"""Seconds that the attempt's folder must be missing to count as deleted; longer than remounting the
filesystem takes."""
SIGNAL_RECORD_S = 2.0
"""Seconds to wait for the first agent to record a signal from Slurm."""


def refused(attempt: AttemptDir, entry: AttemptRecord | None) -> Decision | None:
    """Return the decision that refuses to start if the run folder differs from what was submitted, else None.

    After a refusal, nothing but the end of the attempt is written to the run folder. `entry` is the job.json
    entry of the attempt that would run; None without such an attempt.
    """
    try:
        read_submitted(attempt)
        open_trusted(attempt.run.job_file).close()  # job.json contains the path of the copied code
        read_submitted(attempt.run)
    except UsageError as error:
        log_line(error.render())
        decision = Decision("failed", error.message, EXIT_NO_RESTART)
        if entry is not None and not attempt.end_file.exists():
            with contextlib.suppress(OSError):  # writing fails if the folder belongs to another user
                write_end(attempt, entry, NOT_RUN, decision)
        return decision
    except (OSError, ValueError) as error:
        # Running the attempt will report the same error, with a hint.
        log_line(f"{attempt.path} cannot be compared with what was submitted: {error}")
    return None


class Allocation:
    """The machine or the hosts on which one start of a run executes its attempts.

    The methods return the next attempt or a `Decision`. The defaults are the behaviour on a single machine;
    SlurmAllocation overrides them.
    """

    lock_timeout_s: ClassVar[float]
    """Seconds to wait for a lock of the run; the usual reason to wait is that the previous supervisor is
    exiting."""

    def __init__(self, run: RunDir) -> None:
        self.run = run

    def begin(self) -> None:
        """Prepare the allocation; called first, before an attempt is claimed."""

    def end(self) -> None:
        """Clean up; called last, when this start of the run has ended."""

    def claim(self) -> AttemptDir | Decision:
        """Claim the first attempt to run; return a decision if no attempt can or need be run."""
        raise NotImplementedError

    def claim_next(self, attempt: Attempt) -> Attempt | Decision:
        """Open the next attempt in this allocation; return a decision if the run must not restart."""
        with run_lock(self.run, self.lock_timeout_s):
            attempt.update()
            if (newer := attempt.superseding) is not None:
                return Decision("stopped", newer.takeover, EXIT_STOPPED)
            if attempt.entry.is_cancelled:
                return Decision("stopped", CANCELLED_AGAIN, EXIT_STOPPED)
            following = reopen_attempt(attempt.folder)
            job_id = self.register(following)
        log_event(self.run, following.number, "submitted", job_id=job_id, reason=AUTO_RESTART)
        log_event(self.run, following.number, "restart")
        return Attempt(following)

    def register(self, attempt: AttemptDir) -> str:
        """Add a restarted attempt to job.json and return its job id; called with the run's lock held."""
        raise NotImplementedError

    def close_dead_attempts(self, attempt: Attempt) -> Decision | None:
        """Write the ends of earlier attempts whose host died.

        Returns the decision that ends `attempt` like the last dead attempt if the failures of the dead
        attempts forbid a restart; else None.
        """
        return None

    def wait_for_turn(self, attempt: Attempt) -> Decision | None:
        """Wait for the run's turn in this machine's queue; return a decision if the run ends instead.

        A restart does not wait for its turn again.
        """
        return None

    def fitted(self, attempt: Attempt) -> LaunchPlan:
        """Return the plan that fits the available nodes; it becomes the plan of the attempt."""
        return attempt.plan

    @property
    def job_hosts(self) -> Hosts:
        """The hosts of the job."""
        return Hosts()

    def place(self, plan: LaunchPlan) -> dict[str, object]:
        """Return what Slurm chose for this start, for example the partition, for the event log."""
        return {}

    def watch(self, attempt: Attempt) -> AttemptWatch:
        """Return the watch that starts the processes of an attempt (`AttemptWatch.run`) and polls them."""
        raise NotImplementedError

    def outcome(self, attempt: Attempt) -> Outcome:
        """Return the outcome of an attempt whose processes have ended.

        The state of the job and its hosts in Slurm is taken into account.
        """
        observed, cause = attempt.observed, None
        if observed.stop_signal == RESTART_SIGNAL:
            cause = "asked" if observed.planned_stop is None else observed.planned_stop.cause
        return outcome_of(attempt.folder, attempt.plan, observed, cause=cause)

    def record_suspect(self, attempt: Attempt, failure: RankFailure | None) -> bool:
        """Record the host that a failure implicates; return whether the run must continue without it."""
        return False

    def restart_options(self, attempt: Attempt) -> RestartOptions:
        """Return the ways to restart the run now, based on the last read of job.json."""
        return RestartOptions(restart=True)

    def after_notice(self, attempt: Attempt, received: signal.Signals) -> Decision:
        """Decide what follows a stop signal that arrived during the delay before a restart."""
        return Decision("stopped", CANCELLED_AGAIN, EXIT_STOPPED)

    def after_lock(self, attempt: Attempt, locked: RunLocked) -> Decision:
        """Decide what to do if a lock of the run could not be obtained in time."""
        return Decision("failed", f"{locked.message}, perhaps another supervisor of the run", EXIT_FAILED)

    def leave_unclaimed(self, locked: RunLocked) -> Decision:
        """Return the decision that ends a start which could not claim an attempt.

        Writes nothing to the run folder, because another process holds the lock.
        """
        if locked.stopped:
            return Decision("stopped", locked.message, EXIT_STOPPED)
        return Decision("failed", locked.message, EXIT_FAILED)

    def release(self, attempt: Attempt, decision: Decision) -> Decision:
        """Leave the allocation as `decision` says.

        Returns `decision`, or a different decision if `decision` cannot be carried out.
        """
        return decision

    def cancel_pending(self, job: JobRecord) -> None:
        """Cancel the pending jobs that would continue an ended run; `job` is the run's job.json."""


class AttemptWatch(ProcessGroup):
    """The processes of one attempt, from their start until `observed` contains how they ended."""

    poll_interval_s = 1.0

    def __init__(self, live: Attempt) -> None:
        super().__init__()
        self.live = live
        self.attempt, self.plan, self.observed = live.folder, live.plan, live.observed
        self.superseded_by: AttemptRecord | None = None
        """The job.json entry of a newer attempt that has taken over the run; if it is set, this attempt saves
        and ends."""
        self._hangs = HangWatch(live.folder)
        self._missing_since_s: float | None = None
        self.capabilities: AttemptCapabilities | None = None

    def poll(self) -> None:
        """End the attempt if its folder was moved or deleted, or if its ranks hang."""
        if self._follow() and self.observed.stop_signal is None:
            self.stop_ranks()
        if self._is_deleted():
            self.end_all()
            return
        self._poll_processes()
        if self.capabilities is not None:
            planned_stop = self.capabilities.poll(is_stopping=self.observed.stop_signal is not None)
            if planned_stop is not None:
                self.leave(planned_stop)
        if not self.observed.hangs and (hangs := self._hangs.poll()):
            self.observed.hangs = hangs
            self.end_all()
        if self.capabilities is not None:
            self.capabilities.pass_on_events()

    def _follow(self) -> bool:
        """Return whether the run folder was moved since the last call, and use its new path from now on."""
        is_moved = self.attempt.run.follow()
        if is_moved:
            self.observed.moved_to = str(self.attempt.run.path)
            log_line(f"attempt {self.attempt.number}: the run folder was moved to {self.observed.moved_to}")
        return is_moved

    def end_all(self) -> None:
        """End every process of the attempt immediately."""
        raise NotImplementedError

    def stop_ranks(self, as_if: str = signal.SIGTERM.name) -> None:
        """Have the ranks save and exit as if they had received the signal `as_if`; SIGTERM stops the run."""
        raise NotImplementedError

    def leave(self, planned_stop: PlannedStop) -> None:
        """Have the ranks save and exit for a restart; do nothing if they are already stopping."""
        if self.observed.stop_signal is None and self.running:
            log_line(f"attempt {self.attempt.number}: {planned_stop.why}")
            try:
                self.stop_ranks(RESTART_SIGNAL)
            finally:
                self.observed.planned_stop = planned_stop

    def collect(self) -> None:
        """Read what the attempt left in the run folder into `observed`.

        Raises OSError; can be called again after an error.
        """

    def kill_after_grace(self) -> None:
        """Kill the remaining processes after the grace time; agents kill theirs somewhat earlier."""
        self.kill_within(self.plan.grace_s + 2 * KILL_MARGIN_S)

    def _poll_processes(self) -> None:
        """Poll the processes; called by `poll` unless the attempt was deleted."""

    def _requested_signal(self) -> str | None:
        """Return the stop signal that a request in job.json stands for; None without a request."""
        entry = self.live.entry
        if entry.is_cancelled:
            return None if entry.cancelled_now else signal.SIGTERM.name
        return RESTART_SIGNAL if entry.requeue_requested_at is not None else None

    def _is_deleted(self) -> bool:
        """Return whether the attempt's folder was replaced, or has been missing for DELETED_AFTER_S.

        Raises OSError.
        """
        if self.attempt.run.was_replaced:
            return True
        if self.attempt.path.is_dir():
            self._missing_since_s = None
            return False
        self._missing_since_s = self._missing_since_s or time.monotonic()
        return time.monotonic() >= self._missing_since_s + DELETED_AFTER_S
