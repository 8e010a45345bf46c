"""The summary of a bench: summary.csv, a table for the terminal, and plots."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainkit.bench.bench_file import Bench
from trainkit.bench.measure import Row, by_speed, row_of
from trainkit.bench.run_bench import have_ended, run_states
from trainkit.manifest import remove_all
from trainkit.rundir import write_atomic
from trainkit.tables import table


@dataclass(frozen=True)
class Summary:
    """The measurements of a bench so far."""

    rows: list[Row]
    """The runs, sorted by speed."""
    num_open: int
    """Runs that have not ended."""

    @property
    def has_measurements(self) -> bool:
        """Whether any step was measured."""
        return any(row["steps"] for row in self.rows)


def write_summary(bench: Bench, warn: Callable[[str], None]) -> Summary:
    """Write summary.csv from the measurements so far."""
    rows: list[Row] = []
    states = run_states(bench, warn)
    for item, (state, failure) in zip(bench.runs, states, strict=True):
        row, missing = row_of(bench, item, state, failure)
        rows.append(row)
        if missing and state == "finished":
            warn(f"{item.layout}: no exposed_comm_s: {missing}")
        if have_ended([state]):
            remove_all(bench.run_dir(item).checkpoints_dir)  # a bench is never resumed
    rows = by_speed(rows)
    write_atomic(bench.summary_file, csv_text(rows))
    return Summary(rows, sum(not have_ended([state]) for state, _ in states))


PLOTS = {
    "samples_per_s": "samples per second",
    "tokens_per_s": "tokens per second",
    "mfu": "model FLOPs utilization",
    "mem_gib_peak": "peak memory of rank 0, GiB",
    "data_wait_s": "wait for data, seconds per step",
    "exposed_comm_s": "exposed communication, seconds per step",
}
"""Column -> label of its axis."""
INSTALL_HINT = "pip install 'trainkit[bench]'"


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def write_plots(rows: Sequence[Row], folder: Path) -> tuple[list[Path], list[str]]:
    """Plot every column that has values; returns the files, and the columns without values.

    Raises OSError when the folder cannot be written.
    """
    folder.mkdir(exist_ok=True)
    written, empty = [], []
    for column, label in PLOTS.items():
        file = folder / f"{column}.png"
        if all(row[column] is None for row in rows):
            file.unlink(missing_ok=True)  # a plot of an earlier summary
            empty.append(column)
            continue
        _draw(rows, column, label, file)
        written.append(file)
    return written, empty


def _draw(rows: Sequence[Row], column: str, label: str, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 1.2 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    shown = list(reversed(rows))  # the first row on top
    bars = axes.barh([row["layout"] for row in shown], [row[column] or 0.0 for row in shown])
    axes.bar_label(bars, labels=[_mark(row, column) for row in shown], padding=3)
    axes.margins(x=0.15)
    axes.set_xlabel(label)
    figure.savefig(file, dpi=120)


def _mark(row: Row, column: str) -> str:
    value = "" if row[column] is None else f"{row[column]:.4g}"
    return value if row["status"] == "finished" else f"{value} {row['status']}".strip()


COLUMNS = {
    "layout": "as --layout takes it: degrees above 1 and other requested keys",
    "dp_replicate": "degree",
    "dp_shard": "degree",
    "tp": "degree",
    "pp": "degree",
    "cp": "degree",
    "device_batch_size": "samples per process and accumulation step",
    "pp_microbatches": "microbatches per device batch; empty without a pipeline",
    "steps": "number of measured steps, without warm-up and profiled ones",
    "samples_per_s": "of all processes; like the next columns, the median over the measured steps",
    "tokens_per_s": "of all processes",
    "tokens_per_s_per_gpu": "per process on a machine without GPUs",
    "mfu": "model FLOPs utilization, 0 to 1; empty where the peak of the device is unknown, as for CPUs",
    "step_s": "seconds per optimizer step",
    "data_wait_s": "seconds per step spent waiting for data, mean over all ranks",
    "mem_gib_peak": "peak memory in GiB on rank 0: of its GPU, else resident memory of the process",
    "exposed_comm_s": "seconds per step spent waiting for communication without computing: the mean over up "
    "to 4 ranks in the last two steps, which the profiler slows; empty without a profile",
    "loss": "of the last step",
    "status": "finished, failed, or another state of the run",
    "verdict": "the first failure; empty for a finished run",
    "run": "folder of the run in that of the bench",
}


MAX_FAILURE = 70
# Column, heading, format of its values.
_SHOWN = (
    ("layout", "LAYOUT", ""),
    ("device_batch_size", "BATCH", ""),
    ("samples_per_s", "SAMPLES/S", ",.1f"),
    ("tokens_per_s", "TOKENS/S", ",.0f"),
    ("tokens_per_s_per_gpu", "PER GPU", ",.0f"),
    ("mfu", "MFU", ".1%"),
    ("step_s", "STEP S", ".4f"),
    ("data_wait_s", "DATA S", ".4f"),
    ("exposed_comm_s", "COMM S", ".4f"),
    ("mem_gib_peak", "GIB", ".2f"),
    ("loss", "LOSS", ".4f"),
    ("status", "STATUS", ""),
)


def csv_text(rows: Sequence[Row]) -> str:
    """The text of summary.csv: numbers with six digits, empty cells for unknown values."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([_cell(row[name]) for name in COLUMNS] for row in rows)
    return stream.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return format(value, ".6g") if isinstance(value, float) else str(value)


def summary_table(rows: Sequence[Row]) -> str:
    """One line per layout, and below them the failures."""
    heading = [heading for _, heading, _ in _SHOWN]
    values = [[_shown(row[name], spec) for name, _, spec in _SHOWN] for row in rows]
    lines = [table([heading, *values])]
    lines += [f"{row['layout']}: {_cut(row['verdict'])}" for row in rows if row["verdict"]]
    return "\n".join(lines)


def _shown(value: Any, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_FAILURE else line[: MAX_FAILURE - 1] + "…"
