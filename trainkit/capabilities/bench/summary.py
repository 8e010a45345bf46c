"""Writes the summary of a bench: summary.csv, a terminal table, plots, and the fastest trial."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypedDict

from trainkit.capabilities.bench.measure import Row, by_speed, measured, row_of, speed
from trainkit.capabilities.bench.run_bench import (
    ENDED,
    FINISHED,
    LAYOUT,
    Bench,
    look_at_runs,
    trial_name,
)
from trainkit.extras import install_line
from trainkit.folders import ensure_folder
from trainkit.formats import cell, short_keys, shown_value, table
from trainkit.observe.group import TrialStatus
from trainkit.run.events import training_curve
from trainkit.run.files import write_atomic


@dataclass(frozen=True)
class Fastest:
    """The fastest of the finished trials, compared with the second fastest."""

    name: str
    speed: float
    unit: str
    second: str
    second_speed: float
    is_clear: bool | None
    """True if every repeat of the fastest trial was faster than every repeat of the second fastest; None if
    there are no repeats."""

    def __str__(self) -> str:
        gain = self.speed / self.second_speed - 1
        text = f"{self.name}: {self.speed:,.0f} {self.unit}, {gain:.1%} more than {self.second}"
        if self.is_clear is None:
            return f"{text}; each trial ran once: use --repeats to measure how much the results vary"
        return text if self.is_clear else f"{text}, a difference within the spread of the repeats"


def end_line(bench: Bench, trial: TrialStatus) -> str:
    """Return a line that describes how a run ended."""
    item = bench.runs[trial.index]
    row = measured(training_curve(bench.run_dir(item)), bench.length.measured)
    which = f"{item.name} (repeat {item.repeat})" if bench.repeats > 1 else item.name
    start = f"{trial.index + 1}/{len(bench.runs)}  {which}:"
    if trial.state != FINISHED or row["step_s"] is None:
        return f"{start} {trial.state}{f': {trial.reason}' if trial.reason else ''}"
    speed = "" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.0f} tokens/s, "
    return f"{start} {speed}{row['step_s']:.4f} s per step"


class SummaryJson(TypedDict):
    """The summary of a bench."""

    folder: str
    summary: str
    """The path of summary.csv."""
    plots: list[str]
    rows: list[dict[str, float | str | None]]
    """The rows of summary.csv, fastest trial first."""
    fastest: Fastest | None
    """The fastest trial; None if fewer than two trials have finished."""


class StartedBenchJson(TypedDict):
    """A bench that was submitted to Slurm."""

    folder: str
    job_id: str
    array: str


class PlannedTrialJson(TypedDict, total=False):
    """A trial that the bench would run."""

    layout: str
    """The name of the layout; absent in `bench settings`."""
    values: dict[str, object]
    notes: list[str]
    """One sentence for each value that was adapted to the layout."""


class PlannedBenchJson(TypedDict, total=False):
    """The trials that a bench would run, printed with `--dry-run`."""

    layouts: list[PlannedTrialJson]
    """The trials of `bench layouts`."""
    points: list[PlannedTrialJson]
    """The trials of `bench settings`."""
    repeats: int
    impossible: dict[str, str]
    """Maps the name of each trial that cannot run to the reason why it cannot run."""
    left_out: list[str]
    """Names of possible layouts that the bench omits because there are too many."""


BenchJson = SummaryJson | StartedBenchJson | PlannedBenchJson


def write_summary(bench: Bench, warn: Callable[[str], None]) -> tuple[list[Row], Fastest | None, int]:
    """Write summary.csv from the measurements made so far.

    Returns the rows, the fastest trial, and the number of runs that have not ended. The fastest trial is None
    if fewer than two trials have finished.
    """
    by_run: dict[str, Row] = {}
    found = look_at_runs(bench, warn)
    for item, trial in zip(bench.runs, found, strict=True):
        by_run[item.run], missing = row_of(bench, item, trial.state, trial.reason or "")
        if missing and trial.state == FINISHED:
            warn(f"{item.name}: exposed_comm_s is unknown: {missing}")
    trials = by_speed([by_run[item.run] for item in runs] for runs in bench.trials)
    rows = [row for row, _ in trials]
    write_atomic(bench.summary_file, csv_text(bench.keys, rows))
    return rows, find_fastest(bench, trials), sum(trial.state not in ENDED for trial in found)


def measured_speeds(bench: Bench) -> dict[int, float | None]:
    """Return each run's tokens per second for `trainkit report`, keyed by the run's index in the group."""
    return {
        index: measured(training_curve(bench.run_dir(item)), bench.length.measured)["tokens_per_s"]
        for index, item in enumerate(bench.runs)
    }


def find_fastest(bench: Bench, trials: Sequence[tuple[Row, Sequence[Row]]]) -> Fastest | None:
    """Compare the fastest trial with the second fastest; return None if fewer than two have finished."""
    finished = [(row, runs) for row, runs in trials if row["status"] == FINISHED and speed(row)]
    if len(finished) < 2:
        return None
    (first, its_runs), (second, other_runs) = finished[:2]
    is_clear = None
    if bench.repeats > 1:
        is_clear = min(speed(row) or 0.0 for row in its_runs) > max(speed(row) or 0.0 for row in other_runs)
    unit = "samples/s" if first["tokens_per_s"] is None else "tokens/s"
    names = [row_name(bench.keys, row) for row in (first, second)]
    return Fastest(names[0], speed(first) or 0.0, unit, names[1], speed(second) or 0.0, is_clear)


def row_name(keys: Sequence[str], row: Row) -> str:
    """Return the name of the trial that a summary row describes."""
    return trial_name({key: row[key] for key in keys})


LAYOUT_COLUMN = {LAYOUT: "layout in the syntax of --layout: degrees above 1 and any other requested keys"}
COLUMNS = {
    "dp_replicate": "degree",
    "dp_shard": "degree",
    "tp": "degree",
    "pp": "degree",
    "cp": "degree",
    "ep": "degree",
    "device_batch_size": "number of samples per process in one accumulation step",
    "pp_microbatches": "number of microbatches per device batch; empty without pipeline parallelism",
    "repeats": "number of repeats that have measured steps",
    "steps": "number of measured steps in all repeats, excluding warm-up and profiled steps",
    "samples_per_s": "total samples per second of all processes; the median over the measured steps of a "
    "run, then over the repeats, as for the other speeds and times per step",
    "tokens_per_s": "total tokens per second of all processes",
    "tokens_per_s_min": "tokens per second of the slowest repeat; empty if there is only one",
    "tokens_per_s_max": "tokens per second of the fastest repeat; empty if there is only one",
    "tokens_per_s_per_gpu": "tokens per second per GPU, or per process on a machine without GPUs",
    "mfu": "model FLOPs utilization from 0 to 1; empty if the device's peak FLOPS are unknown, as on CPUs",
    "step_s": "seconds per optimizer step",
    "step_s_p10": "seconds per step: 10th percentile of the measured steps",
    "step_s_p90": "seconds per step: 90th percentile of the measured steps",
    "data_wait_s": "seconds per step spent waiting for data, averaged over all ranks",
    "mem_gib_peak": "peak GPU memory of rank 0 in GiB or, on a machine without GPUs, its peak resident "
    "memory",
    "exposed_comm_s": "seconds per step of communication that does not overlap with computation, averaged "
    "over up to 4 ranks and the last two steps, which the profiler slows down; empty without a profile",
    "loss": "loss of the last step",
    "status": "state of the run, such as finished or failed; with repeats, also how many runs did not finish",
    "verdict": "root cause of the failure; empty for a finished run",
    "run": "run folders, relative to the bench folder",
}


# Each entry consists of a column, its heading and the format for its values.
_SHOWN = (
    ("device_batch_size", "BATCH", ""),
    ("samples_per_s", "SAMPLES/S", ",.1f"),
    ("tokens_per_s", "TOKENS/S", ",.0f"),
    ("tokens_per_s_min", "MIN", ",.0f"),
    ("tokens_per_s_max", "MAX", ",.0f"),
    ("tokens_per_s_per_gpu", "PER GPU", ",.0f"),
    ("mfu", "MFU", ".1%"),
    ("step_s", "STEP S", ".4f"),
    ("step_s_p90", "P90", ".4f"),
    ("data_wait_s", "DATA S", ".4f"),
    ("exposed_comm_s", "COMM S", ".4f"),
    ("mem_gib_peak", "GIB", ".2f"),
    ("loss", "LOSS", ".4f"),
    ("status", "STATUS", ""),
)
_OPTIONAL = ("tokens_per_s_min", "tokens_per_s_max", "mfu")
"""Columns that the table omits if none of its rows has a value for them."""


def csv_text(keys: Sequence[str], rows: Sequence[Row]) -> str:
    """Return the content of summary.csv, with six significant digits and empty cells for unknown values."""
    names = [*keys, *COLUMNS]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(
        [*(shown_value(row[key]) for key in keys), *(_cell(row[name]) for name in COLUMNS)] for row in rows
    )
    return stream.getvalue()


def _cell(value: object) -> str:
    if value is None:
        return ""
    return format(value, ".6g") if isinstance(value, float) else str(value)


def summary_table(keys: Sequence[str], rows: Sequence[Row], fit: int | None = None) -> str:
    """Return a table with one row per trial, followed by the reasons for failures."""
    swept = [key.rpartition(".")[2] for key in keys]
    columns = [
        item
        for item in _SHOWN
        if item[0] not in swept
        and (item[0] not in _OPTIONAL or any(row[item[0]] is not None for row in rows))
    ]
    heading = [key.upper() for key in short_keys(keys)] + [heading for _, heading, _ in columns]
    values = [
        [*(shown_value(row[key]) for key in keys), *(cell(row[name], spec) for name, _, spec in columns)]
        for row in rows
    ]
    lines = [table([heading, *values], fit=fit, num_keys=len(keys))]
    lines += [f"{row_name(keys, row)}: {' '.join(row['verdict'].split())}" for row in rows if row["verdict"]]
    return "\n".join(lines)


PLOTS = {
    "samples_per_s": "samples per second",
    "tokens_per_s": "tokens per second",
    "mfu": "model FLOPs utilization",
    "mem_gib_peak": "peak memory of rank 0, GiB",
    "data_wait_s": "data wait, seconds per step",
    "exposed_comm_s": "exposed communication, seconds per step",
}
"""Maps each plotted column to its axis label."""
INSTALL_HINT = install_line("plot")


def can_plot() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def write_plots(keys: Sequence[str], rows: Sequence[Row], folder: Path) -> tuple[list[Path], list[str]]:
    """Plot each column of the summary that has values.

    Returns the paths of the plots, and the columns without values. Raises OSError if a plot cannot be
    written.
    """
    ensure_folder(folder)
    written, empty = [], []
    for column, label in PLOTS.items():
        file = folder / f"{column}.png"
        if all(row[column] is None for row in rows):
            file.unlink(missing_ok=True)  # delete a plot from an earlier summary
            empty.append(column)
            continue
        _draw(keys, rows, column, label, file)
        written.append(file)
    return written, empty


def _draw(keys: Sequence[str], rows: Sequence[Row], column: str, label: str, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 1.2 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    bars = list(reversed(rows))  # matplotlib draws the first bar at the bottom
    drawn = axes.barh([row_name(keys, row) for row in bars], [row[column] or 0.0 for row in bars])
    axes.bar_label(drawn, [_mark(row, column) for row in bars], padding=4)
    axes.margins(x=0.15)
    axes.set_xlabel(label)
    figure.savefig(file, dpi=120)


def _mark(row: Row, column: str) -> str:
    number = row[column]
    value = "" if number is None else f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"
    return value if row["status"] == FINISHED else f"{value} {row['status']}".strip()
