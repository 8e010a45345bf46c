"""``trainkit report``: one HTML page of what a run did."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import click

from trainkit.cli.completion import complete_run
from trainkit.cli.help import Command, examples
from trainkit.cli.options import json_option, run_argument
from trainkit.errors import EXIT_OK

if TYPE_CHECKING:
    from trainkit.observe.report import Report
    from trainkit.rundir import RunDir


@click.command(
    cls=Command,
    epilog=examples("trainkit report last", "trainkit report last --json"),
)
@run_argument
@click.option(
    "--compare", "other_name", metavar="RUN2", shell_complete=complete_run, help="Compare with a run."
)
@json_option
def command(run_name: str, other_name: str | None, as_json: bool) -> int:
    """Write report.html in the folder of RUN and print its path.

    The page shows the time line, goodput and where the rest of the time went, curves, utilisation, requested
    and used resources, and how to repeat the run. It opens without a network.
    """
    from trainkit.control.run_registry import find_run
    from trainkit.observe.report import REPORT_FILE, render_report
    from trainkit.rundir import write_atomic

    run = find_run(run_name)
    other_run = None if other_name is None else find_run(other_name)
    report = _read(run)
    other = None if other_run is None else _read(other_run)
    file = run.path / REPORT_FILE
    write_atomic(file, render_report(report, other))
    if as_json:
        value = {"report": str(file), **report.to_dict()}
        if other is not None:
            value["compared"] = other.to_dict()
        click.echo(json.dumps(value, ensure_ascii=False))
    else:
        click.echo(str(file))
    return EXIT_OK


def _read(run: RunDir) -> Report:
    from trainkit.control.jobs import query_job_status
    from trainkit.observe.report import read_report
    from trainkit.observe.status import read_status

    now = datetime.now(timezone.utc)
    job = query_job_status([run], _warn)[0]
    return read_report(run, read_status(run, job.alive, now, job.job), now.timestamp())


def _warn(text: str) -> None:
    click.echo(f"warning: {text}", err=True)
