"""Leaving an allocation so that the run goes on in another one."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from trainkit.errors import TrainkitError
from trainkit.job import processes
from trainkit.job.allocation import Allocation, follow_ups_of
from trainkit.job.decision import Decision
from trainkit.job.disk_errors import retry_on_disk_error
from trainkit.job.failure.exclude_nodes import excludable
from trainkit.job.processes import log_line
from trainkit.job.record import (
    COMEBACK,
    add_slurm_entry,
    discard_attempt,
    is_cancelled,
    open_attempt,
    run_lock,
)
from trainkit.job.submission_token import submission_token
from trainkit.job.submitit_shell import give_submitit_files, submitit_file
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.slurm_request import with_excluded
from trainkit.rundir import AttemptDir, RunDir, log_event, read_json, write_atomic
from trainkit.rungroup import group_of
from trainkit.slurm.client import SlurmUnreachable
from trainkit.slurm.control import cancel, cancel_waiting, requeue
from trainkit.slurm.submit import submit_script

REQUEUE_PATIENCE_S = 600.0
"""A controller may be away for minutes; what was saved is worth the wait."""
EVICTED_S = 120.0
"""How long Slurm may take to end the shell of a job that it has put back into the queue."""


def release_allocation(
    run: RunDir, plan: LaunchPlan, decision: Decision, allocation: Allocation
) -> str | None:
    """Give the nodes back in the way that was decided; why the run does not come back, None when it does."""
    try:
        if decision.action == "resubmit":
            resubmit(run, allocation.job_id, allocation.hosts_to_avoid())
        elif decision.action == "requeue":
            _requeue(allocation, plan)
    except TrainkitError as error:
        # Forbidden by an administrator, or no controller for minutes: it has saved, and ends here.
        return error.message
    except OSError as error:
        return f"{run.path} cannot be written ({error})"
    return None


def cancel_pending(run: RunDir, allocation: Allocation) -> None:
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
        from trainkit.job.failure.exclude_nodes import exclude_from

        exclude_from(allocation.job_id, allocation.hosts_to_avoid(), plan.slurm)
    if not (allocation.is_being_taken or allocation.is_being_requeued):
        _await_eviction()


def _await_eviction() -> None:
    """Return when Slurm ends this shell to put the job back into the queue.

    At once then: the next start of the job waits for the lock that this process holds.
    """
    give_up_s = time.monotonic() + EVICTED_S
    while (left_s := give_up_s - time.monotonic()) > 0:
        if processes.wait_for_signal(left_s) == signal.SIGTERM:
            return


def resubmit(run: RunDir, job_id: str, exclude: Sequence[str] = ()) -> str:
    """Submit the run's next attempt, with the bytes of its own script; the id of the new job.

    Called in the batch shell of the job that ends, which the new one waits for. Of an array only this task
    starts again. Hosts in `exclude` are left out where Slurm could start the job without them.
    Raises TrainkitError when the run was cancelled or Slurm does not take the job, OSError when the run
    folder cannot be written.
    """
    with run_lock(run):
        newest = run.attempt(run.attempt_numbers()[-1])
        if is_cancelled(newest):
            raise TrainkitError("it was cancelled meanwhile")
        script = script_of_job(run, job_id).read_text(encoding="utf-8")
        texts = [file.read_text(encoding="utf-8") for file in (newest.config_file, newest.plan_file)]
        plan = LaunchPlan.from_dict(read_json(newest.plan_file))
        following = retry_on_disk_error(lambda: open_attempt(run, *texts), log_line)
        try:
            write_atomic(following.script_file, script)
            new_id = _submit(following, job_id, plan, exclude)
        except BaseException as error:
            if not (isinstance(error, SlurmUnreachable) and error.may_have_arrived):
                discard_attempt(following)
            raise
        retry_on_disk_error(
            lambda: add_slurm_entry(run, following.number, new_id, COMEBACK, plan.backend), log_line
        )
    log_event(run, following.number, "submitted", job_id=new_id, reason=COMEBACK)
    return new_id


def script_of_job(run: RunDir, job_id: str) -> Path:
    """The batch script of a job of the run.

    Raises TrainkitError when it is not there.
    """
    point = group_of(run) if "_" in job_id else None
    own = submitit_file(run, job_id, "submission.sh")
    script = point[0].script_file if point is not None else own if own.exists() else run.script_file
    if not script.is_file():
        raise TrainkitError(f"{script}, the script of job {job_id}, is not there")
    return script


def _submit(following: AttemptDir, job_id: str, plan: LaunchPlan, exclude: Sequence[str]) -> str:
    assert plan.slurm is not None
    run, request = following.run, plan.slurm
    mark = submission_token(run, following.number)
    comment = " ".join(filter(None, (mark, str(request.sbatch.get("comment") or ""))))
    options = [f"--comment={comment}", f"--dependency=afterany:{job_id}"]
    try:
        bad = excludable(exclude, request)
    except TrainkitError as error:
        print(f"{', '.join(exclude)} cannot be left out: {error.message}", flush=True)
        bad = []
    if bad:
        options.append(f"--exclude={with_excluded(request, bad).sbatch['exclude']}")
    task = job_id.partition("_")[2]
    if task:
        options.append(f"--array={task}")
    new_id = submit_script(
        following.script_file,
        mark=mark,
        environ=os.environ,
        cwd=run.path,
        extra_argv=options,
        notify=lambda text: print(text, flush=True),
    )
    give_submitit_files(run, job_id, new_id)
    return f"{new_id}_{task}" if task else new_id
