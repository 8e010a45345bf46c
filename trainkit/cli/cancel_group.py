"""``trainkit cancel GROUP``: end all runs of a group."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from shlex import quote
from typing import TYPE_CHECKING

import click

from trainkit.errors import EXIT_FAILED, EXIT_OK, UsageError

if TYPE_CHECKING:
    from trainkit.rungroup import RunGroup

WAIT_MARGIN_S = 30.0
ASK_EVERY_S = 2.0


def cancel_all(group: RunGroup, now: bool, wait: bool, as_json: bool) -> int:
    """End the runs of a group that have not ended, and say how many there were."""
    from trainkit.observe.group import GroupLook
    from trainkit.plan.dependency import WAITED_FOR
    from trainkit.slurm.jobs import query_jobs
    from trainkit.submit.group import cancel_group, recall_job_id

    array = recall_job_id(group)
    if array is None:
        raise UsageError(
            f"whether {group.path} was submitted is not known: its sweep.json has no job id",
            hint="`squeue --me` lists your jobs",
        )
    look = GroupLook(group)
    jobs = query_jobs(look.open_ids)
    status = look.status(jobs, datetime.now(timezone.utc))
    alive = [point for point in status.points if point.state in WAITED_FOR and point.job_id is not None]
    waiting = [point.index for point in alive if jobs[str(point.job_id)].state.is_waiting]
    running = [point.index for point in alive if point.index not in set(waiting)]
    own_jobs = [str(point.job_id) for point in alive if not str(point.job_id).startswith(f"{array}_")]
    if alive:
        cancel_group(group, running, waiting, own_jobs, now)
    grace_s = float(group.record["plan"]["grace_s"])
    done = "cancelled" if alive else "ended"
    if running and not now:
        ended = wait and _wait_until_gone([str(point.job_id) for point in alive], grace_s + WAIT_MARGIN_S)
        done = "cancelled" if ended else "cancelling"
    click.echo(_in_words(group, len(running), len(waiting), now, done, grace_s), err=True)
    if as_json:
        value = {
            "run_dir": str(group.path),
            "job_id": array,
            "state": done,
            "num_running": len(running),
            "num_waiting": len(waiting),
        }
        click.echo(json.dumps(value, ensure_ascii=False))
    return EXIT_FAILED if wait and done == "cancelling" else EXIT_OK


def _in_words(group: RunGroup, running: int, waiting: int, now: bool, done: str, grace_s: float) -> str:
    if done == "ended":
        return f"all runs of {group.path} have ended already"
    told = {
        "cancelled": "killed" if now else "ended",
        "cancelling": f"told to save and end within {grace_s:g} s",
    }[done]
    parts = [f"{running:,} {_runs(running)} {told}"] if running else []
    parts += [f"{waiting:,} {_runs(waiting)} taken out of the queue"] if waiting else []
    hint = f"; `trainkit status {quote(str(group.path))}` shows them" if done == "cancelling" else ""
    return f"{', '.join(parts)}{hint}"


def _runs(count: int) -> str:
    return "run is" if count == 1 else "runs are"


def _wait_until_gone(job_ids: Sequence[str], timeout_s: float) -> bool:
    """Whether all of these jobs have left Slurm's queue within the time."""
    from trainkit.slurm.jobs import query_jobs
    from trainkit.submit.steer import is_there

    deadline_s = time.monotonic() + timeout_s
    while any(is_there(job) for job in query_jobs(job_ids).values()):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(ASK_EVERY_S)
    return True
