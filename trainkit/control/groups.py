"""Steers a group of runs as a whole."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from trainkit.control.jobs import step_of, write_cancelled
from trainkit.errors import UsageError
from trainkit.job.record import KILLED, mark_cancelled, newest_entry, run_lock, submission_token
from trainkit.rundir import RunDir, utc_now
from trainkit.rungroup import RunGroup
from trainkit.slurm.control import Receiver, cancel, cancel_waiting, kill_steps, send_signal
from trainkit.slurm.submit import find_marked


def recall_job_id(group: RunGroup) -> str | None:
    """The id of a group's array, looked for where the command that submitted it never learned it."""
    if group.job_id is None:
        written = group.script_file.stat().st_mtime
        found = find_marked(submission_token(RunDir(group.path), 1), since=written)
        if found is not None:
            group.update(job_id=found)
    return group.job_id


def cancel_group(
    group: RunGroup, running: Sequence[int], waiting: Sequence[int], own_jobs: Sequence[str], now: bool
) -> None:
    """End the runs of a group, by two calls of Slurm for all: what waits never starts.

    What runs saves and ends, or with `now` is killed at once. `own_jobs` are jobs of points that were started
    again on their own, besides the array.
    """
    group.update(cancelled_at=utc_now())
    made = [group.run(index) for index in (*running, *waiting) if group.run(index).exists()]
    for run in made:
        with run_lock(run):
            mark_cancelled(run, now=now)
    jobs = [*([] if group.job_id is None else [group.job_id]), *own_jobs]
    if now:
        # Slurm gives the jobs that it cancels SIGTERM first, and then their ranks would begin to save.
        with contextlib.suppress(UsageError):
            kill_steps(_steps([run for run in made if int(run.name) in running]))
        cancel(jobs)
    else:
        cancel_waiting(jobs)
        if running:
            send_signal(jobs, "TERM", Receiver.STEPS)
    # Whoever cannot write the end of its attempt itself.
    for run in made:
        entry = newest_entry(run)
        if entry is not None and (now or int(run.name) in waiting):
            write_cancelled(run, entry, KILLED if now else "cancelled before it started")


def _steps(runs: Sequence[RunDir]) -> list[tuple[str, str]]:
    """Job and step of the ranks of each run that have met."""
    found = []
    for run in runs:
        entry = newest_entry(run)
        step_id = None if entry is None else step_of(run, entry)
        if entry is not None and step_id is not None:
            found.append((str(entry["job_id"]), step_id))
    return found
