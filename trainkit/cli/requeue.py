"""``trainkit requeue``: same job again."""

from __future__ import annotations

import json
import signal
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from trainkit.cli.options import examples, json_option, run_argument
from trainkit.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from trainkit.rundir import RunDir


@click.command(epilog=examples("trainkit requeue last", "trainkit requeue last --json"))
@run_argument
@json_option
def command(run_name: str, as_json: bool) -> int:
    """Start the job of RUN again with the same config and plan, as the run's next attempt.

    A running job saves and stops first and comes back by itself.
    """
    from trainkit.cli.launch import print_started, started
    from trainkit.job.record import read_job, run_lock
    from trainkit.submit.index import find_run
    from trainkit.submit.steer import live_entry, recall, tell

    run = find_run(run_name)
    job = read_job(run)
    value = {"run_dir": str(run.path), "name": job["name"]}
    with run_lock(run):
        recall(run)
        entry = live_entry(run, "requeue")
        if entry is None:
            value |= started(_start_again(run), str(job["backend"]))
        else:
            done = tell(run, entry, signal.SIGUSR2)
    if entry is None:
        print_started(value, as_json)
        return EXIT_OK
    if done == "waiting":
        raise UsageError(f"{entry['job_id']} waits in the queue already", hint="`trainkit status` tells why")
    click.echo(f"{entry['job_id']} is told to save, stop and come back", err=True)
    if as_json:
        value |= {"job_id": entry["job_id"], "attempt": entry["attempt"] + 1, "backend": job["backend"]}
        click.echo(json.dumps(value, ensure_ascii=False))
    return EXIT_OK


def _start_again(run: RunDir) -> dict[str, Any]:
    """Start an ended run's next attempt with the bytes of its newest one; call with the lock held."""
    from trainkit.config import read_effective
    from trainkit.job.record import newest_entry
    from trainkit.plan.launch import LaunchPlan
    from trainkit.rundir import read_json
    from trainkit.submit.start import start_attempt

    newest = newest_entry(run)
    if newest is None:
        hint = f"`trainkit resume {quote(str(run.path))}` starts it"
        raise UsageError(f"{run.path} was never started", hint=hint)
    attempt = run.attempt(newest["attempt"])
    plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
    return start_attempt(run, read_effective(attempt.config_file), plan, "requeue")
