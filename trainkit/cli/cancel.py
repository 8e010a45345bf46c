"""``trainkit cancel``: end a run."""

from __future__ import annotations

import json
import signal
from shlex import quote

import click

from trainkit.cli.options import examples, json_option, run_argument
from trainkit.errors import EXIT_FAILED, EXIT_OK

WAIT_MARGIN_S = 30.0


@click.command(
    epilog=examples("trainkit cancel last", "trainkit cancel last --wait", "trainkit cancel last --now")
)
@run_argument
@click.option("--now", is_flag=True, help="Kill at once, without saving.")
@click.option("--wait", is_flag=True, help="Return when the run has ended.")
@json_option
def command(run_name: str, now: bool, wait: bool, as_json: bool) -> int:
    """End RUN: it saves, and what has not ended after the grace time is killed.

    A run that has ended already is left as it is, which is no error. Of a group all runs are ended.
    """
    from trainkit.job.record import mark_cancelled, run_lock
    from trainkit.plan.launch import LaunchPlan
    from trainkit.rundir import read_json
    from trainkit.rungroup import RunGroup
    from trainkit.submit.follow_ups import cancel_follow_ups
    from trainkit.submit.index import find_run_or_group
    from trainkit.submit.steer import kill, live_entry, recall, tell, wait_until_gone

    run = find_run_or_group(run_name)
    if isinstance(run, RunGroup):
        from trainkit.cli.cancel_group import cancel_all

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
