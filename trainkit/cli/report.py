"""``trainkit report``: one HTML page of what a run did."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import click

from trainkit.cli.help import Command, examples, warn
from trainkit.cli.options import json_option, run_argument
from trainkit.cli.output import echo_json
from trainkit.cli.status import find_any, look_at, query_group
from trainkit.errors import EXIT_OK, TrainkitError
from trainkit.run.files import write_atomic
from trainkit.run.group import RunGroup
from trainkit.run.rundir import RunDir


@click.command(cls=Command, epilog=examples("trainkit report last", "trainkit report last --json"))
@run_argument
@json_option
def command(run_name: str, as_json: bool) -> int:
    """Write report.html in the folder of RUN and print its path.

    The page shows the timeline, goodput and where the rest of the time went, curves, utilisation, requested
    and used resources, and how to repeat the run. It opens without a network.

    For a group of runs and for the folder of a bench, the page compares all of their runs: a table, failures
    first, the results by each swept key, and the curves over each other.
    """
    from trainkit.observe.page import REPORT_FILE
    from trainkit.observe.report import read_report, render_report
    from trainkit.observe.sweep_report import read_sweep, render_sweep, sweep_of_group

    found = find_any(run_name, groups_of_bench=True)
    now = datetime.now(timezone.utc).timestamp()
    if isinstance(found, RunDir):
        report = read_report(*look_at(found)[:2], now)
        folder, page, value = found.path, render_report(report), report.to_dict()
    else:
        if isinstance(found, RunGroup):
            sweep = sweep_of_group(found, query_group(found))
        else:
            from trainkit.bench.summary import sweep_of_bench

            sweep = sweep_of_bench(found, warn)
        runs = read_sweep(sweep, now)
        folder, page, value = Path(runs.run_dir), render_sweep(runs), runs.to_dict()
    file = folder / REPORT_FILE
    try:
        write_atomic(file, page)
    except OSError as error:
        raise TrainkitError(
            f"{file} cannot be written: {error.strerror or error}",
            hint="free disk space, or copy the folder to where you may write and name the copy",
        ) from error
    if as_json:
        echo_json({"report": str(file), **value})
    else:
        click.echo(str(file))
    return EXIT_OK
