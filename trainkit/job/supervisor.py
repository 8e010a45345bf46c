"""The supervisor of a run: claims and runs an attempt, then restarts or requeues the run, or exits.

On a single machine, the supervisor runs as ``python -m trainkit.job.supervisor RUN_DIR --attempt N [--now]``.
A Slurm job script runs ``python -m trainkit.job.supervisor RUN_DIR --step srun … python -m
trainkit.job.node.agent RUN_DIR``.

On a single machine, SIGTERM and SIGINT mean "save and exit", and SIGUSR2 means "save and restart". In a Slurm
job, the meaning of a signal depends on why it was sent (`backends/slurm/attempt_watch.py`). Even if the run
folder or disk fails, the exit code indicates how the run ended: 0 for finished, 75 for saved and resumable,
any other code for failed.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Sequence

from trainkit.backend import STARTED_WITH, backend_named
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
from trainkit.job.allocation import CANCELLED, Allocation, AttemptWatch
from trainkit.job.attempt import Attempt, AttemptCapabilities
from trainkit.job.attempt_end import (
    is_requeue_requested,
    judge,
    previous_ends,
    state_after,
    write_end,
)
from trainkit.job.decision import FAILURES, Decision, decide_requested, decide_stranded
from trainkit.job.outcome import only_observed
from trainkit.job.processes import log_line, redirect_output, retry_on_disk_error
from trainkit.job.signals import signal_exit_code
from trainkit.job.work_folder import enter_work_folder
from trainkit.run.end import AttemptEnd, end_line, read_end
from trainkit.run.events import log_event
from trainkit.run.rundir import RunDir, RunLocked, become_sole_supervisor, run_lock
from trainkit.run.submitted import NotSubmitted, read_submitted


def supervise_job(run: RunDir, arguments: Sequence[str], backend: str = "sbatch") -> int:
    """Supervise this start of a Slurm job or local run; return the supervisor's exit code.

    `arguments` contains the command-line arguments for the backend named `backend`.
    """
    _prepare_process()
    try:
        allocation = backend_named(backend).allocation(run, arguments)
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
    # The terminal used for the submission may close; workers inherit the ignored SIGHUP.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def supervise(allocation: Allocation) -> int:
    """Run attempts until the run ends or leaves the allocation; return the supervisor's exit code."""
    run = allocation.run
    try:
        found = allocation.claim()
    except RunLocked as locked:
        log_line(locked.render())
        return allocation.leave_unclaimed(locked).exit_code
    except TrainkitError as error:
        log_line(error.render())
        return error.exit_code
    except OSError as error:
        log_line(f"error: {run.path}: {error}\n\nhint: nothing is lost: `trainkit resume` resumes the run")
        return EXIT_FAILED
    if isinstance(found, Decision):
        return found.exit_code
    attempt = Attempt(found)
    redirect_output(found.supervisor_log)
    supervisor = Supervisor(allocation)
    run.hold()
    try:
        become_sole_supervisor(run, allocation.lock_timeout_s)
    except RunLocked as locked:
        code = supervisor.leave_locked(attempt, locked)
    else:
        # job.json may have changed while this process was waiting for the lock.
        attempt.update()
        newer = attempt.superseding
        if newer is None:
            code = supervisor.run(attempt)
        else:
            code = supervisor.conclude(attempt, Decision("stopped", newer.takeover, EXIT_STOPPED))
    supervisor.close()
    return code


class Supervisor:
    """Runs attempts and, after each one, restarts the run, leaves the allocation or ends the run."""

    def __init__(self, allocation: Allocation) -> None:
        self.allocation = allocation
        self._capabilities: dict[int, AttemptCapabilities] = {}

    def run(self, attempt: Attempt) -> int:
        """Run attempts until the run ends or leaves the allocation; return the supervisor's exit code."""
        earlier = map(attempt.run.attempt, attempt.run.attempt_numbers())
        unended = [one for one in earlier if one.number < attempt.number and not one.end_file.exists()]
        refusal = self.allocation.close_dead_attempts(attempt)
        if refusal is not None:
            return self._end(attempt, refusal)
        for dead in unended:
            # Report the end here, because the supervisor of the dead attempt could not report it.
            self._report_end(Attempt(dead), read_end(dead) or AttemptEnd())
        while True:
            decision = self._run_attempt(attempt)
            if not decision.resumes:
                decision = self._conclude_last(attempt, decision)
                if not decision.resumes:
                    self._cancel_pending(attempt)
                    return decision.exit_code
            if decision.action == "restart":
                self.conclude(attempt, decision)
                following = self._restart(attempt, decision)
                if isinstance(following, Attempt):
                    attempt = following
                    redirect_output(attempt.folder.supervisor_log)
                    continue
                decision = following
            if decision.resumes:
                return self._leave(attempt, decision)
            return self._end(attempt, decision)

    def leave_locked(self, attempt: Attempt, locked: RunLocked) -> int:
        """Exit without running an attempt, because the run's lock could not be acquired."""
        log_line(locked.render())
        try:
            decision = self._after_lock(attempt, locked)
        except (OSError, ValueError, TrainkitError) as error:
            decision = Decision("failed", locked.message, EXIT_FAILED, details=str(error))
        if decision.resumes:
            return self._leave(attempt, decision)
        if locked.stopped:
            return self._end(attempt, decision)
        return self.conclude(attempt, decision)

    def _after_lock(self, attempt: Attempt, locked: RunLocked) -> Decision:
        if not locked.stopped:
            return self.allocation.after_lock(attempt, locked)
        received = processes.wait_for_notice(0.0) or signal.SIGTERM
        if not attempt.observed.exits:
            # No rank has started; treat the signal as if it had killed the ranks before they could save.
            attempt.observed.exits = [(0, signal_exit_code(received))]
            attempt.outcome = only_observed(attempt.observed)
        return self.allocation.after_notice(attempt, received)

    def _run_attempt(self, attempt: Attempt) -> Decision:
        """Run one attempt and return the decision about the run."""
        folder = attempt.folder
        attempt.update()
        if attempt.entry.is_cancelled:
            return Decision("stopped", CANCELLED, EXIT_STOPPED)
        try:
            plan = attempt.plan = self.allocation.fitted(attempt)
            if (ended := self.allocation.wait_for_turn(attempt)) is not None:
                return ended
            read_submitted(folder)  # the run folder may have changed during the wait, which may take hours
            enter_work_folder(attempt.run, attempt.job, plan)
            watch = self.allocation.watch(attempt)
            watch.capabilities = self._capabilities_of(attempt)
            watch.capabilities.begin(self.allocation.job_hosts)
            size = {"world_size": plan.world_size, "nodes": plan.num_nodes}
            log_event(attempt.run, attempt.number, "started", **size, **self.allocation.place(plan))
            try:
                watch.run()
                if watch.superseded_by is not None:
                    with contextlib.suppress(OSError):
                        watch.collect()
                    # A command also exits with 0 after a save; if the attempt was superseded, the newer
                    # attempt continues from that save.
                    is_done = folder.done_file.exists()
                    is_finished = plan.workload.is_finished(was_stopped=True, is_done=is_done)
                    if not is_finished or set(attempt.observed.exit_codes) != {EXIT_OK}:
                        return Decision("stopped", watch.superseded_by.takeover, EXIT_STOPPED)
            finally:
                # Only the observations are known until `_judge` determines the outcome.
                attempt.outcome = only_observed(attempt.observed)
            return retry_on_disk_error(lambda: self._judge(attempt, watch))
        except NotSubmitted as error:
            return Decision("failed", error.message, EXIT_NO_RESTART)
        except (OSError, ValueError, TrainkitError) as error:
            return Decision("failed", f"{type(error).__name__}: {error}", EXIT_FAILED)

    def _judge(self, attempt: Attempt, watch: AttemptWatch) -> Decision:
        """Decide what to do after an attempt ended; can be called again after a disk error."""
        watch.collect()
        attempt.outcome = self.allocation.outcome(attempt)
        attempt.update()
        decision = judge(attempt, self.allocation.restart_options(attempt))
        failure = attempt.outcome.failure if decision.cause in FAILURES else None
        if attempt.entry.cancelled_now or not self.allocation.record_suspect(attempt, failure):
            return decision
        return judge(attempt, self.allocation.restart_options(attempt))

    def _restart(self, attempt: Attempt, decision: Decision) -> Attempt | Decision:
        """Create the next attempt in this allocation; return a Decision after a signal or an error."""
        received = processes.wait_for_notice(decision.delay_s)
        try:
            if received is not None:
                return self.allocation.after_notice(attempt, received)
            attempt.update()
            options = self.allocation.restart_options(attempt)
            if not options.restart:  # not enough time is left for another attempt
                return judge(attempt, options)
            try:
                return retry_on_disk_error(lambda: self.allocation.claim_next(attempt))
            except RunLocked as locked:
                log_line(locked.render())
                return self._after_lock(attempt, locked)
        except (OSError, ValueError, TrainkitError) as error:
            return Decision("failed", f"the run could not be restarted: {error}", EXIT_FAILED, decision.cause)

    def _leave(self, attempt: Attempt, decision: Decision) -> int:
        """Leave the allocation; the run continues in another allocation.

        Return the supervisor's exit code.
        """
        self.conclude(attempt, decision)
        try:
            retry_on_disk_error(lambda: attempt.plan)
            done = self.allocation.release(attempt, decision)
        except OSError as error:
            done = decide_stranded(decision, attempt.outcome, str(error))
        return decision.exit_code if done is decision else self.conclude(attempt, done)

    def _end(self, attempt: Attempt, decision: Decision) -> int:
        """End the run and return the supervisor's exit code."""
        code = self.conclude(attempt, decision)
        self._cancel_pending(attempt)
        return code

    def _cancel_pending(self, attempt: Attempt) -> None:
        attempt.update()
        if attempt.superseding is None:
            self.allocation.cancel_pending(attempt.job)

    def _conclude_last(self, attempt: Attempt, decision: Decision) -> Decision:
        """Record the end of the run, unless a user requested another attempt; return the decision.

        The run's lock prevents commands from changing job.json in the meantime. Commands that acquire the
        lock afterwards see that the run has ended.
        """
        attempt.update()
        with contextlib.ExitStack() as held:
            # A cancellation cannot be overridden, so no lock is needed; `trainkit cancel` may hold the lock
            # while it waits for the run to end.
            if not attempt.entry.is_cancelled:
                try:
                    held.enter_context(run_lock(attempt.run, self.allocation.lock_timeout_s))
                except (OSError, TrainkitError) as error:
                    log_line(
                        f"attempt {attempt.number}: cannot acquire the run's lock, so its end is recorded "
                        f"without the lock: {error}"
                    )
                attempt.update()
                if decision.action != "finished" and is_requeue_requested(attempt):
                    with contextlib.suppress(OSError, ValueError, TrainkitError):
                        options = self.allocation.restart_options(attempt)
                        previous = list(previous_ends(attempt.folder, attempt.job).values())
                        decision = decide_requested(decision, previous, options)
            if not decision.resumes:
                self.conclude(attempt, decision)
        return decision

    def conclude(self, attempt: Attempt, decision: Decision) -> int:
        """Log, record and report how an attempt ended; return the attempt's exit code."""
        log_line(end_line(attempt.number, decision.action, decision.reason))
        attempt.update()
        state = state_after(attempt.entry, decision)
        end = AttemptEnd(state, decision.action, decision.cause, decision.exit_code, decision.reason)
        try:
            end = write_end(attempt.folder, attempt.entry, attempt.outcome, decision)
        except OSError as error:
            log_line(f"attempt {attempt.number}: the end of the attempt could not be recorded ({error})")
        self._report_end(attempt, end)
        return decision.exit_code

    def _capabilities_of(self, attempt: Attempt) -> AttemptCapabilities:
        """Return the capabilities that take part in an attempt. Raises OSError and UsageError."""
        if attempt.number not in self._capabilities:
            self._capabilities[attempt.number] = AttemptCapabilities(attempt.folder, attempt.plan)
        return self._capabilities[attempt.number]

    def _report_end(self, attempt: Attempt, end: AttemptEnd) -> None:
        """Notify an attempt's capabilities that the end of the attempt was recorded."""
        try:
            self._capabilities_of(attempt).end(end)
        except (OSError, TrainkitError) as error:
            log_line(f"warning: cannot report the end of attempt {attempt.number}: {error}")

    def close(self) -> None:
        """Wait until the capabilities have sent all their data."""
        for capabilities in self._capabilities.values():
            capabilities.close()


@whole_paths()
def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run the supervisor; return the supervisor's exit code."""
    replace_unencodable()
    run_dir, kind, *rest = sys.argv[1:] if argv is None else argv
    return supervise_job(RunDir(run_dir), rest, STARTED_WITH[kind])


if __name__ == "__main__":
    sys.exit(main())
