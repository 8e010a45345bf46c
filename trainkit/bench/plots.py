"""Plots of a summary: one PNG for each quantity, drawn with matplotlib, which need not be there."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from trainkit.bench.measure import Row

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
