"""``trainkit requeue``: same job again."""

from __future__ import annotations

import json
import signal

import click

from trainkit.cli.help import Command, examples
from trainkit.cli.options import json_option, run_argument
from trainkit.errors import EXIT_OK, UsageError


@click.command(cls=Command, epilog=examples("trainkit requeue last", "trainkit requeue last --json"))
@run_argument
@json_option
def command(run_name: str, as_json: bool) -> int:
    """Start the job of RUN again with the same config and plan, as the run's next attempt.

    A running job saves and stops first and comes back by itself.
    """
    from trainkit.cli.launch import print_started, started
    from trainkit.control.jobs import live_entry, recall, tell
    from trainkit.control.run_registry import find_run
    from trainkit.job.record import read_job, run_lock
    from trainkit.submit.start import start_again

    run = find_run(run_name)
    job = read_job(run)
    value = {"run_dir": str(run.path), "name": job["name"]}
    with run_lock(run):
        recall(run)
        entry = live_entry(run, "requeue")
        if entry is None:
            value |= started(start_again(run, "requeue"), str(job["backend"]))
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
