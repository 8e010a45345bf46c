"""Implements ``trainkit report``, which writes one HTML page about a run or a group of runs."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from shlex import quote

from trainkit.cli.help import as_command, option, warn
from trainkit.cli.options import PATH, json_option, run_argument
from trainkit.cli.output import echo_result
from trainkit.errors import UsageError
from trainkit.observe.current import look_at, query_group
from trainkit.run.files import write_atomic
from trainkit.run.registry import find_run_or_group
from trainkit.run.rundir import RunDir
from trainkit.shipped import measured_speeds


@as_command("trainkit report last", "trainkit report lr-sweep --metric val_accuracy")
@run_argument
@option("--metric NAME", "Rank the runs by this metric, and show its chart first.")
@option("--out FILE", "Output file; default: report.html in the folder of RUN.", type=PATH)
@option(
    "--overwrite",
    "Overwrite the file of --out if it exists. Without --out, an existing report.html is always overwritten.",
)
@json_option("trainkit.capabilities.report.sweep_report:ReportOrSweep")
def command(run_name: str, metric: str | None, out: Path | None, overwrite: bool, as_json: bool) -> None:
    """Write an HTML report to report.html in the folder of RUN, and print the path of the file.

    Repeat the command to update report.html.

    The page shows the run's timeline, its goodput and how the remaining time was spent, its curves, GPU
    utilisation, requested and used resources, and the commands that repeat the run. The page can be viewed
    without network access.

    For a group of runs or a bench, the page compares all of its runs. The page of a group has a table with
    failed runs first, the results for each swept key, and charts that show the curves of all runs together.
    """
    from trainkit.capabilities.report.curves import writable_file
    from trainkit.capabilities.report.page import REPORT_FILE
    from trainkit.capabilities.report.plot import write_output
    from trainkit.capabilities.report.run_report import read_report, render_report
    from trainkit.capabilities.report.sweep_report import read_sweep, render_sweep
    from trainkit.observe.ranking import rank

    if out is not None:
        writable_file("--out", out, overwrites=overwrite)
    elif overwrite:
        raise UsageError(
            "--overwrite needs --out FILE", hint="omit --overwrite: report.html is always overwritten"
        )
    found = find_run_or_group(run_name)
    now = datetime.now(timezone.utc).timestamp()
    if isinstance(found, RunDir):
        report = read_report(*look_at(found, warn)[:2], now)
        if metric is not None:
            # If the run has not logged the metric, `rank` raises UsageError with a list of the logged
            # metrics.
            rank([found], metric, None)
        folder, page, value = found.path, render_report(report, metric), report.to_dict()
    else:
        speeds = measured_speeds(found.path) if metric is None else None
        runs = read_sweep(found, query_group(found, warn, metric), now, speeds)
        folder, page, value = found.path, render_sweep(runs, metric), runs.to_dict()
    file = folder / REPORT_FILE if out is None else out.absolute()
    try:
        if out is None:
            write_atomic(file, page)
        else:
            write_output(file, page.encode(), overwrites=overwrite)
    except OSError as error:
        raise UsageError(
            f"{file} cannot be written: {error.strerror or error}",
            hint=f"`trainkit report {quote(run_name)} --out FILE` writes the report to another file",
        ) from error
    echo_result({"report": str(file), **value}, str(file), as_json)
