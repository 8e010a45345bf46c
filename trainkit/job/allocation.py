"""Defines the interface of an allocation, on which a run's attempts execute.

An allocation is this machine, or the hosts of a Slurm job. An allocation claims attempts, starts their
processes and lists the ways to restart the run. If the run continues in another allocation, the current
allocation is released. An `AttemptWatch` starts and monitors the processes of one attempt. The supervisor
uses the same interface for local and Slurm allocations.
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
"""Seconds that an attempt's folder must be missing before it is considered deleted; longer than a filesystem
remount takes."""
SIGNAL_RECORD_S = 2.0
"""Seconds to wait for the first agent to record a stop signal that Slurm has sent."""


def refused(attempt: AttemptDir, entry: AttemptRecord | None) -> Decision | None:
    """Return the decision to end the run if its folder differs from what was submitted, else None.

    If the decision is to end the run, only the attempt's end record is written to the run folder. `entry` is
    the attempt's entry in job.json, or None if job.json has no such entry.
    """
    try:
        read_submitted(attempt)
        # job.json determines which copy of the code runs, so check who can change it.
        open_trusted(attempt.run.job_file).close()
        read_submitted(attempt.run)
    except UsageError as error:
        log_line(error.render())
        decision = Decision("failed", error.message, EXIT_NO_RESTART)
        if entry is not None and not attempt.end_file.exists():
            with contextlib.suppress(OSError):  # writing fails if the folder belongs to another user
                write_end(attempt, entry, NOT_RUN, decision)
        return decision
    except (OSError, ValueError) as error:
        # The attempt will report the same error, together with a hint.
        log_line(f"{attempt.path} cannot be compared with what was submitted: {error}")
    return None


class Allocation:
    """The machine, or the hosts of a job, on which a supervisor runs attempts of a run.

    Methods whose return type includes `Decision` return a Decision if no further attempt should run. The
    default implementations are for a single machine. SlurmAllocation overrides these methods.
    """

    lock_timeout_s: ClassVar[float]
    """Seconds to wait for a lock of the run. A previous supervisor may hold the lock until it has exited."""

    def __init__(self, run: RunDir) -> None:
        self.run = run

    def begin(self) -> None:
        """Prepare the allocation; called before the first attempt is claimed."""

    def end(self) -> None:
        """Clean up the allocation; called last, before the supervisor exits."""

    def claim(self) -> AttemptDir | Decision:
        """Claim the first attempt to run; return a decision if there is no attempt to run."""
        raise NotImplementedError

    def claim_next(self, attempt: Attempt) -> Attempt | Decision:
        """Create the next attempt in this allocation; return a decision if the run must not restart."""
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
        """Add a restarted attempt to job.json and return its job id. The caller must hold the run's lock."""
        raise NotImplementedError

    def close_dead_attempts(self, attempt: Attempt) -> Decision | None:
        """Write end records for earlier attempts whose host died.

        Returns the decision to end `attempt` if the failures of the earlier attempts rule out a restart, else
        None.
        """
        return None

    def wait_for_turn(self, attempt: Attempt) -> Decision | None:
        """Wait for the run's turn in this machine's queue; return a decision if the run is stopped meanwhile.

        An attempt that restarts a run does not wait in the queue.
        """
        return None

    def fitted(self, attempt: Attempt) -> LaunchPlan:
        """Adapt the attempt's plan to the available nodes, store it in the attempt, and return it."""
        return attempt.plan

    @property
    def job_hosts(self) -> Hosts:
        """The hosts of the job."""
        return Hosts()

    def place(self, plan: LaunchPlan) -> dict[str, object]:
        """Return the resources that Slurm assigned to this job, such as the partition, for the event log."""
        return {}

    def watch(self, attempt: Attempt) -> AttemptWatch:
        """Return the `AttemptWatch` that starts and polls the processes of an attempt."""
        raise NotImplementedError

    def outcome(self, attempt: Attempt) -> Outcome:
        """Return the outcome of an attempt whose processes have all exited.

        The outcome takes into account the state of the job and its hosts in Slurm.
        """
        observed, cause = attempt.observed, None
        if observed.stop_signal == RESTART_SIGNAL:
            cause = "asked" if observed.planned_stop is None else observed.planned_stop.cause
        return outcome_of(attempt.folder, attempt.plan, observed, cause=cause)

    def record_suspect(self, attempt: Attempt, failure: RankFailure | None) -> bool:
        """Record a failure's suspect host; return whether the run must continue without that host."""
        return False

    def restart_options(self, attempt: Attempt) -> RestartOptions:
        """Return the currently available ways to restart the run, based on the last read of job.json."""
        return RestartOptions(restart=True)

    def after_notice(self, attempt: Attempt, received: signal.Signals) -> Decision:
        """Return the decision for a stop signal that arrived during the delay before a restart."""
        return Decision("stopped", CANCELLED_AGAIN, EXIT_STOPPED)

    def after_lock(self, attempt: Attempt, locked: RunLocked) -> Decision:
        """Return the decision for an attempt that could not acquire a lock of the run in time."""
        return Decision("failed", f"{locked.message}, perhaps another supervisor of the run", EXIT_FAILED)

    def leave_unclaimed(self, locked: RunLocked) -> Decision:
        """Return the decision to exit without having claimed an attempt.

        Nothing is written to the run folder, because another process holds the lock.
        """
        if locked.stopped:
            return Decision("stopped", locked.message, EXIT_STOPPED)
        return Decision("failed", locked.message, EXIT_FAILED)

    def release(self, attempt: Attempt, decision: Decision) -> Decision:
        """Requeue, resubmit or end the job according to `decision`.

        Returns `decision`, or another decision if `decision` could not be carried out.
        """
        return decision

    def cancel_pending(self, job: JobRecord) -> None:
        """Cancel pending jobs of a run that has ended. `job` is the content of the run's job.json."""


class AttemptWatch(ProcessGroup):
    """The processes of one attempt, from their start until their exits are recorded in `observed`."""

    poll_interval_s = 1.0

    def __init__(self, live: Attempt) -> None:
        super().__init__()
        self.live = live
        self.attempt, self.plan, self.observed = live.folder, live.plan, live.observed
        self.superseded_by: AttemptRecord | None = None
        """The job.json entry of a newer attempt that has taken over the run; if set, this attempt saves and
        exits."""
        self._hangs = HangWatch(live.folder)
        self._missing_since_s: float | None = None
        self.capabilities: AttemptCapabilities | None = None

    def poll(self) -> None:
        """Stop the attempt if its folder was moved or deleted, or if its ranks hang."""
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
        """Return whether the run folder has been moved since the last call; if so, switch to its new path."""
        is_moved = self.attempt.run.follow()
        if is_moved:
            self.observed.moved_to = str(self.attempt.run.path)
            log_line(f"attempt {self.attempt.number}: the run folder was moved to {self.observed.moved_to}")
        return is_moved

    def end_all(self) -> None:
        """Kill all processes of the attempt immediately."""
        raise NotImplementedError

    def stop_ranks(self, as_if: str = signal.SIGTERM.name) -> None:
        """Make the ranks save and exit as if they had received the signal `as_if`.

        The default, SIGTERM, stops the run; SIGUSR2 restarts the run.
        """
        raise NotImplementedError

    def leave(self, planned_stop: PlannedStop) -> None:
        """Make the ranks save and exit before a restart; do nothing if they are already stopping."""
        if self.observed.stop_signal is None and self.running:
            log_line(f"attempt {self.attempt.number}: {planned_stop.why}")
            try:
                self.stop_ranks(RESTART_SIGNAL)
            finally:
                self.observed.planned_stop = planned_stop

    def collect(self) -> None:
        """Read into `observed` the records that the attempt's processes left in the run folder.

        Raises OSError; the caller may then call `collect` again.
        """

    def kill_after_grace(self) -> None:
        """Kill the remaining processes after the grace time, slightly after agents kill their workers."""
        self.kill_within(self.plan.grace_s + 2 * KILL_MARGIN_S)

    def _poll_processes(self) -> None:
        """Poll the attempt's processes; called by `poll` unless the attempt's folder was deleted."""

    def _requested_signal(self) -> str | None:
        """Return the stop signal for a user's request in job.json, or None if there is no request."""
        entry = self.live.entry
        if entry.is_cancelled:
            return None if entry.cancelled_now else signal.SIGTERM.name
        return RESTART_SIGNAL if entry.requeue_requested_at is not None else None

    def _is_deleted(self) -> bool:
        """Return whether the attempt's folder was replaced or has been missing for `DELETED_AFTER_S` seconds.

        Raises OSError.
        """
        if self.attempt.run.was_replaced:
            return True
        if self.attempt.path.is_dir():
            self._missing_since_s = None
            return False
        self._missing_since_s = self._missing_since_s or time.monotonic()
        return time.monotonic() >= self._missing_since_s + DELETED_AFTER_S
