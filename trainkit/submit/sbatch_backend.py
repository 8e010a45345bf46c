"""Submits the job of a run, and the follow-up jobs that may continue it, with sbatch."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trainkit.errors import TrainkitError
from trainkit.plan.slurm_request import SlurmRequest
from trainkit.run.record import copy_submitit_files, set_follow_ups, submission_token, submitit_file
from trainkit.run.rundir import AttemptDir
from trainkit.slurm.client import SlurmUnreachable
from trainkit.slurm.control import cancel
from trainkit.slurm.submit import find_by_token, query_start, submit_script


def submit_file(script: Path, token: str, cwd: Path, extra_argv: Sequence[str] = ()) -> str:
    """Submit a script once and return its job id; prints to stderr while Slurm does not answer."""
    return submit_script(
        script, token=token, environ=os.environ, cwd=cwd, extra_argv=extra_argv, notify=_print
    )


@contextmanager
def removed_unless_submitted(folder: Path, token: str) -> Iterator[None]:
    """Remove a folder when the job submitted within the block certainly does not exist."""
    began = time.time()
    try:
        yield
    except BaseException as error:
        may_exist = isinstance(error, SlurmUnreachable) and error.may_have_arrived
        if isinstance(error, KeyboardInterrupt):
            may_exist = not _cancel_interrupted(token, began)
        if not may_exist:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _cancel_interrupted(token: str, since: float) -> bool:
    """Cancel the job with this token after Ctrl-C; False when Slurm does not say whether there is one."""
    try:
        found = find_by_token(token, since=since)
        if found is not None:
            cancel([found])
            _print(f"{found} had already been submitted and was cancelled")
    except TrainkitError as error:
        _print(f"cannot tell whether the job was submitted: {error.message}")
        return False
    return True


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def submit_follow_ups(
    attempt: AttemptDir, job_id: str, request: SlurmRequest, count: int, notify: Callable[[str], None]
) -> list[str]:
    """Submit the script of an attempt `count` more times, as jobs that continue it; returns their ids.

    Call with the run's lock held. A rejected submission is only reported to `notify`: the run itself has
    started.
    """
    run = attempt.run
    submitit_script = submitit_file(run, job_id, "submission.sh")
    script = submitit_script if submitit_script.exists() else attempt.script_file
    ids: list[str] = []
    for number in range(1, count + 1):
        token = submission_token(run, attempt.number, number)
        comment = " ".join(filter(None, (token, str(request.sbatch.get("comment") or ""))))
        # A job removed from the queue counts as failed in Slurm, so each depends on all before it.
        dependency = ",".join(f"afternotok:{before}" for before in (job_id, *ids))
        options = (f"--comment={comment}", f"--dependency={dependency}", "--kill-on-invalid-dep=yes")
        try:
            new_id = submit_script(
                script,
                token=token,
                environ=os.environ,
                cwd=run.path,
                extra_argv=options,
                is_only_job=False,
                notify=notify,
            )
        except TrainkitError as error:
            notify(f"only {len(ids)} of {count} follow-up jobs are in the queue: {error.message}")
            break
        copy_submitit_files(run, job_id, new_id)
        ids.append(new_id)
        set_follow_ups(run, ids)
    if ids:
        notify(f"{', '.join(ids)} {'waits' if len(ids) == 1 else 'wait'} in the queue to continue {job_id}")
    return ids


def estimate_start(script: str) -> str:
    """Slurm's estimate for a script that is not submitted, in one sentence.

    Raises SlurmRefused when Slurm would reject it.
    """
    with tempfile.TemporaryDirectory(prefix="trainkit-") as folder:
        path = Path(folder) / "submit.sbatch"
        path.write_text(script, encoding="utf-8", errors="surrogateescape")
        return query_start(path, environ=os.environ, cwd=Path(folder)).message
