"""``trainkit compare``: what differs between runs, and what they reached, side by side in the terminal."""

from __future__ import annotations

import csv
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from shlex import join
from statistics import median
from typing import TextIO

import click

from trainkit.capabilities.report.compared_runs import differing_keys, runs_named, short_names
from trainkit.capabilities.report.curves import Curves
from trainkit.capabilities.report.curves import curves as read_curves
from trainkit.capabilities.report.plot import AXES, save
from trainkit.capabilities.report.run_report import Report, read_report
from trainkit.capabilities.watch.view_text import resampled, sparkline
from trainkit.cli.choose_runs import command_values
from trainkit.cli.help import as_command, complete_run, option, terminal_width, warn
from trainkit.cli.options import PATH, json_option
from trainkit.cli.output import echo_json, masked
from trainkit.errors import UsageError
from trainkit.formats import JsonObject, cell, duration, number, shown_value, table
from trainkit.observe.current import look_at
from trainkit.observe.status import loss_text
from trainkit.run.rundir import RunDir

CURVE_WIDTH = 24
MAX_CELL = 40


@as_command(
    "trainkit compare a b",
    "trainkit compare lr-sweep --csv",
    "trainkit compare lr-sweep --curves loss,val_loss --plot losses.pdf",
)
@click.argument("names", metavar="RUN…", nargs=-1, required=True, shell_complete=complete_run)
@option(
    "--csv [FILE]",
    "Write comma-separated values, to FILE or standard output.",
    name="csv_file",
    is_flag=False,
    flag_value="-",
)
@option("--curves METRICS", "Compare the curves of these metrics, such as loss,val_loss.", name="metrics")
@option("--plot FILE", "Draw the curves as a new .pdf, .svg or .png; default of --curves: loss.", type=PATH)
@option(
    "--x AXIS",
    "Draw the curves over step, tokens, time or gpu_hours; default: step.",
    type=click.Choice(list(AXES)),
)
@option("--smooth WEIGHT", "Draw a moving mean with this weight of the past, such as 0.9.", type=float)
@option("--by KEY", "Colour the curves by this config key; default: the first in which the runs differ.")
@json_option
def command(
    names: tuple[str, ...],
    csv_file: str | None,
    metrics: str | None,
    plot: Path | None,
    x: str | None,
    smooth: float | None,
    by: str | None,
    as_json: bool,
) -> None:
    """Compare runs: what each reached, and the config keys in which they differ.

    A group of runs or a bench stands for all of its runs that have started. With --curves or --plot, their
    curves are compared: a figure has a line per value of the keys, with mean and standard deviation over
    seeds, and the table has a row per logged step.
    """
    if csv_file not in (None, "-") and not csv_file.endswith(".csv"):
        raise UsageError(
            f"--csv {csv_file}: the name of a table ends with .csv", hint="write --csv after the runs"
        )
    if csv_file not in (None, "-"):
        _refuse_existing("--csv", Path(csv_file))
    if plot is not None:
        _refuse_existing("--plot", plot)
    elif (unused := {"--x": x, "--smooth": smooth, "--by": by}) and any(
        value is not None for value in unused.values()
    ):
        name = next(name for name, value in unused.items() if value is not None)
        raise UsageError(f"{name} is for a figure", hint="name its file: --plot losses.pdf")
    if metrics is not None or plot is not None:
        if as_json:
            raise UsageError("--json has no curves", hint="--csv FILE writes them as a table")
        _compare_curves(names, csv_file, (metrics or "loss").split(","), plot, x or "step", smooth or 0.0, by)
    else:
        _compare_runs(names, csv_file, as_json)


def _refuse_existing(option: str, file: Path) -> None:
    if os.path.lexists(file):
        raise UsageError(f"{option} {file} exists already", hint="name a new file")


@contextmanager
def _new_table(csv_file: str) -> Iterator[TextIO]:
    """Where a table is written: standard output for ``-``, or a file that does not exist yet."""
    if csv_file == "-":
        yield sys.stdout
        return
    try:
        with open(csv_file, "x", encoding="utf-8", newline="") as stream:
            yield stream
    except OSError as error:
        raise UsageError(f"--csv {csv_file}: {error.strerror or error}", hint="name another file") from error


def _compare_curves(
    names: Sequence[str],
    csv_file: str | None,
    metrics: Sequence[str],
    plot: Path | None,
    x: str,
    smooth: float,
    by: str | None,
) -> None:
    curves = read_curves(*names, metrics=metrics)
    if plot is not None:
        figure = curves.plot(x=x, smooth=smooth, by=by)
        try:
            save(figure, plot)
        except OSError as error:
            raise UsageError(f"--plot {plot}: {error.strerror or error}", hint="name another file") from error
    if csv_file is not None:
        with _new_table(csv_file) as stream:
            curves.write_csv(stream)
    for file in (plot, csv_file):
        if file not in (None, "-"):
            click.echo(file, err=csv_file == "-")
    if plot is None and csv_file is None:
        click.echo(_curve_table(curves))


def _curve_table(curves: Curves) -> str:
    """A row for each run and metric: its last, lowest and highest value, and its curve."""
    rows: list[Sequence[str]] = [("RUN", "METRIC", "STEP", "LAST", "LOWEST", "HIGHEST", "CURVE")]
    for run in dict.fromkeys(curves["run"]):
        for metric in curves.metrics:
            columns = zip(curves["run"], curves["step"], curves[metric], strict=True)
            points = [(step, value) for name, step, value in columns if name == run and value is not None]
            finite = [(step, value) for step, value in points if math.isfinite(value)]
            values = [value for _, value in finite]
            rows.append(
                (
                    run,
                    metric,
                    cell(points[-1][0] if points else None),
                    cell(points[-1][1] if points else None, ".4f"),
                    cell(min(values, default=None), ".4f"),
                    cell(max(values, default=None), ".4f"),
                    sparkline(resampled(finite, CURVE_WIDTH)),
                )
            )
    return table(rows, fit=terminal_width())


def _compare_runs(names: Sequence[str], csv_file: str | None, as_json: bool) -> None:
    now = datetime.now(timezone.utc).timestamp()
    runs = runs_named(names)
    if len(runs) < 2:
        raise UsageError("one run cannot be compared", hint="name another run, or a group of runs")
    reports = [read_report(*look_at(run, warn)[:2], now) for run in runs]
    compared = [_compared(name, report) for name, report in zip(short_names(runs), reports, strict=True)]
    values = [_values(report) for report in reports]
    for run, own in zip(compared, values, strict=True):
        if not own:
            warn(f"{run['run']}: its config cannot be read")
    keys = differing_keys(values)
    differing = [{key: masked(own.get(key), key) for key in keys} for own in values]
    if as_json:
        found = [{**run, "values": own} for run, own in zip(compared, differing, strict=True)]
        echo_json({"differ": keys, "runs": found})
    elif csv_file is not None:
        with _new_table(csv_file) as stream:
            writer = csv.writer(stream)
            writer.writerow([*compared[0], *keys])
            for run, own in zip(compared, differing, strict=True):
                shown = ["" if value is None else shown_value(value) for value in own.values()]
                writer.writerow([*run.values(), *shown])
    else:
        click.echo(_figures(compared, reports))
        columns = zip(compared, differing, values, strict=True)
        click.echo(f"\n{_differences(keys, [(run['run'], own) for run, own, known in columns if known])}")


def _compared(name: str, report: Report) -> JsonObject:
    """What one run reached, with a `name` as short as it tells the runs apart; None where it is unknown."""
    progress = report.status.progress
    found = [] if progress.diverged_since is not None else report.val_loss
    best_step, best = min(found, key=lambda point: point[1], default=(None, None))
    speeds = [speed for own in report.curves["tokens_per_s"].values() for _, speed in own]
    return {
        "run": name,
        "state": report.status.state,
        "step": progress.step,
        "total_steps": progress.total_steps,
        "loss": progress.loss,
        "diverged_since": progress.diverged_since,
        "val_loss": progress.val_loss,
        "best_val_loss": best,
        "best_step": None if best_step is None else int(best_step),
        # A step that is profiled, or follows a save, is slow.
        "tokens_per_s": median(speeds) if speeds else None,
        "allocated_s": round(report.allocated_s, 3),
        "worker_hours": report.worker_hours,
        "run_dir": report.status.run_dir,
    }


def _values(report: Report) -> dict[str, object]:
    """What was asked for: the config without the name, and the COMMAND; empty without a readable config."""
    if not report.config:
        return {}
    asked: dict[str, object] = {key: value for key, value in report.config.items() if key != "name"}
    asked |= command_values(RunDir(report.status.run_dir))
    if report.status.is_command:
        asked["COMMAND"] = join(report.status.command or ())
    return asked


def _figures(runs: Sequence[JsonObject], reports: Sequence[Report]) -> str:
    hours = "GPU-HOURS" if all(report.status.place.device == "cuda" for report in reports) else "WORKER-HOURS"
    heading = ("RUN", "STATE", "STEP", "LOSS", "VAL LOSS", "BEST", "TOKENS/S", "TIME", hours, "CURVE")
    points = ([point for own in report.curves["loss"].values() for point in own] for report in reports)
    curves = (sorted({int(step): loss for step, loss in found}.items()) for found in points)
    rows = [
        (
            run["run"],
            run["state"],
            cell(run["step"]),
            loss_text(report.status, cell(run["loss"], ".4f")),
            cell(run["val_loss"], ".4f"),
            "-" if run["best_val_loss"] is None else f"{run['best_val_loss']:.4f} at {run['best_step']}",
            cell(run["tokens_per_s"], ",.0f"),
            duration(run["allocated_s"]),
            number(run["worker_hours"]),
            sparkline(resampled(curve, CURVE_WIDTH)),
        )
        for run, report, curve in zip(runs, reports, curves, strict=True)
    ]
    columns = zip(heading, *rows, strict=True)
    filled = [column for column in columns if set(column[1:]) - {"", "-"}]
    return table(list(zip(*filled, strict=True)), fit=terminal_width())


def _differences(keys: Sequence[str], runs: Sequence[tuple[str, dict[str, object]]]) -> str:
    """A row per key, or, of more runs than keys, a row per run."""
    if len(runs) < 2:
        return "their configs cannot be compared"
    if not keys:
        return "their configs are the same"

    def text(value: object) -> str:
        whole = "-" if value is None else shown_value(value)
        return whole if len(whole) <= MAX_CELL else whole[: MAX_CELL - 1] + "…"

    rows = [["", *(name for name, _ in runs)]]
    rows += [[key, *(text(own[key]) for _, own in runs)] for key in keys]
    is_by_key = len(runs) <= max(len(keys), 4)
    return table(rows if is_by_key else list(zip(*rows, strict=True)), fit=terminal_width())
