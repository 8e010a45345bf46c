"""What a supervisor does when a lock of its run stays held, for example by a host that is down.

A Slurm job starts again later rather than take the lock over: a host that Slurm has lost may only be cut off
from the controller and still write to the run folder. The file server releases the locks of a dead host, most
within two minutes, some only when the host boots again.
"""

from __future__ import annotations

import signal

from trainkit.errors import EXIT_FAILED, EXIT_STOPPED, TrainkitError
from trainkit.job import processes
from trainkit.job.allocation import REQUEUE_PATIENCE_S, Allocation, SlurmAllocation
from trainkit.job.attempt_end import previous_attempts
from trainkit.job.decision import MAX_STARTS, Decision, Outcome
from trainkit.job.failure.termination_cause import query_job, termination_cause
from trainkit.job.processes import log_line
from trainkit.job.requeue import await_eviction
from trainkit.job.signals import signal_exit_code
from trainkit.plan.launch import LaunchPlan
from trainkit.run.end import Action
from trainkit.run.lock import RunLocked
from trainkit.run.rundir import AttemptDir
from trainkit.slurm.control import requeue


def leave_unclaimed(allocation: Allocation, locked: RunLocked) -> int:
    """End a start that could not claim an attempt; a Slurm job is requeued unless a person cancelled it.

    Returns the exit code. Writes nothing to the run folder: another process has its lock.
    """
    log_line(locked.render())
    if not isinstance(allocation, SlurmAllocation):
        return EXIT_STOPPED if locked.stopped else EXIT_FAILED
    try:
        plan = LaunchPlan.read(allocation.run.plan_file)
        allocation.job = query_job(allocation.job_id)
        if locked.stopped and _stop_cause(allocation, plan) not in plan.requeue.on:
            return EXIT_STOPPED
        if allocation.restarts >= plan.requeue.max:
            log_line(f"not requeued: requeue.max is {plan.requeue.max}")
            return EXIT_FAILED
        if not allocation.is_being_requeued:
            log_line(f"requeues job {allocation.job_id}, to try again later")
            requeue(allocation.job_id, patience_s=REQUEUE_PATIENCE_S)
    except (OSError, ValueError, TrainkitError) as error:
        log_line(f"not requeued: {error}")
        return EXIT_FAILED
    if not (allocation.is_completing or allocation.is_being_requeued):
        await_eviction()
    return EXIT_STOPPED


def _stop_cause(allocation: SlurmAllocation, plan: LaunchPlan) -> str | None:
    return termination_cause(
        signal.SIGTERM.name,
        allocation.job,
        plan.grace_s,
        supervisor_was_signalled=True,
        restarts=allocation.restarts,
        lost=False,
    )


def after_stop(allocation: Allocation, attempt: AttemptDir, plan: LaunchPlan) -> tuple[Outcome, Decision]:
    """Decide what follows a stop signal that arrived while the supervisor waited for its lock."""
    received = processes.wait_for_notice(0.0) or signal.SIGTERM
    # No rank has started; as after a signal that ended ranks before they could save.
    outcome = Outcome(exits=[(0, signal_exit_code(received))])
    return outcome, allocation.after_notice(attempt, plan, outcome, received)


def retry_elsewhere(
    allocation: Allocation, attempt: AttemptDir, plan: LaunchPlan, locked: RunLocked
) -> Decision:
    """Decide what follows when a lock was not obtained in time: a Slurm job is started again, a few times."""
    reason = locked.message
    if not isinstance(allocation, SlurmAllocation):
        return Decision("failed", f"{reason}, perhaps another supervisor of the run", EXIT_FAILED)
    allocation.job = query_job(allocation.job_id)
    options = allocation.restart_options(plan)
    candidates: tuple[tuple[Action, bool], ...] = (
        ("requeue", options.requeue),
        ("resubmit", options.resubmit),
        ("follow_up", options.follow_up),
    )
    action = next((action for action, is_possible in candidates if is_possible), None)
    earlier = [previous.cause for _, previous in previous_attempts(attempt)]
    if earlier[1 - MAX_STARTS :].count("not_started") >= MAX_STARTS - 1:
        reason = f"{reason}; not started again: {MAX_STARTS} attempts in a row could not start"
    elif action is None:
        reason = f"{reason}; not started again: {options.unavailable_reason}"
    else:
        return Decision(action, f"{reason}; tries again later", EXIT_STOPPED, "not_started")
    return Decision("failed", f"{reason}; {locked.hint}", EXIT_FAILED, "not_started")
