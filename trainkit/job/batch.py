"""The supervisor of a Slurm job, in its batch shell: starts the step, judges its end, starts it again.

``python -m trainkit.job.batch RUN_DIR --step srun … python -m trainkit.job.node.agent RUN_DIR``

The first attempt was opened when the job was submitted; each restart of the step inside the allocation and
each start of the job by Slurm opens the next. Whatever happens, the exit code says so: 0 finished, 75 saved
and could go on, anything else failed.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Sequence

from trainkit.errors import EXIT_FAILED, EXIT_OK, EXIT_STOPPED, TrainkitError
from trainkit.job import processes
from trainkit.job.allocation import Allocation
from trainkit.job.claim_attempt import cancelled_number, claim_attempt, claim_next_attempt
from trainkit.job.decision import FAILURES, Decision
from trainkit.job.disk_errors import retry_on_disk_error
from trainkit.job.ending import close_dead_attempts, judge, write_end
from trainkit.job.failure.verdict import first_failure
from trainkit.job.node.agent import write_to
from trainkit.job.node.preflight import seen_by_supervisor
from trainkit.job.node.slurm_step import slurm_job_id
from trainkit.job.outcome import Outcome
from trainkit.job.processes import log_line
from trainkit.job.record import become_sole_supervisor, is_cancelled
from trainkit.job.requeue import cancel_pending, release_allocation
from trainkit.job.watch.slurm_attempt import StepWatch
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import AttemptDir, RunDir, log_event, read_json

CANCELLED = "cancelled before the ranks were started"
LOCK_TIMEOUT_S = 600.0
"""A node that died holds its locks on a network filesystem for about 90 s more, on some for much longer."""


def supervise(run: RunDir, step: Sequence[str]) -> int:
    """Carry this start of the job from its attempt to its end; the exit code of the job."""
    processes.block_signals()
    processes.adopt_orphans()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    job_id = slurm_job_id()
    if job_id is None:
        print("error: this is no Slurm job\n\nhint: `trainkit submit` makes one", flush=True)
        return EXIT_FAILED
    try:
        if not run.exists():
            # Only a point of a group can be missing; who makes it needs the config, which takes time to load.
            from trainkit.job.array_tasks import open_point

            open_point(run, job_id)
        attempt = retry_on_disk_error(lambda: claim_attempt(run, job_id), log_line)
    except TrainkitError as error:
        log_line(error.render())
        return error.exit_code
    except OSError as error:
        log_line(
            f"error: {run.path}: {error}\n\nhint: nothing of it is lost: `trainkit resume` starts it again"
        )
        return EXIT_FAILED
    if attempt is None:
        log_line(
            f"there is nothing to do for {job_id}: it was cancelled before it started, or the run has ended"
        )
        if (number := cancelled_number(run, job_id)) is not None:
            with contextlib.suppress(OSError):
                write_end(run.attempt(number), Outcome(), Decision("stopped", CANCELLED, EXIT_STOPPED))
        return EXIT_OK
    write_to(attempt.supervisor_log)
    if not become_sole_supervisor(run, LOCK_TIMEOUT_S):
        reason = (
            "another supervisor carries this run, although job.json does not say so: "
            f"{run.supervisor_lock_file} is locked, perhaps by a host that was lost"
        )
        return _conclude(attempt, Outcome(), Decision("failed", reason, EXIT_FAILED))
    return Supervisor(job_id, step).carry(attempt)


class Supervisor:
    """Carries one start of a job through its attempts."""

    def __init__(self, job_id: str, step: Sequence[str]) -> None:
        self.job_id = job_id
        self.step = step
        self.allocation = Allocation(job_id)

    def carry(self, attempt: AttemptDir) -> int:
        """Run attempts until one is the last of this start; the exit code of the job."""
        with contextlib.suppress(OSError):
            policy = LaunchPlan.from_dict(read_json(attempt.plan_file)).requeue
            refusal = close_dead_attempts(attempt, policy, self.allocation.is_out)
            if refusal is not None:
                _conclude(attempt, *refusal)
                cancel_pending(attempt.run, self.allocation)
                return refusal[1].exit_code
        while True:
            outcome, decision = self._try(attempt)
            _conclude(attempt, outcome, decision)
            if decision.action == "restart":
                following = self._await_next(attempt, outcome, decision)
                if isinstance(following, AttemptDir):
                    attempt = following
                    write_to(attempt.supervisor_log)
                    continue
                decision = following
                _conclude(attempt, outcome, decision)
            if decision.comes_back:
                return self._leave(attempt, outcome, decision)
            cancel_pending(attempt.run, self.allocation)
            return decision.exit_code

    def _leave(self, attempt: AttemptDir, outcome: Outcome, decision: Decision) -> int:
        """Give the allocation back so that the run goes on in another; the exit code of this start."""
        try:
            plan = retry_on_disk_error(lambda: LaunchPlan.from_dict(read_json(attempt.plan_file)), log_line)
            trouble = release_allocation(attempt.run, plan, decision, self.allocation)
        except OSError as error:
            trouble = str(error)
        if trouble is None:
            return decision.exit_code
        how = f"{decision.reason.partition(';')[0]}; not started again: {trouble}"
        if decision.cause not in FAILURES:
            return _conclude(attempt, outcome, Decision("stopped", how, decision.exit_code, decision.cause))
        # 75 would say that it saved.
        code = next((code for code in outcome.exit_codes if code not in (EXIT_OK, EXIT_STOPPED)), EXIT_FAILED)
        return _conclude(attempt, outcome, Decision("failed", how, code, decision.cause))

    def _try(self, attempt: AttemptDir) -> tuple[Outcome, Decision]:
        """One attempt, from the start of the step to the decision what follows."""
        if is_cancelled(attempt):
            return Outcome(), Decision("stopped", CANCELLED, EXIT_STOPPED)
        outcome = Outcome()
        try:
            plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
            seen = retry_on_disk_error(lambda: seen_by_supervisor(attempt), log_line)
            log_event(
                attempt.run, attempt.number, "started", world_size=plan.world_size, nodes=plan.num_nodes
            )
            self.allocation.keep_guard(plan, attempt.guard_log)
            watch = StepWatch(attempt, plan, self.allocation.step_argv(self.step, plan), seen)
            outcome = watch.outcome
            watch.work()
            return outcome, retry_on_disk_error(lambda: self._judge(attempt, plan, watch), log_line)
        except (OSError, ValueError, TrainkitError) as error:
            return outcome, Decision("failed", f"{type(error).__name__}: {error}", EXIT_FAILED)

    def _judge(self, attempt: AttemptDir, plan: LaunchPlan, watch: StepWatch) -> Decision:
        """What follows from how a step has ended; can be asked again when the run folder was away."""
        watch.settle()
        outcome = watch.outcome
        self.allocation.look(attempt, plan, outcome)
        outcome.verdict = first_failure(attempt, plan, outcome)
        self.allocation.blame(attempt, outcome.verdict)
        return judge(attempt, outcome, self.allocation.means(plan, attempt.run))

    def _await_next(self, attempt: AttemptDir, outcome: Outcome, decision: Decision) -> AttemptDir | Decision:
        """The attempt in which the step is started again, or what else follows from a notice meanwhile."""
        received = processes.wait_unless_told(decision.delay_s)
        try:
            plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
            if received is not None:
                # The allocation is being taken away, or a person wants the job to end: Slurm knows which.
                outcome.request, outcome.shell_was_told = received.name, True
                self.allocation.look(attempt, plan, outcome)
            if received is not None or not self.allocation.has_time(plan):
                return judge(attempt, outcome, self.allocation.means(plan, attempt.run))
            following = retry_on_disk_error(lambda: claim_next_attempt(attempt, self.job_id), log_line)
        except (OSError, ValueError, TrainkitError) as error:
            return Decision("failed", f"could not be started again: {error}", EXIT_FAILED, decision.cause)
        return following or Decision("stopped", "cancelled before it was started again", EXIT_STOPPED)


def _conclude(attempt: AttemptDir, outcome: Outcome, decision: Decision) -> int:
    """Say and write down how an attempt ended; its exit code."""
    log_line(f"attempt {attempt.number}: {decision.action}: {decision.reason}")
    try:
        write_end(attempt, outcome, decision)
    except OSError as error:
        log_line(f"attempt {attempt.number}: its end could not be written ({error})")
    return decision.exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line and supervise this start of the job; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) < 3 or arguments[1] != "--step":
        print("usage: python -m trainkit.job.batch RUN_DIR --step ARGV…", file=sys.stderr)
        return 2
    # What follows --step is the step's own business, options and all.
    return supervise(RunDir(arguments[0]), arguments[2:])


if __name__ == "__main__":
    sys.exit(main())
