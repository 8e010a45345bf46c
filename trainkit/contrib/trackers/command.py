"""``trainkit sync``: send the metrics of a run to its trackers."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from trainkit.cli.help import Command, examples
from trainkit.cli.options import json_option, run_argument
from trainkit.errors import EXIT_FAILED, EXIT_OK, UsageError


@click.command(cls=Command, epilog=examples("trainkit sync last", "trainkit sync last --json"))
@run_argument
@json_option
def sync(run_name: str, as_json: bool) -> int:
    """Send to MLflow and Weights & Biases what RUN could not send from its nodes.

    Each step is sent once, as soon as a checkpoint covers it or the run has finished.
    """
    from trainkit.contrib.trackers.sync import sync_run
    from trainkit.locks import LockBusy
    from trainkit.run.registry import find_run

    run = find_run(run_name, to_change=True)
    try:
        found = sync_run(run)
    except LockBusy as busy:
        raise UsageError(f"the job of the run is sending: {busy}", hint="there is nothing to do") from None
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0]
        hint = "`pip install 'trainkit[mlflow,wandb]'` installs the clients of all trackers"
        raise UsageError(f"the package {name} is not installed", hint=hint) from None
    for sent in found:
        click.echo(sent.describe(), err=True)
    if as_json:
        click.echo(json.dumps([asdict(sent) for sent in found], ensure_ascii=False))
    return EXIT_FAILED if any(sent.problem for sent in found) else EXIT_OK
