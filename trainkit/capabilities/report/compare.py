"""``trainkit compare``: what differs between runs, and what they reached, side by side in the terminal."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from shlex import join
from statistics import median

import click

from trainkit.capabilities.report.run_report import Report, read_report
from trainkit.capabilities.watch.view_text import resampled, sparkline
from trainkit.cli.choose_runs import command_values
from trainkit.cli.help import as_command, complete_run, option, terminal_width, warn
from trainkit.cli.options import json_option
from trainkit.cli.output import echo_json, masked
from trainkit.errors import UsageError
from trainkit.formats import JsonObject, cell, duration, number, shown_value, table
from trainkit.observe.current import look_at
from trainkit.observe.status import loss_text
from trainkit.run.registry import find_run_or_group
from trainkit.run.rundir import RunDir

CURVE_WIDTH = 24
MAX_CELL = 40


@as_command("trainkit compare a b", "trainkit compare lr-sweep --csv")
@click.argument("names", metavar="RUN…", nargs=-1, required=True, shell_complete=complete_run)
@option("--csv", "Print one line of comma-separated values per run.", name="as_csv")
@json_option
def command(names: tuple[str, ...], as_csv: bool, as_json: bool) -> None:
    """Compare runs: what each reached, and the config keys in which they differ.

    A group of runs or a bench stands for all of its runs that have started.
    """
    now = datetime.now(timezone.utc).timestamp()
    runs = list({run.path.resolve(): run for name in names for run in _runs_of(name)}.values())
    if len(runs) < 2:
        raise UsageError("one run cannot be compared", hint="name another run, or a group of runs")
    reports = [read_report(*look_at(run, warn)[:2], now) for run in runs]
    compared = [_compared(name, report) for name, report in zip(_labels(runs), reports, strict=True)]
    values = [_values(report) for report in reports]
    for run, own in zip(compared, values, strict=True):
        if not own:
            warn(f"{run['run']}: its config cannot be read")
    texts = [{key: shown_value(value) for key, value in own.items()} for own in values if own]
    keys = [key for key in sorted(set().union(*texts)) if len({own.get(key) for own in texts}) > 1]
    differing = [{key: masked(own.get(key), key) for key in keys} for own in values]
    if as_json:
        found = [{**run, "values": own} for run, own in zip(compared, differing, strict=True)]
        echo_json({"differ": keys, "runs": found})
    elif as_csv:
        writer = csv.writer(sys.stdout)
        writer.writerow([*compared[0], *keys])
        for run, own in zip(compared, differing, strict=True):
            shown = ["" if value is None else shown_value(value) for value in own.values()]
            writer.writerow([*run.values(), *shown])
    else:
        click.echo(_figures(compared, reports))
        columns = zip(compared, differing, values, strict=True)
        click.echo(f"\n{_differences(keys, [(run['run'], own) for run, own, known in columns if known])}")


def _runs_of(name: str) -> list[RunDir]:
    found = find_run_or_group(name)
    if isinstance(found, RunDir):
        return [found]
    return [run for index in sorted(found.points) if (run := found.run(index)).exists()]


def _labels(runs: Sequence[RunDir]) -> list[str]:
    """The names of the folders, with those of their parents where these are needed."""
    for depth in range(1, max(len(run.path.parts) for run in runs)):
        names = ["/".join(run.path.parts[-depth:]) for run in runs]
        if len(set(names)) == len(names):
            break
    return names


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
