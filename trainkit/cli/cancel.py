"""``trainkit cancel``: cancel a run."""

from __future__ import annotations

import json

import click

from trainkit.cli.help import Command, examples
from trainkit.cli.options import json_option, run_argument
from trainkit.errors import EXIT_FAILED, EXIT_OK


@click.command(
    cls=Command,
    epilog=examples("trainkit cancel last", "trainkit cancel last --wait", "trainkit cancel last --now"),
)
@run_argument
@click.option("--now", is_flag=True, help="Kill the run immediately, without saving.")
@click.option("--wait", is_flag=True, help="Wait until the run has ended.")
@json_option
def command(run_name: str, now: bool, wait: bool, as_json: bool) -> int:
    """Cancel RUN: it saves and exits, or is killed after the grace time.

    For a group, cancels all of its runs. Succeeds if RUN has already ended.
    """
    from trainkit.control.cancel import cancel_group, cancel_run
    from trainkit.control.run_registry import find_run_or_group
    from trainkit.rungroup import RunGroup

    found = find_run_or_group(run_name, to_change=True)
    if isinstance(found, RunGroup):
        result = cancel_group(found, now=now, wait=wait)
    else:
        result = cancel_run(found, now=now, wait=wait, warn=lambda text: click.echo(text, err=True))
    click.echo(result.message, err=True)
    if as_json:
        click.echo(json.dumps(result.facts, ensure_ascii=False))
    return EXIT_FAILED if wait and result.state == "cancelling" else EXIT_OK
