"""Jobs that wait in Slurm's queue to carry a run on, for nodes that cannot bring it back themselves.

Each starts when all before it have ended, none of them well; when one ends well, Slurm takes those that are
left out of the queue.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from trainkit.errors import TrainkitError
from trainkit.job.record import (
    copy_submitit_files,
    set_follow_ups,
    submission_token,
    submitit_file,
    waiting_follow_ups,
)
from trainkit.plan.slurm_request import SlurmRequest
from trainkit.rundir import AttemptDir, RunDir
from trainkit.slurm.control import cancel_waiting
from trainkit.slurm.submit import submit_script


def submit_follow_ups(
    attempt: AttemptDir, job_id: str, request: SlurmRequest, count: int, say: Callable[[str], None]
) -> list[str]:
    """Submit the jobs that go on after the one of an attempt, with its script; their ids.

    Call with the run's lock held. What Slurm does not take is said, and no error: the run has begun.
    """
    run = attempt.run
    own = submitit_file(run, job_id, "submission.sh")
    script = own if own.exists() else attempt.script_file
    ids: list[str] = []
    for number in range(1, count + 1):
        mark = submission_token(run, attempt.number, number)
        comment = " ".join(filter(None, (mark, str(request.sbatch.get("comment") or ""))))
        # To Slurm, a job that was taken out of the queue has failed: all before it have to be named.
        dependency = ",".join(f"afternotok:{before}" for before in (job_id, *ids))
        options = (f"--comment={comment}", f"--dependency={dependency}", "--kill-on-invalid-dep=yes")
        try:
            new_id = submit_script(
                script,
                mark=mark,
                environ=os.environ,
                cwd=run.path,
                extra_argv=options,
                is_only_job=False,
                notify=say,
            )
        except TrainkitError as error:
            say(f"only {len(ids)} of {count} follow-up jobs are in the queue: {error.message}")
            break
        copy_submitit_files(run, job_id, new_id)
        ids.append(new_id)
        set_follow_ups(run, ids)
    if ids:
        say(f"{', '.join(ids)} {'waits' if len(ids) == 1 else 'wait'} in the queue to go on after {job_id}")
    return ids


def cancel_follow_ups(run: RunDir, but: str = "") -> None:
    """Take the follow-up jobs, but for one, out of the queue; call with the run's lock held.

    Raises SlurmUnreachable.
    """
    waiting = [job_id for job_id in waiting_follow_ups(run) if job_id != but]
    if waiting:
        cancel_waiting(waiting)
        set_follow_ups(run, [])
