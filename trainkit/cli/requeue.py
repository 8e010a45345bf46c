"""``trainkit requeue``: same job again."""

from __future__ import annotations

import json
import signal
from shlex import quote

import click

from trainkit.cli.options import examples, json_option, run_argument
from trainkit.errors import EXIT_OK


@click.command(epilog=examples("trainkit requeue last", "trainkit requeue last --json"))
@run_argument
@json_option
def command(run_name: str, as_json: bool) -> int:
    """Start the job of RUN again with the same config and plan, as the run's next attempt.

    A running job saves and stops first and comes back by itself.
    """
    from trainkit.cli.launch import print_started, started
    from trainkit.errors import UsageError
    from trainkit.job.record import newest_entry, read_job, run_lock
    from trainkit.submit.index import find_run
    from trainkit.submit.local import live_entry, send, start_attempt

    run = find_run(run_name)
    name = str(read_job(run)["name"])
    with run_lock(run):
        entry = live_entry(run, "requeue")
        if entry is not None:
            send(entry, signal.SIGUSR2)
        else:
            newest = newest_entry(run)
            if newest is None:
                raise UsageError(
                    f"{run.path} was never started",
                    hint=f"`trainkit resume {quote(str(run.path))}` starts it",
                )
            attempt = run.attempt(newest["attempt"])
            config_text = attempt.config_file.read_text(encoding="utf-8")
            plan_text = attempt.plan_file.read_text(encoding="utf-8")
            started_entry = start_attempt(run, config_text, plan_text, "requeue")
    if entry is not None:
        click.echo(f"{entry['job_id']} is told to save, stop and come back", err=True)
        if as_json:
            value = {"run_dir": str(run.path), "name": name, "job_id": entry["job_id"]}
            click.echo(json.dumps({**value, "attempt": entry["attempt"] + 1}, ensure_ascii=False))
        return EXIT_OK
    print_started({"run_dir": str(run.path), "name": name, **started(started_entry, "local")}, as_json)
    return EXIT_OK
