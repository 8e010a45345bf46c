"""The summary of a bench as text: the lines of summary.csv, and a table to read."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainkit.bench.measure import Row
from trainkit.tables import table

PLOTS = {
    "samples_per_s": "samples a second",
    "tokens_per_s": "tokens a second",
    "mfu": "model FLOPs utilization",
    "mem_gib_peak": "peak memory of rank 0, GiB",
    "data_wait_s": "waiting for data, seconds a step",
    "exposed_comm_s": "exposed communication, seconds a step",
}
"""Column -> what its axis says."""
HOW_TO_GET = "pip install 'trainkit[bench]'"


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def write_plots(rows: Sequence[Row], folder: Path) -> tuple[list[Path], list[str]]:
    """Draw every column of which there is a value; gives the files, and the columns without any value.

    Raises OSError when the folder cannot be written.
    """
    folder.mkdir(exist_ok=True)
    written, empty = [], []
    for column, label in PLOTS.items():
        file = folder / f"{column}.png"
        if all(row[column] is None for row in rows):
            file.unlink(missing_ok=True)  # drawn from what was known before
            empty.append(column)
            continue
        _draw(rows, column, label, file)
        written.append(file)
    return written, empty


def _draw(rows: Sequence[Row], column: str, label: str, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 1.2 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    shown = list(reversed(rows))  # the first stands on top
    bars = axes.barh([row["layout"] for row in shown], [row[column] or 0.0 for row in shown])
    axes.bar_label(bars, labels=[_mark(row, column) for row in shown], padding=3)
    axes.margins(x=0.15)
    axes.set_xlabel(label)
    figure.savefig(file, dpi=120)


def _mark(row: Row, column: str) -> str:
    value = "" if row[column] is None else f"{row[column]:.4g}"
    return value if row["status"] == "finished" else f"{value} {row['status']}".strip()


COLUMNS = {
    "layout": "as --layout takes it: degrees above 1, and what else was asked for",
    "dp_replicate": "degree",
    "dp_shard": "degree",
    "tp": "degree",
    "pp": "degree",
    "cp": "degree",
    "device_batch_size": "samples that a process reads at once",
    "pp_microbatches": "parts that these are cut into; empty without a pipeline",
    "steps": "steps that were measured: without those to warm up and those profiled",
    "samples_per_s": "of all processes; this and what follows is the median over these steps",
    "tokens_per_s": "of all processes",
    "tokens_per_s_per_gpu": "of one process where there are no GPUs",
    "mfu": "model FLOPs utilization, 0 to 1; empty where the peak of the device is not known, as of CPUs",
    "step_s": "seconds of an optimizer step",
    "data_wait_s": "seconds a step that waited for data, the mean over all ranks",
    "mem_gib_peak": "GiB at most, on rank 0 only: of its GPU, else resident memory of the process",
    "exposed_comm_s": "seconds a step that a rank waited for communication, with nothing to compute "
    "meanwhile: the mean over up to 4 ranks, in the last two steps, which the profiler slows; empty where no "
    "profile was written",
    "loss": "of the last step",
    "status": "finished, failed, or what else became of the run",
    "verdict": "what failed first; empty for what finished",
    "run": "its folder in that of the bench",
}


LONGEST_VERDICT = 70
# Column, heading, how its values are written.
_SHOWN = (
    ("layout", "LAYOUT", ""),
    ("device_batch_size", "BATCH", ""),
    ("samples_per_s", "SAMPLES/S", ",.1f"),
    ("tokens_per_s", "TOKENS/S", ",.0f"),
    ("tokens_per_s_per_gpu", "A GPU", ",.0f"),
    ("mfu", "MFU", ".1%"),
    ("step_s", "STEP S", ".4f"),
    ("data_wait_s", "DATA S", ".4f"),
    ("exposed_comm_s", "COMM S", ".4f"),
    ("mem_gib_peak", "GIB", ".2f"),
    ("loss", "LOSS", ".4f"),
    ("status", "STATUS", ""),
)


def csv_text(rows: Sequence[Row]) -> str:
    """The bytes of summary.csv: numbers with six digits, an empty cell for what is not known."""
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
    """One line a layout, and below them why some have no numbers."""
    heading = [heading for _, heading, _ in _SHOWN]
    values = [[_shown(row[name], spec) for name, _, spec in _SHOWN] for row in rows]
    lines = [table([heading, *values])]
    lines += [f"{row['layout']}: {_cut(row['verdict'])}" for row in rows if row["verdict"]]
    return "\n".join(lines)


def _shown(value: Any, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_VERDICT else line[: LONGEST_VERDICT - 1] + "…"
