"""``trainkit requeue``: start a run again with the same config."""

from __future__ import annotations

from dataclasses import replace

import click

from trainkit.cli.help import Command, examples
from trainkit.cli.options import json_option, run_argument
from trainkit.errors import EXIT_OK


@click.command(cls=Command, epilog=examples("trainkit requeue last", "trainkit requeue last --json"))
@run_argument
@json_option
def command(run_name: str, as_json: bool) -> int:
    """Start the next attempt of RUN with the same config and plan.

    A running job saves, stops and is then restarted.
    """
    from trainkit.cli.following import print_started
    from trainkit.control.resume import requeue_run
    from trainkit.run.record import read_job
    from trainkit.run.registry import find_run

    run = find_run(run_name, to_change=True)
    entry, is_started = requeue_run(run)
    job = read_job(run)
    if not is_started:
        click.echo(f"{entry.job_id} is saving and will be requeued", err=True)
        if not as_json:
            return EXIT_OK
        entry = replace(entry, attempt=entry.attempt + 1)
    print_started(run, job.name, entry, str(job.backend), as_json)
    return EXIT_OK
