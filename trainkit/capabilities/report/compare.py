"""Implements ``trainkit compare``, which shows the results of runs and the config keys that differ."""

from __future__ import annotations

import csv
import io
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TextIO, TypedDict

import click

from trainkit.capabilities.report.compared_runs import (
    are_trials,
    compared_value,
    compared_values,
    differing_keys,
    progress_of,
    runs_named,
    short_names,
)
from trainkit.capabilities.report.curves import Curves, writable_file
from trainkit.capabilities.report.curves import curves as read_curves
from trainkit.capabilities.report.plot import AXES, SEED, figure_kind, save, write_output
from trainkit.capabilities.report.run_report import Report, read_report
from trainkit.capabilities.watch.view_text import resampled, sparkline
from trainkit.cli.help import as_command, complete_run, option, terminal_width, warn
from trainkit.cli.options import PATH, json_option
from trainkit.cli.output import echo_error, echo_json, masked
from trainkit.cli.status import styled_state
from trainkit.errors import UsageError
from trainkit.formats import JsonObject, cell, duration, hours_text, plural, result_text, shown_value, table
from trainkit.observe.current import look_at
from trainkit.observe.group import column_of, value_order
from trainkit.observe.ranking import (
    Measured,
    Mode,
    Ranking,
    UnknownMetricError,
    asked_metric,
    config_ranking,
    rank,
)
from trainkit.observe.status import loss_text
from trainkit.run.events import with_divergence
from trainkit.run.trial import as_numbers
from trainkit.terminal import TITLE, Styled

CURVE_WIDTH = 24
"""Width of an inline curve in a table, in characters."""
MAX_CELL = 40
"""Maximum number of characters of a value in a table."""
SORTED_BY = ("run", "state", "step", "loss", "tokens_per_s", "allocated_s", "worker_hours")
"""Columns that ``--sort`` accepts, in addition to metrics and to the keys that differ between the runs."""


@as_command(
    "trainkit compare a b",
    "trainkit compare lr-sweep --csv",
    "trainkit compare lr-sweep --curves loss,val_loss --plot losses.pdf",
)
@click.argument("names", metavar="RUN…", nargs=-1, required=True, shell_complete=complete_run)
@option(
    "--csv [FILE]",
    "Write the table as comma-separated values to FILE, or to standard output.",
    name="csv_file",
    is_flag=False,
    flag_value="-",
)
@option("--curves METRICS", "Compare the curves of these metrics, for example loss,val_loss.", name="metrics")
@option(
    "--plot FILE",
    "Plot the curves to FILE (.pdf, .svg or .png). Without --curves, the loss is plotted.",
    type=PATH,
)
@option(
    "--x AXIS",
    "Horizontal axis of the curves: step, tokens, time or gpu_hours; default: step.",
    type=click.Choice(list(AXES)),
)
@option(
    "--smooth WEIGHT",
    "Draw a moving average; WEIGHT is the weight of earlier values, for example 0.9.",
    type=float,
)
@option("--overwrite", "Overwrite the output files if they exist.")
@option(
    "--metric NAME", "Rank the runs by this metric; default: the metric named in their configs, or val_loss."
)
@option("--sort NAME", "Sort the runs by this column, metric or config key.")
@option("--by KEY", "Colour the curves by this config key; default: the first key that differs between runs.")
@json_option("trainkit.capabilities.report.compare:ComparedJson")
def command(
    names: tuple[str, ...],
    csv_file: str | None,
    metrics: str | None,
    plot: Path | None,
    x: str | None,
    smooth: float | None,
    overwrite: bool,
    metric: str | None,
    sort: str | None,
    by: str | None,
    as_json: bool,
) -> None:
    """Compare the results of runs and the config keys that differ between the runs.

    The name of a group or bench stands for all of its runs that have started. For a single group, the table
    is sorted by result, and the best result is shown in bold. The output of --csv and --json keeps the order
    of the trials. For runs that differ only in their seeds, an additional table shows the mean and standard
    deviation of their results.

    --curves and --plot compare the curves of the runs. The figure has one line per combination of values of
    the differing keys, with the mean and standard deviation over seeds. With --csv, --curves writes a table
    with one row per logged step.
    """
    if csv_file is not None and csv_file != "-" and not csv_file.endswith(".csv"):
        # FILE was omitted, so this value of `--csv` is the first run name.
        names, csv_file = (csv_file, *names), "-"
    table_file = None
    if csv_file is not None and csv_file != "-":
        table_file = writable_file("--csv", Path(csv_file), overwrites=overwrite)
    if csv_file is not None and as_json:
        raise UsageError("--csv and --json are mutually exclusive", hint="use either --csv or --json")
    if plot is not None:
        figure_kind(writable_file("--plot", plot, overwrites=overwrite))
    if overwrite and plot is None and table_file is None:
        raise UsageError(
            "--overwrite needs a file", hint="specify an output file: --plot losses.pdf or --csv curves.csv"
        )
    for name, value in {"--x": x, "--smooth": smooth, "--by": by}.items():
        if plot is None and value is not None:
            raise UsageError(
                f"{name} applies only to a figure",
                hint="specify an output file for the figure: --plot losses.pdf",
            )
    if metrics is None and plot is None:
        _compare_runs(names, csv_file is not None, table_file, overwrite, as_json, metric, sort)
        return
    for name, value in {"--metric": metric, "--sort": sort}.items():
        if value is not None:
            raise UsageError(
                f"{name} applies only to the table of runs",
                hint="use --curves to choose the metrics of the curves",
            )
    if as_json:
        raise UsageError("--json has no curves", hint="use --csv FILE to write the curves as a table")
    wanted = [name.strip() for name in (metrics or "loss").split(",")]
    curves = read_curves(*names, metrics=[name for name in wanted if name])
    for name in curves.unreadable:
        warn(f"{name}: the config of this run cannot be read")
    figure = None if plot is None else curves.plot(x=x or "step", smooth=smooth or 0.0, by=by)
    if plot is not None or csv_file is not None:
        _note_progress(names, {f"values of {name}": curves.num_without(name) for name in curves.metrics})
    if csv_file is not None:
        with _table(table_file, overwrite) as stream:
            curves.write_csv(stream)
    if plot is not None and figure is not None:
        try:
            save(figure, plot, overwrites=overwrite)
        except OSError as error:
            raise UsageError(f"--plot {plot}: {error.strerror or error}", hint="name another file") from error
        click.echo(plot, err=csv_file == "-")
    elif csv_file is None:
        click.echo(_curve_table(curves))


def _note_progress(names: Sequence[str], num_without: Mapping[str, int]) -> None:
    """Print a note on stderr with the number of runs that lack data or have not ended.

    `num_without` maps a description of data to the number of started runs that lack the data.
    """
    progress = progress_of(names)
    total = plural(progress.num_runs, progress.noun)
    num_open = progress.num_not_started + progress.num_not_ended
    for data, num_started in num_without.items():
        if count := num_started + progress.num_not_started:
            have = "has" if count == 1 else "have"
            echo_error(f"note: {count:,} of {total} {have} no {data}{' yet' if num_open else ''}")
    if num_open:
        have = "has" if num_open == 1 else "have"
        echo_error(f"note: {num_open:,} of {total} {have} not ended yet")


@contextmanager
def _table(file: Path | None, overwrites: bool) -> Iterator[TextIO]:
    """Open the output for a table: stdout, or a file whose path is printed after writing."""
    if file is None:
        yield sys.stdout
        return
    content = io.StringIO(newline="")
    yield content
    try:
        write_output(file, content.getvalue().encode(), overwrites=overwrites)
    except OSError as error:
        raise UsageError(f"--csv {file}: {error.strerror or error}", hint="name another file") from error
    click.echo(file)


def _curve_table(curves: Curves) -> str:
    """Return a table with one row per run and metric: last, lowest and highest value, and an inline curve."""
    rows: list[Sequence[str]] = [("RUN", "METRIC", "STEP", "LAST", "LOWEST", "HIGHEST", "CURVE")]
    for metric in curves.metrics:
        for run, points in curves.points(metric):
            finite = [(int(step), value) for step, value in points if math.isfinite(value)]
            values = [value for _, value in finite]
            last = (int(points[-1][0]), points[-1][1]) if points else (None, None)
            figures = [
                cell(value, ".4f")
                for value in (last[1], min(values, default=None), max(values, default=None))
            ]
            rows.append((run, metric, cell(last[0]), *figures, sparkline(resampled(finite, CURVE_WIDTH))))
    return table(rows, fit=terminal_width())


def _compare_runs(
    names: Sequence[str],
    as_csv: bool,
    table_file: Path | None,
    overwrites: bool,
    as_json: bool,
    metric: str | None,
    sort: str | None,
) -> None:
    now = datetime.now(timezone.utc).timestamp()
    runs = runs_named(names)
    if len(runs) < 2:
        raise UsageError(
            "a single run cannot be compared", hint="specify at least two runs, or a group of runs"
        )
    reports = [read_report(*look_at(run, warn)[:2], now) for run in runs]
    values = [compared_values(run, report.config) for run, report in zip(runs, reports, strict=True)]
    keys = differing_keys(values)
    column = None if sort is None else column_of(sort, keys, SORTED_BY)
    by_metric = sort if column is None else None
    asked = asked_metric(metric, by_metric, (*SORTED_BY, *keys))
    try:
        ranking, measured = rank(runs, asked, config_ranking(report.config for report in reports))
    except UnknownMetricError as error:
        raise error if by_metric is None else error.as_sort_key((*SORTED_BY, *keys)) from None
    compared = [
        _compared(name, report, ranking, own)
        for name, report, own in zip(short_names(runs), reports, measured, strict=True)
    ]
    for run, own in zip(compared, values, strict=True):
        if not own:
            warn(f"{run['run']}: the config of this run cannot be read")
    rows = list(zip(compared, measured, reports, values, strict=True))
    if column is not None:
        rows.sort(key=lambda row: value_order((as_numbers(row[3]) if column in keys else row[0]).get(column)))
    elif sort is not None or (not as_csv and not as_json and are_trials(names)):
        rows.sort(key=lambda row: ranking.order(row[0]["result"]))
    compared = [run for run, *_ in rows]
    differing = [{key: masked(own.get(key), key) for key in keys} for *_, own in rows]
    plain = [{key: compared_value(key, value) for key, value in own.items()} for own in differing]
    repeated = _repetitions(keys, [own for *_, own in rows], [run["result"] for run in compared])
    if as_csv:
        num_without = sum(run["result"] is None for run in compared)
        _note_progress(names, {f"result by {ranking.metric}": num_without})
    if as_json:
        found = [{**run, "values": own} for run, own in zip(compared, plain, strict=True)]
        value = {"differ": keys, "metric": ranking.metric, "mode": ranking.mode, "runs": found}
        echo_json({**value, "repetitions": [one.to_dict() for one in repeated]} if repeated else value)
    elif as_csv:
        compared = [{**run, **_of_repetition(repeated, index)} for index, run in enumerate(compared)]
        with _table(table_file, overwrites) as stream:
            writer = csv.writer(stream)
            writer.writerow([*compared[0], *(f"values.{key}" if key in compared[0] else key for key in keys)])
            for run, own in zip(compared, plain, strict=True):
                shown = ["" if value is None else shown_value(value) for value in own.values()]
                writer.writerow([*run.values(), *shown])
    else:
        best = min(compared, key=lambda run: ranking.order(run["result"]))
        results = [
            Styled(_result(own, report), TITLE) if run is best and own.result else _result(own, report)
            for run, own, report, _ in rows
        ]
        click.echo(_figures(compared, [report for *_, report, _ in rows], ranking.heading, results))
        shown_of = [(run["run"], own) for (run, *_, known), own in zip(rows, differing, strict=True) if known]
        click.echo(f"\n{_differences(keys, shown_of)}")
        if repeated:
            click.echo(f"\n{_mean_table(keys, repeated, ranking)}")


class RepetitionJson(TypedDict):
    """Runs that differ only in their seeds, and the mean of their results."""

    values: Mapping[str, object]
    """Values of the keys that differ between the compared runs, excluding the seed."""
    num_runs: int
    num_results: int
    mean: float | None
    sd: float | None
    """The sample standard deviation of the results; None for fewer than two results."""


class ComparedRunJson(TypedDict):
    """The results of one run; unknown results are None."""

    run: str
    state: str
    step: int | None
    total_steps: int | None
    loss: float | None
    diverged_since: int | None
    """The step at which the loss became non-finite; None if the run has not diverged."""
    val_loss: float | None
    best_val_loss: float | None
    best_step: int | None
    """The step of `best_val_loss`."""
    tokens_per_s: float | None
    """The median of the throughput over all records."""
    allocated_s: float
    worker_hours: float | None
    run_dir: str
    metric: str
    """The name of the metric in `result`."""
    result: float | None
    result_step: int | None
    values: Mapping[str, object]
    """The run's values of the keys that differ between the runs."""


class _ComparedJson(TypedDict):
    differ: list[str]
    """The config keys that differ between the runs."""
    metric: str
    """The metric that ranks the runs."""
    mode: Mode
    runs: list[ComparedRunJson]


class ComparedJson(_ComparedJson, total=False):
    """The results of several runs."""

    repetitions: list[RepetitionJson]
    """The runs that differ only in their seeds; absent if there are none."""


@dataclass(frozen=True)
class Repetition:
    """Runs that differ only in their seeds, and the mean of their results."""

    values: Mapping[str, object]
    """Values of the keys that differ between the compared runs, excluding the seed."""
    rows: Sequence[int]
    """The row indices of the runs in the table."""
    num_results: int
    mean: float | None
    """The mean of the results; None if there are no results."""
    sd: float | None
    """The sample standard deviation, with n - 1 in the denominator; None for fewer than two results."""

    def to_dict(self) -> RepetitionJson:
        """Return these runs and their mean as a JSON object."""
        return {
            "values": {key: compared_value(key, value) for key, value in self.values.items()},
            "num_runs": len(self.rows),
            "num_results": self.num_results,
            "mean": self.mean,
            "sd": self.sd,
        }


def _repetitions(
    keys: Sequence[str], values: Sequence[Mapping[str, object]], results: Sequence[float | None]
) -> list[Repetition]:
    """Group runs whose keys are equal except for the seed; return [] if no group has several runs."""
    own = [key for key in keys if key != SEED]
    grouped: dict[str, list[int]] = {}
    for index, known in enumerate(values):
        if SEED in keys and known:
            grouped.setdefault(repr([compared_value(key, known.get(key)) for key in own]), []).append(index)
    if all(len(rows) < 2 for rows in grouped.values()):
        return []
    found = []
    for rows in grouped.values():
        finite = [result for index in rows if (result := results[index]) is not None]
        found.append(
            Repetition(
                values={key: masked(values[rows[0]].get(key), key) for key in own},
                rows=rows,
                num_results=len(finite),
                mean=fmean(finite) if finite else None,
                sd=stdev(finite) if len(finite) > 1 else None,
            )
        )
    return found


def _of_repetition(repeated: Sequence[Repetition], index: int) -> dict[str, object]:
    """Return the CSV columns shared by the runs of a repetition; {} if the run has no repetition."""
    if not repeated:
        return {}
    own = next((one for one in repeated if index in one.rows), None)
    num, mean, sd = (None, None, None) if own is None else (own.num_results, own.mean, own.sd)
    return {"result_n": num, "result_mean": mean, "result_sd": sd}


def _mean_table(keys: Sequence[str], repeated: Sequence[Repetition], ranking: Ranking) -> str:
    """Return a table of means and standard deviations, with one row per combination of key values."""
    own = [key for key in keys if key != SEED]
    rows: list[Sequence[str]] = [(*own, "N", f"MEAN ± SD OF {ranking.heading}")]
    ranked = sorted(repeated, key=lambda one: ranking.order(one.mean))
    for one in ranked:
        sd = "" if one.sd is None else f" ± {one.sd:.2g}"
        shown_values = ("-" if one.values[key] is None else shown_value(one.values[key]) for key in own)
        num = str(one.num_results)
        if one.num_results < len(one.rows):
            num += f" of {len(one.rows)}"
        result = f"{result_text(one.mean)}{sd}"
        is_best = one is ranked[0] and one.mean is not None
        rows.append((*shown_values, num, Styled(result, TITLE) if is_best else result))
    return table(rows, fit=terminal_width())


def _compared(name: str, report: Report, ranking: Ranking, measured: Measured) -> JsonObject:
    """Return the results of one run, with None for unknown results."""
    progress = report.status.progress
    found = [] if progress.diverged_since is not None else report.val_loss
    best_step, best = min(found, key=lambda point: point[1], default=(None, None))
    result = measured.result
    speeds = [speed for own in report.curves["tokens_per_s"].values() for _, speed in own]
    return {
        "run": name,
        "state": report.status.state,
        "step": progress.step,
        "total_steps": progress.total_steps,
        "loss": progress.loss,
        "diverged_since": measured.diverged_since,
        "val_loss": progress.val_loss,
        "best_val_loss": best,
        "best_step": None if best_step is None else int(best_step),
        # Use the median, because profiled steps and steps after a checkpoint save are slower than others.
        "tokens_per_s": median(speeds) if speeds else None,
        "allocated_s": round(report.allocated_s, 3),
        "worker_hours": report.worker_hours,
        "run_dir": report.status.run_dir,
        "metric": ranking.metric,
        "result": None if result is None else result.value,
        "result_step": None if result is None else result.step,
    }


def _figures(
    runs: Sequence[JsonObject], reports: Sequence[Report], ranked_by: str, results: Sequence[str]
) -> str:
    hours = "GPU-HOURS" if all(report.status.place.device == "cuda" for report in reports) else "WORKER-HOURS"
    speeds = [report.status.progress for report in reports if report.status.progress.tokens_per_s is not None]
    counts_samples = bool(speeds) and all(one.samples_per_s is not None for one in speeds)
    per_s = "SAMPLES/S" if counts_samples else "TOKENS/S"
    heading = ("RUN", "STATE", "STEP", "LOSS", "VAL LOSS", ranked_by, per_s, "TIME", hours, "CURVE")
    points = ([point for own in report.curves["loss"].values() for point in own] for report in reports)
    curves = (sorted({int(step): loss for step, loss in found}.items()) for found in points)
    rows = [
        (
            run["run"],
            styled_state(report.status),
            cell(run["step"]),
            loss_text(report.status, cell(run["loss"], ".4f")),
            cell(run["val_loss"], ".4f"),
            result,
            cell(run["tokens_per_s"], ",.0f"),
            duration(run["allocated_s"]),
            hours_text(run["worker_hours"]),
            sparkline(resampled(curve, CURVE_WIDTH)),
        )
        for run, report, curve, result in zip(runs, reports, curves, results, strict=True)
    ]
    columns = zip(heading, *rows, strict=True)
    filled = [column for column in columns if set(column[1:]) - {"", "-"}]
    return table(list(zip(*filled, strict=True)), fit=terminal_width())


def _result(measured: Measured, report: Report) -> str:
    """Return a run's result and step as text, or the step at which its metric diverged.

    A divergence of the loss is shown in another column.
    """
    if measured.result is not None:
        return f"{result_text(measured.result.value)} at {cell(measured.result.step)}"
    is_said = report.status.progress.diverged_since is not None
    return (None if is_said else with_divergence(None, measured.diverged_since)) or "-"


def _differences(keys: Sequence[str], runs: Sequence[tuple[str, dict[str, object]]]) -> str:
    """Return a table of the config keys that differ between the runs.

    The table has one row per key or, if there are many runs, one row per run.
    """
    if len(runs) < 2:
        return "the configs of the runs cannot be compared"
    if not keys:
        return "the configs of the runs are the same"

    def text(value: object) -> str:
        whole = "-" if value is None else shown_value(value)
        return whole if len(whole) <= MAX_CELL else whole[: MAX_CELL - 1] + "…"

    rows = [["", *(name for name, _ in runs)]]
    rows += [[key, *(text(own[key]) for _, own in runs)] for key in keys]
    is_by_key = len(runs) <= max(len(keys), 4)
    return table(rows if is_by_key else list(zip(*rows, strict=True)), fit=terminal_width())
