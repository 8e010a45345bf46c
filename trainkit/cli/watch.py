"""``trainkit watch``: live screen of a run, or of all runs."""

from __future__ import annotations

import json
import shutil
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainkit.cli.completion import complete_run
from trainkit.cli.help import Command, examples, warn
from trainkit.cli.options import json_option
from trainkit.errors import EXIT_OK

if TYPE_CHECKING:
    from trainkit.bench.run_bench import Bench
    from trainkit.run.group import RunGroup
    from trainkit.run.rundir import RunDir

INTERVAL_S = 2.0
PIPE_WIDTH = 120


@click.command(
    cls=Command,
    epilog=examples("trainkit watch last", "trainkit watch", "trainkit watch last --once"),
)
@click.argument("run_name", metavar="[RUN]", required=False, shell_complete=complete_run)
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.2),
    default=INTERVAL_S,
    show_default=True,
    metavar="S",
    help="Seconds between two readings of the run folder; Slurm is asked every 10 s at most.",
)
@click.option("--once", is_flag=True, help="Print the screen once, as plain text, and exit.")
@json_option
def command(run_name: str | None, interval_s: float, once: bool, as_json: bool) -> int:
    """Watch RUN in the terminal: progress, curves, nodes and warnings.

    RUN can also be a group of runs or a bench. Without RUN, lists active runs and the newest others to
    choose from. Only reads, until a key that acts is pressed and confirmed. With --json or without a
    terminal, prints once.
    """
    from trainkit.run.group import RunGroup
    from trainkit.run.registry import find_bench_folder, find_run_or_group
    from trainkit.run.rundir import RunDir

    prints_once = once or as_json or not (sys.stdout.isatty() and sys.stdin.isatty())
    folder = None if run_name is None else find_bench_folder(run_name, with_groups=False)
    found: RunDir | RunGroup | Bench | None = None
    if folder is not None:
        from trainkit.bench.run_bench import read_bench

        found = read_bench(folder)
    elif run_name is not None:
        found = find_run_or_group(run_name)
    if not prints_once:
        from trainkit.cli.watch_screen import watch

        return watch(found, interval_s)
    if isinstance(found, RunDir):
        return _print_run(found, as_json)
    from trainkit.cli.status import show_all_runs, show_bench, show_group

    if found is None:
        return show_all_runs(False, as_json)
    if isinstance(found, RunGroup):
        return show_group(found, False, as_json)
    return show_bench(found, False, as_json)


def _print_run(run: RunDir, as_json: bool) -> int:
    from trainkit.backends.jobs import query_job_status
    from trainkit.observe.run_view import read_view
    from trainkit.observe.status import read_status
    from trainkit.observe.view_text import Size, view_lines
    from trainkit.run.history import RunHistory

    now = datetime.now(timezone.utc)
    job = query_job_status([run], warn)[0]
    history = RunHistory(run)
    history.update()
    status = read_status(run, job.alive, now, job.job, history)
    view = read_view(history, status, now, job.job, Path.cwd())
    if as_json:
        click.echo(json.dumps(view.to_dict(), ensure_ascii=False))
        return EXIT_OK
    width = shutil.get_terminal_size((PIPE_WIDTH, 24)).columns
    text = "\n".join(line.plain.rstrip() for line in view_lines(view, Size(width)))
    encoding = sys.stdout.encoding or "ascii"  # that may lack the characters of curves
    click.echo(text.encode(encoding, "replace").decode(encoding))
    return EXIT_OK
