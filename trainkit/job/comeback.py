"""Leaving an allocation so that the run goes on in another one."""

from __future__ import annotations

import shutil
import signal
import time

from trainkit.errors import TrainkitError
from trainkit.job import children
from trainkit.job.allocation import Allocation, follow_ups_of
from trainkit.job.decision import Decision
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import RunDir
from trainkit.slurm.control import cancel, cancel_waiting, requeue

REQUEUE_PATIENCE_S = 600.0
"""A controller may be away for minutes; what was saved is worth the wait."""
EVICTED_S = 120.0
"""How long Slurm may take to end the shell of a job that it has put back into the queue."""


def leave(run: RunDir, plan: LaunchPlan, decision: Decision, allocation: Allocation) -> str | None:
    """Give the nodes back in the way that was decided; why the run does not come back, None when it does."""
    try:
        if decision.action == "resubmit":
            from trainkit.job.resubmit import resubmit

            resubmit(run, allocation.job_id, allocation.hosts_to_avoid())
        elif decision.action == "requeue":
            _requeue(allocation, plan)
    except TrainkitError as error:
        # Forbidden by an administrator, or no controller for minutes: it has saved, and ends here.
        return error.message
    except OSError as error:
        return f"{run.path} cannot be written ({error})"
    return None


def let_go(run: RunDir, allocation: Allocation) -> None:
    """Cancel what would carry on a run that has ended: jobs that wait to, and this one, if Slurm requeues it.

    Slurm does that by itself when a host was lost, whatever then became of the run on it. A start of the job
    that runs elsewhere by now is left alone: it knows better.
    """
    waiting, leaving = follow_ups_of(run, allocation.job_id), []
    if allocation.is_queued_again:
        waiting.append(allocation.job_id)
    elif allocation.is_being_taken and allocation.is_being_requeued:
        # It waits for this shell to end, and is not in the queue until then.
        leaving.append(allocation.job_id)
    if shutil.which("scancel") is None:
        return
    try:
        if waiting:
            cancel_waiting(waiting)
        if leaving:
            cancel(leaving)
    except TrainkitError as error:
        print(f"{', '.join([*waiting, *leaving])} could not be cancelled: {error.message}", flush=True)


def _requeue(allocation: Allocation, plan: LaunchPlan) -> None:
    """Have Slurm put the job back into the queue, where it does not do so by itself already."""
    if not allocation.is_being_requeued:
        if allocation.was_cancelled_meanwhile():
            raise TrainkitError("it was cancelled meanwhile")
        requeue(allocation.job_id, patience_s=REQUEUE_PATIENCE_S)
    if allocation.bad and plan.slurm is not None:
        from trainkit.job.bad_nodes import exclude_from

        exclude_from(allocation.job_id, allocation.hosts_to_avoid(), plan.slurm)
    if not (allocation.is_being_taken or allocation.is_being_requeued):
        _await_eviction()


def _await_eviction() -> None:
    """Return when Slurm ends this shell to put the job back into the queue.

    At once then: the next start of the job waits for the lock that this process holds.
    """
    give_up_s = time.monotonic() + EVICTED_S
    while (left_s := give_up_s - time.monotonic()) > 0:
        if children.wait_for_signal(left_s) == signal.SIGTERM:
            return
