"""The supervisor of a run: claims an attempt, runs it, judges its end, then restarts, requeues or exits.

``python -m trainkit.job.supervisor RUN_DIR --attempt N [--now]`` on one machine, in the shell of a Slurm job
``python -m trainkit.job.supervisor RUN_DIR --step srun … python -m trainkit.job.node.agent RUN_DIR``

On one machine SIGTERM and SIGINT mean save and exit, SIGUSR2 save and restart; in a Slurm job the cause of
the signal decides (`decision.termination_cause`). Even when the run folder or its disk fails, the exit code
tells how the run ended: 0 finished, 75 saved and resumable, else failed.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace

from trainkit.backend import backend_named
from trainkit.errors import (
    EXIT_FAILED,
    EXIT_NO_RESTART,
    EXIT_OK,
    EXIT_STOPPED,
    TrainkitError,
    replace_unencodable,
)
from trainkit.folders import whole_paths
from trainkit.job import processes
from trainkit.job.allocation import CANCELLED, Allocation
from trainkit.job.attempt_capabilities import AttemptCapabilities
from trainkit.job.attempt_end import (
    is_requeue_requested,
    judge,
    previous_ends,
    state_after,
    write_end,
)
from trainkit.job.attempt_watch import AttemptWatch
from trainkit.job.decision import FAILURES, Decision, Outcome, decide_requested, not_again
from trainkit.job.processes import log_line, redirect_output, retry_on_disk_error
from trainkit.job.signals import signal_exit_code
from trainkit.job.work_folder import enter_work_folder
from trainkit.plan.launch import LaunchPlan, damaged_plan
from trainkit.run.end import AttemptEnd, end_line, read_end
from trainkit.run.events import log_event
from trainkit.run.record import record_of, superseded_by
from trainkit.run.rundir import AttemptDir, RunDir, RunLocked, become_sole_supervisor, run_lock
from trainkit.run.submitted import NotSubmitted, read_submitted


def supervise_job(run: RunDir, words: Sequence[str], backend: str = "sbatch") -> int:
    """Supervise this start of a job or process of a backend, started with `words`; returns its exit code."""
    _prepare_process()
    try:
        allocation = backend_named(backend).allocation(run, words)
    except TrainkitError as error:
        log_line(error.render())
        return EXIT_FAILED
    allocation.begin()
    code = supervise(allocation)
    allocation.end()
    return code


def _prepare_process() -> None:
    processes.block_signals()
    processes.adopt_orphans()
    # The submitting terminal may close; workers inherit this disposition.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def supervise(allocation: Allocation) -> int:
    """Run attempts until the run ends or leaves the allocation; returns the exit code."""
    run = allocation.run
    try:
        attempt = allocation.claim()
    except RunLocked as locked:
        log_line(locked.render())
        return allocation.leave_unclaimed(locked)
    except TrainkitError as error:
        log_line(error.render())
        return error.exit_code
    except OSError as error:
        log_line(
            f"error: {run.path}: {error}\n\nhint: nothing is lost: `trainkit resume` starts the run again"
        )
        return EXIT_FAILED
    if isinstance(attempt, int):
        return attempt
    redirect_output(attempt.supervisor_log)
    supervisor = Supervisor(allocation)
    run.hold()
    try:
        become_sole_supervisor(run, allocation.lock_timeout_s)
    except RunLocked as locked:
        code = supervisor.leave_locked(attempt, locked)
    else:
        # The record may have changed during the wait for the lock.
        newer = superseded_by(attempt)
        if newer is None:
            code = supervisor.run(attempt)
        else:
            code = supervisor.conclude(attempt, Outcome(), Decision("stopped", newer.takeover, EXIT_STOPPED))
    supervisor.close()
    return code


class Supervisor:
    """The state machine of one start: run an attempt, judge and record it, then restart, leave or end."""

    def __init__(self, allocation: Allocation) -> None:
        self.allocation = allocation
        self._plans: dict[int, LaunchPlan] = {}
        self._capabilities: dict[int, AttemptCapabilities] = {}

    def plan(self, attempt: AttemptDir) -> LaunchPlan:
        """The plan of an attempt as submitted, read once. Raises OSError and UsageError."""
        if attempt.number not in self._plans:
            try:
                self._plans[attempt.number] = LaunchPlan.from_dict(read_submitted(attempt))
            except ValueError as error:
                raise damaged_plan(attempt.plan_file, error) from error
        return self._plans[attempt.number]

    def run(self, attempt: AttemptDir) -> int:
        """Run attempts until the run ends or leaves the allocation; returns the exit code of this start."""
        earlier = map(attempt.run.attempt, attempt.run.attempt_numbers())
        unended = [one for one in earlier if one.number < attempt.number and not one.end_file.exists()]
        refusal = self.allocation.close_dead_attempts(attempt)
        if refusal is not None:
            return self._end(attempt, *refusal)
        for dead in unended:
            self._report_end(dead, read_end(dead) or AttemptEnd())  # its supervisor could not
        while True:
            outcome, decision = self._run_attempt(attempt)
            if not decision.resumes:
                decision = self._conclude_last(attempt, outcome, decision)
                if not decision.resumes:
                    self._cancel_pending(attempt)
                    return decision.exit_code
            if decision.action == "restart":
                self.conclude(attempt, outcome, decision)
                following = self._restart(attempt, outcome, decision)
                if isinstance(following, AttemptDir):
                    attempt = following
                    redirect_output(attempt.supervisor_log)
                    continue
                decision = following
            if decision.resumes:
                return self._leave(attempt, outcome, decision)
            return self._end(attempt, outcome, decision)

    def leave_locked(self, attempt: AttemptDir, locked: RunLocked) -> int:
        """Leave without running an attempt, because the supervisor's lock could not be obtained."""
        log_line(locked.render())
        outcome = Outcome()
        try:
            decision = self._after_lock(attempt, self.plan(attempt), outcome, locked)
        except (OSError, ValueError, TrainkitError) as error:
            decision = Decision("failed", locked.message, EXIT_FAILED, details=str(error))
        if decision.resumes:
            return self._leave(attempt, outcome, decision)
        if locked.stopped:
            return self._end(attempt, outcome, decision)
        return self.conclude(attempt, outcome, decision)

    def _after_lock(
        self, attempt: AttemptDir, plan: LaunchPlan, outcome: Outcome, locked: RunLocked
    ) -> Decision:
        if not locked.stopped:
            return self.allocation.after_lock(attempt, plan, locked)
        received = processes.wait_for_notice(0.0) or signal.SIGTERM
        # Where no rank has started, as after a signal that ended ranks before they could save.
        outcome.exits = outcome.exits or [(0, signal_exit_code(received))]
        return self.allocation.after_notice(attempt, plan, outcome, received)

    def _run_attempt(self, attempt: AttemptDir) -> tuple[Outcome, Decision]:
        """Run one attempt, from the start of its processes to the decision on what follows."""
        if record_of(attempt).is_cancelled:
            return Outcome(), Decision("stopped", CANCELLED, EXIT_STOPPED)
        outcome = Outcome()
        try:
            plan = self._plans[attempt.number] = self.allocation.fitted(attempt, self.plan(attempt))
            if (ended := self.allocation.wait_for_turn(attempt, plan)) is not None:
                return outcome, ended
            read_submitted(attempt)  # it may have waited for hours
            enter_work_folder(attempt.run, plan)
            watch = self.allocation.watch(attempt, plan)
            watch.capabilities = self._capabilities_of(attempt)
            watch.capabilities.begin()
            outcome = watch.outcome
            size = {"world_size": plan.world_size, "nodes": plan.num_nodes}
            log_event(attempt.run, attempt.number, "started", **size, **self.allocation.place(plan))
            watch.run()
            if watch.superseded_by is not None:
                with contextlib.suppress(OSError):
                    watch.collect_outcome()
                # A command exits with 0 after a save too, and the newer attempt continues from that.
                is_done = attempt.done_file.exists()
                is_finished = plan.workload.is_finished(was_stopped=True, is_done=is_done)
                if not is_finished or set(outcome.exit_codes) != {EXIT_OK}:
                    reason = watch.superseded_by.takeover
                    return outcome, Decision("stopped", reason, EXIT_STOPPED)
            return outcome, retry_on_disk_error(lambda: self._judge(attempt, plan, watch))
        except NotSubmitted as error:
            return outcome, Decision("failed", error.message, EXIT_NO_RESTART)
        except (OSError, ValueError, TrainkitError) as error:
            return outcome, Decision("failed", f"{type(error).__name__}: {error}", EXIT_FAILED)

    def _judge(self, attempt: AttemptDir, plan: LaunchPlan, watch: AttemptWatch) -> Decision:
        """Decide what follows an ended attempt; can be called again after a disk error."""
        watch.collect_outcome()
        outcome = watch.outcome
        self.allocation.complete_outcome(attempt, plan, outcome)
        decision = judge(attempt, plan, outcome, self.allocation.restart_options(plan))
        failure = outcome.failure if decision.cause in FAILURES else None
        is_killed = record_of(attempt).cancelled_now
        if is_killed or not self.allocation.record_suspect(attempt, plan, failure):
            return decision
        return judge(attempt, plan, outcome, self.allocation.restart_options(plan))

    def _restart(self, attempt: AttemptDir, outcome: Outcome, decision: Decision) -> AttemptDir | Decision:
        """Open the next attempt in this allocation; a Decision if a signal or an error prevents that."""
        received = processes.wait_for_notice(decision.delay_s)
        try:
            plan = self.plan(attempt)
            if received is not None:
                return self.allocation.after_notice(attempt, plan, outcome, received)
            options = self.allocation.restart_options(plan)
            if not options.restart:  # the time is too short by now
                return judge(attempt, plan, outcome, options)
            try:
                following = retry_on_disk_error(lambda: self.allocation.claim_next(attempt))
            except RunLocked as locked:
                log_line(locked.render())
                return self._after_lock(attempt, plan, outcome, locked)
        except (OSError, ValueError, TrainkitError) as error:
            return Decision("failed", f"could not be restarted: {error}", EXIT_FAILED, decision.cause)
        return (
            following if isinstance(following, AttemptDir) else Decision("stopped", following, EXIT_STOPPED)
        )

    def _leave(self, attempt: AttemptDir, outcome: Outcome, decision: Decision) -> int:
        """Leave the allocation, so that the run continues in another; returns the exit code of this start."""
        self.conclude(attempt, outcome, decision)
        try:
            plan = retry_on_disk_error(lambda: self.plan(attempt))
            problem = self.allocation.release(plan, decision)
        except OSError as error:
            problem = str(error)
        if problem is None:
            return decision.exit_code
        ended = replace(decision, action="stopped", details=not_again(problem))
        if decision.cause not in FAILURES:
            return self.conclude(attempt, outcome, ended)
        # 75 would claim that the state was saved.
        code = next((code for code in outcome.exit_codes if code not in (EXIT_OK, EXIT_STOPPED)), EXIT_FAILED)
        return self.conclude(attempt, outcome, replace(ended, action="failed", exit_code=code))

    def _end(self, attempt: AttemptDir, outcome: Outcome, decision: Decision) -> int:
        """End the run; returns the exit code of this start."""
        code = self.conclude(attempt, outcome, decision)
        self._cancel_pending(attempt)
        return code

    def _cancel_pending(self, attempt: AttemptDir) -> None:
        if superseded_by(attempt) is None:
            self.allocation.cancel_pending()

    def _conclude_last(self, attempt: AttemptDir, outcome: Outcome, decision: Decision) -> Decision:
        """Record the end of the run, unless `trainkit requeue` came before that: then what follows instead.

        No command changes the record meanwhile: one that comes later finds a run that has ended.
        """
        with contextlib.ExitStack() as held:
            if not record_of(attempt).is_cancelled:  # else that is final, and may be waiting for this end
                try:
                    held.enter_context(run_lock(attempt.run, self.allocation.lock_timeout_s))
                except (OSError, TrainkitError) as error:
                    log_line(f"attempt {attempt.number} ends without the lock of the run: {error}")
                if decision.action != "finished" and is_requeue_requested(attempt):
                    with contextlib.suppress(OSError, ValueError, TrainkitError):
                        options = self.allocation.restart_options(self.plan(attempt))
                        decision = decide_requested(decision, list(previous_ends(attempt).values()), options)
            if not decision.resumes:
                self.conclude(attempt, outcome, decision)
        return decision

    def conclude(self, attempt: AttemptDir, outcome: Outcome, decision: Decision) -> int:
        """Log, record and report how an attempt ended; returns its exit code."""
        log_line(end_line(attempt.number, decision.action, decision.reason))
        state = state_after(attempt, decision)
        end = AttemptEnd(state, decision.action, decision.cause, decision.exit_code, decision.reason)
        try:
            end = write_end(attempt, outcome, decision)
        except OSError as error:
            log_line(f"attempt {attempt.number}: its end could not be written ({error})")
        self._report_end(attempt, end)
        return decision.exit_code

    def _capabilities_of(self, attempt: AttemptDir) -> AttemptCapabilities:
        """The capabilities of an attempt. Raises OSError and UsageError."""
        if attempt.number not in self._capabilities:
            self._capabilities[attempt.number] = AttemptCapabilities(attempt, self.plan(attempt))
        return self._capabilities[attempt.number]

    def _report_end(self, attempt: AttemptDir, end: AttemptEnd) -> None:
        """Have the capabilities of an attempt react to its end, which is recorded."""
        try:
            self._capabilities_of(attempt).end(end)
        except (OSError, TrainkitError) as error:
            log_line(f"warning: the end of attempt {attempt.number} is reported nowhere: {error}")

    def close(self) -> None:
        """Wait for what capabilities are still sending."""
        for capabilities in self._capabilities.values():
            capabilities.close()


@whole_paths()
def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line and run the supervisor; returns its exit code."""
    replace_unencodable()
    run_dir, kind, *rest = sys.argv[1:] if argv is None else argv
    # The script of a job names the step of the ranks, the command that starts a process the attempt.
    return supervise_job(RunDir(run_dir), rest, "sbatch" if kind == "--step" else "local")


if __name__ == "__main__":
    sys.exit(main())
