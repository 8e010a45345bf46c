"""Implements `trainkit cancel`, which stops a run, and `trainkit requeue`, which starts its next attempt."""

from __future__ import annotations

from dataclasses import replace

import click

from trainkit.cli import options
from trainkit.cli.help import as_command, option
from trainkit.cli.output import echo_json
from trainkit.control.cancel import cancel_group, cancel_run
from trainkit.errors import EXIT_FAILED, EXIT_OK
from trainkit.run.group import RunGroup
from trainkit.run.registry import find_run, find_run_or_group


@as_command("trainkit cancel last", "trainkit cancel last --wait", "trainkit cancel last --now")
@options.run_argument
@option("--now", "Kill the run immediately, without saving a checkpoint.")
@option("--wait", "Wait until the run has stopped.")
@options.trust_option
@options.json_option("trainkit.control.cancel:CancelledJson")
def cancel(run_name: str, now: bool, wait: bool, as_json: bool) -> int:
    """Cancel RUN: it saves a checkpoint and exits, or is killed if it is still running after the grace time.

    If RUN is a group or a bench, all of its runs are cancelled. The command succeeds if RUN has already
    ended. With --wait, the exit code is 1 if another command restarts RUN while this command is waiting.
    """
    found = find_run_or_group(run_name, acts=True)
    options.refuse_untrusted(found.path)
    if isinstance(found, RunGroup):
        result = cancel_group(found, now=now, wait=wait)
    else:
        result = cancel_run(found, now=now, wait=wait, warn=lambda text: click.echo(text, err=True))
    click.echo(result.message, err=True)
    if as_json:
        echo_json(result.facts)
    return EXIT_FAILED if wait and result.state in ("cancelling", "restarted") else EXIT_OK


@as_command("trainkit requeue last", "trainkit requeue last --json")
@options.run_argument
@options.trust_option
@options.json_option("trainkit.cli.started:StartedJson")
def requeue(run_name: str, as_json: bool) -> None:
    """Start the next attempt of RUN with the same config and plan.

    If the job is running, it saves a checkpoint and exits before the next attempt starts. The command fails
    while RUN is being cancelled.
    """
    from trainkit.cli.started import print_started
    from trainkit.control.requeue import requeue_run

    run = find_run(run_name, acts=True)
    options.refuse_untrusted(run.path)
    requeued = requeue_run(run)
    job, entry = requeued.job, requeued.entry
    if not requeued.is_started:
        click.echo(
            f"{run.shown}: {entry.job_id} was asked to save a checkpoint, and will be requeued", err=True
        )
        if not as_json:
            return
        entry = replace(entry, attempt=entry.attempt + 1)
    print_started(run, job.name, entry, str(job.backend), as_json)
