"""Implements ``trainkit watch``, a live screen for one run, a group, or all runs."""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path

import click

from trainkit.cli.help import as_command, complete_run, option, warn
from trainkit.cli.options import json_option
from trainkit.cli.output import echo_json
from trainkit.cli.status import show_runs
from trainkit.errors import EXIT_OK, UsageError
from trainkit.extras import install_line
from trainkit.observe.current import look_at
from trainkit.run.registry import find_run_or_group
from trainkit.run.rundir import RunDir

INTERVAL_S = 2.0
PIPE_WIDTH = 120


@as_command("trainkit watch last", "trainkit watch", "trainkit watch last --once")
@click.argument("run_name", metavar="[RUN]", required=False, shell_complete=complete_run)
@option(
    "--interval S",
    "Seconds between two reads of the run folder; Slurm is queried at most every 10 s.",
    name="interval_s",
    type=click.FloatRange(min=0.2),
    default=INTERVAL_S,
    show_default=True,
)
@option("--once", "Print the screen once, as plain text, and exit.")
@json_option("trainkit.capabilities.watch.run_view:ViewJson")
def command(run_name: str | None, interval_s: float, once: bool, as_json: bool) -> int:
    """Watch RUN in the terminal: progress, curves, nodes and warnings.

    RUN can also be a group of runs or a bench. Without RUN, the screen lists the active runs and the newest
    runs that have ended, and you can open any of them. `watch` changes nothing unless you press a key for an
    action, such as cancelling the run, and confirm the action. With --json or without a terminal, the command
    prints the current state once.
    """
    found = None if run_name is None else find_run_or_group(run_name)
    if not (once or as_json) and sys.stdout.isatty() and sys.stdin.isatty():
        if find_spec("textual") is None:
            hint = (
                f"`{install_line('watch')}`; `trainkit watch --once` and `trainkit status` work "
                f"without this package"
            )
            raise UsageError("the package textual is not installed", hint=hint)
        from trainkit.capabilities.watch.screen import watch

        return watch(found, interval_s)
    if not isinstance(found, RunDir):
        show_runs(found, False, as_json)
        return EXIT_OK
    from trainkit.capabilities.watch.run_view import read_view
    from trainkit.capabilities.watch.view_text import Size, view_lines

    history, status, job = look_at(found, warn)
    for part in (history.events, history.metrics):
        with suppress(OSError):  # the status shows this error as a warning
            part.update()
    view = read_view(history, status, datetime.now(timezone.utc), job, Path.cwd())
    if as_json:
        echo_json(view.to_dict())
        return EXIT_OK
    width = shutil.get_terminal_size((PIPE_WIDTH, 24)).columns
    click.echo("\n".join(line.plain.rstrip() for line in view_lines(view, Size(width))))
    return EXIT_OK
