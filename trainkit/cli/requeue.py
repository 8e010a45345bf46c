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
    from trainkit.submit.local import live_entry, send

    run = find_run(run_name)
    job = read_job(run)
    value = {"run_dir": str(run.path), "name": job["name"]}
    with run_lock(run):
        entry = live_entry(run, "requeue")
        if entry is None:
            value |= started(_start_again(run), str(job["backend"]))
        else:
            send(entry, signal.SIGUSR2)
    if entry is None:
        print_started(value, as_json)
        return EXIT_OK
    click.echo(f"{entry['job_id']} is told to save, stop and come back", err=True)
    if as_json:
        value |= {"job_id": entry["job_id"], "attempt": entry["attempt"] + 1, "backend": job["backend"]}
        click.echo(json.dumps(value, ensure_ascii=False))
    return EXIT_OK


def _start_again(run: RunDir) -> dict[str, Any]:
    """Start an ended run's next attempt with the bytes of its newest one; call with the lock held."""
    from trainkit.job.record import newest_entry
    from trainkit.submit.local import start_attempt

    newest = newest_entry(run)
    if newest is None:
        hint = f"`trainkit resume {quote(str(run.path))}` starts it"
        raise UsageError(f"{run.path} was never started", hint=hint)
    attempt = run.attempt(newest["attempt"])
    config_text = attempt.config_file.read_text(encoding="utf-8")
    plan_text = attempt.plan_file.read_text(encoding="utf-8")
    return start_attempt(run, config_text, plan_text, "requeue")
