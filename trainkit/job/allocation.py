"""Where a run's attempts execute: the interface of a machine, or of the hosts that a scheduler gave to a job.

An allocation claims attempts, starts their processes, lists the ways to restart the run, and is released when
the run continues elsewhere. The supervisor treats all kinds alike.
"""

from __future__ import annotations

import contextlib
import signal
from typing import ClassVar

from trainkit.errors import EXIT_FAILED, EXIT_NO_RESTART, EXIT_STOPPED, UsageError
from trainkit.job.attempt_end import (
    write_end,
)
from trainkit.job.attempt_watch import AttemptWatch
from trainkit.job.decision import (
    Decision,
    Outcome,
    RestartOptions,
)
from trainkit.job.processes import log_line
from trainkit.plan.launch import LaunchPlan
from trainkit.run.end import RankFailure
from trainkit.run.events import log_event
from trainkit.run.record import (
    AUTO_RESTART,
    AttemptRecord,
    record_of,
    reopen_attempt,
    superseded_by,
)
from trainkit.run.rundir import AttemptDir, RunDir, RunLocked, run_lock
from trainkit.run.submitted import read_submitted
from trainkit.trust import open_trusted

CANCELLED = "cancelled before the ranks started"


def refused(attempt: AttemptDir, entry: AttemptRecord | None) -> int | None:
    """The exit code of a start of which nothing may run: the run is not as it was submitted; else None.

    Nothing else that the run folder says is acted upon then. `entry` is the record of the attempt that the
    start would run, whose end is written; None if it has none.
    """
    try:
        read_submitted(attempt)
        open_trusted(attempt.run.job_file).close()  # it says where the code is
        read_submitted(attempt.run)
    except UsageError as error:
        log_line(error.render())
        if entry is not None and not attempt.end_file.exists():
            decision = Decision("failed", error.message, EXIT_NO_RESTART)
            with contextlib.suppress(OSError):  # it may be a folder of somebody else
                write_end(attempt, Outcome(), decision)
        return EXIT_NO_RESTART
    except (OSError, ValueError) as error:
        # Running the attempt reports it with its hint.
        log_line(f"{attempt.path} cannot be compared with what was submitted: {error}")
    return None


class Allocation:
    """The machine or the hosts in which one start of a run executes its attempts.

    What a class does not say otherwise is as on this machine.
    """

    lock_timeout_s: ClassVar[float]
    """How long to wait for a lock of the run, above all for its previous supervisor to exit."""

    def __init__(self, run: RunDir) -> None:
        self.run = run

    def begin(self) -> None:
        """Called first, before an attempt is claimed."""

    def end(self) -> None:
        """Called last, when this start of the run has ended."""

    def claim(self) -> AttemptDir | int:
        """Claim the first attempt to run; returns the exit code instead when there is nothing to do."""
        raise NotImplementedError

    def claim_next(self, attempt: AttemptDir) -> AttemptDir | str:
        """Open the next attempt, which restarts the run in this allocation; the reason when it must not."""
        with run_lock(self.run, self.lock_timeout_s):
            if (newer := superseded_by(attempt)) is not None:
                return newer.takeover
            if record_of(attempt).is_cancelled:
                return "cancelled before the restart"
            following = reopen_attempt(attempt)
            job_id = self.register(following)
        log_event(self.run, following.number, "submitted", job_id=job_id, reason=AUTO_RESTART)
        log_event(self.run, following.number, "restart")
        return following

    def register(self, attempt: AttemptDir) -> str:
        """Record a restarted attempt in job.json; returns its job id. Called with the run's lock held."""
        raise NotImplementedError

    def close_dead_attempts(self, attempt: AttemptDir) -> tuple[Outcome, Decision] | None:
        """Write the end of earlier attempts whose host died.

        Returns the outcome and decision that end `attempt` if those failures forbid a restart, else None.
        """
        return None

    def wait_for_turn(self, attempt: AttemptDir, plan: LaunchPlan) -> Decision | None:
        """Wait until a run may start; returns a decision to end it instead. Restarts need not wait again."""
        return None

    def fitted(self, attempt: AttemptDir, plan: LaunchPlan) -> LaunchPlan:
        """The plan for the nodes that there are, which becomes that of the attempt."""
        return plan

    def place(self, plan: LaunchPlan) -> dict[str, object]:
        """What Slurm chose for this start, for its event."""
        return {}

    def watch(self, attempt: AttemptDir, plan: LaunchPlan) -> AttemptWatch:
        """The watch of an attempt's processes, which `AttemptWatch.run` starts."""
        raise NotImplementedError

    def complete_outcome(self, attempt: AttemptDir, plan: LaunchPlan, outcome: Outcome) -> None:
        """Complete the outcome of an attempt from the state of the job and its hosts."""

    def record_suspect(self, attempt: AttemptDir, plan: LaunchPlan, failure: RankFailure | None) -> bool:
        """Record the host that a failure implicates; returns whether one less can be used."""
        return False

    def restart_options(self, plan: LaunchPlan) -> RestartOptions:
        """How the run can be restarted now."""
        return RestartOptions(restart=True)

    def after_notice(
        self, attempt: AttemptDir, plan: LaunchPlan, outcome: Outcome, received: signal.Signals
    ) -> Decision:
        """Decide what follows a stop signal that arrived while the run waited to restart."""
        return Decision("stopped", "cancelled before the restart", EXIT_STOPPED)

    def after_lock(self, attempt: AttemptDir, plan: LaunchPlan, locked: RunLocked) -> Decision:
        """Decide what follows when a lock of the run was not obtained in time."""
        return Decision("failed", f"{locked.message}, perhaps another supervisor of the run", EXIT_FAILED)

    def leave_unclaimed(self, locked: RunLocked) -> int:
        """End a start that could not claim an attempt; returns its exit code.

        Writes nothing to the run folder: another process has its lock.
        """
        return EXIT_STOPPED if locked.stopped else EXIT_FAILED

    def release(self, plan: LaunchPlan, decision: Decision) -> str | None:
        """Leave the allocation as decided; returns why the run does not resume, None when it does."""
        return None

    def cancel_pending(self) -> None:
        """Cancel the jobs that would continue a run that has ended."""
