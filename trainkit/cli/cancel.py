"""``trainkit cancel``: end a run."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from shlex import quote
from typing import TYPE_CHECKING

import click

from trainkit.cli.help import Command, examples
from trainkit.cli.options import json_option, run_argument
from trainkit.errors import EXIT_FAILED, EXIT_OK, UsageError

if TYPE_CHECKING:
    from trainkit.rungroup import RunGroup


WAIT_MARGIN_S = 30.0


@click.command(
    cls=Command,
    epilog=examples("trainkit cancel last", "trainkit cancel last --wait", "trainkit cancel last --now"),
)
@run_argument
@click.option("--now", is_flag=True, help="Kill at once, without saving.")
@click.option("--wait", is_flag=True, help="Return when the run has ended.")
@json_option
def command(run_name: str, now: bool, wait: bool, as_json: bool) -> int:
    """End RUN: it saves, and what has not ended after the grace time is killed.

    A run that has ended already is left as it is, which is no error. Of a group all runs are ended.
    """
    from trainkit.control.follow_ups import cancel_follow_ups
    from trainkit.control.jobs import kill, live_entry, recall, tell, wait_until_gone
    from trainkit.control.run_registry import find_run_or_group
    from trainkit.job.record import mark_cancelled, run_lock
    from trainkit.plan.launch import LaunchPlan
    from trainkit.rundir import read_json
    from trainkit.rungroup import RunGroup

    run = find_run_or_group(run_name)
    if isinstance(run, RunGroup):
        return cancel_all(run, now, wait, as_json)
    told = ""
    with run_lock(run):
        recall(run)
        entry = live_entry(run, "cancel")
        if entry is not None:
            try:
                mark_cancelled(run, now=now)
            except OSError as error:
                # A full disk must not keep a run alive.
                click.echo(f"the wish to cancel could not be written down ({error})", err=True)
            # First, because what is cancelled has not ended well: they would start.
            cancel_follow_ups(run, but=str(entry["job_id"]))
            if now:
                kill(run, entry)
            else:
                told = tell(run, entry, signal.SIGTERM)
    if entry is None:
        done = "ended"
        message = f"{run.path} has ended already"
    elif now or told == "cancelled":
        done = "cancelled"
        message = f"{entry['job_id']} is killed" if now else f"{entry['job_id']} is taken out of the queue"
    else:
        done = "cancelling"
        grace_s = LaunchPlan.from_dict(read_json(run.plan_file)).grace_s
        message = f"{entry['job_id']} is told to save and end; it has {grace_s:g} s"
        if wait:
            if wait_until_gone(run, entry, grace_s + WAIT_MARGIN_S):
                done, message = "cancelled", f"{entry['job_id']} has ended"
            else:
                message = (
                    f"{entry['job_id']} still runs; `trainkit cancel {quote(str(run.path))} --now` kills it"
                )
    click.echo(message, err=True)
    if as_json:
        value = {"run_dir": str(run.path), "job_id": entry and entry["job_id"], "state": done}
        click.echo(json.dumps(value, ensure_ascii=False))
    return EXIT_FAILED if wait and done == "cancelling" else EXIT_OK


ASK_EVERY_S = 2.0


def cancel_all(group: RunGroup, now: bool, wait: bool, as_json: bool) -> int:
    """End the runs of a group that have not ended, and say how many there were."""
    from trainkit.control.groups import cancel_group, recall_job_id
    from trainkit.observe.group import GroupFiles
    from trainkit.plan.launch import WAITED_FOR
    from trainkit.slurm.jobs import query_jobs

    array = recall_job_id(group)
    if array is None:
        raise UsageError(
            f"whether {group.path} was submitted is not known: its sweep.json has no job id",
            hint="`squeue --me` lists your jobs",
        )
    look = GroupFiles(group)
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
    from trainkit.control.jobs import is_there
    from trainkit.slurm.jobs import query_jobs

    deadline_s = time.monotonic() + timeout_s
    while any(is_there(job) for job in query_jobs(job_ids).values()):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(ASK_EVERY_S)
    return True
