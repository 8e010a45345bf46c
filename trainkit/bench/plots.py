"""Plots of a bench, a PNG per column of its summary: lines over a numeric key, else bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.bench.measure import FINISHED, Row
from trainkit.bench.summary import row_name
from trainkit.folders import ensure_folder
from trainkit.plan.sweep import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOTS = {
    "samples_per_s": "samples per second",
    "tokens_per_s": "tokens per second",
    "mfu": "model FLOPs utilization",
    "mem_gib_peak": "peak memory of rank 0, GiB",
    "data_wait_s": "wait for data, seconds per step",
    "exposed_comm_s": "exposed communication, seconds per step",
}
"""Column -> label of its axis."""
RANGES = {"tokens_per_s": ("tokens_per_s_min", "tokens_per_s_max")}
"""Column -> the columns with its lowest and highest value over the repeats."""
INSTALL_HINT = "pip install 'trainkit[bench]'"
MAX_LINES = 8
"""With more lines, bars are clearer."""
MIN_VALUES = 3
"""A line over fewer values shows less than bars."""
MAX_TICKS = 12
LOG_RATIO = 20.0
"""Values that differ by more are shown on a logarithmic axis."""


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def write_plots(keys: Sequence[str], rows: Sequence[Row], folder: Path) -> tuple[list[Path], list[str]]:
    """Plot every column that has values; returns the files, and the columns without values.

    Raises OSError when the folder cannot be written.
    """
    ensure_folder(folder)
    written, empty = [], []
    for column, label in PLOTS.items():
        file = folder / f"{column}.png"
        if all(row[column] is None for row in rows):
            file.unlink(missing_ok=True)  # a plot of an earlier summary
            empty.append(column)
            continue
        _draw(keys, rows, column, label, file)
        written.append(file)
    return written, empty


@dataclass(frozen=True)
class Lines:
    """Which key the lines of a plot are over, and the rows of each line, in order."""

    key: str
    rows: dict[str, list[Row]]
    """Name of a line, empty if it is the only one -> its rows."""

    @property
    def is_logarithmic(self) -> bool:
        values = [row[self.key] for rows in self.rows.values() for row in rows]
        return bool(min(values) > 0 and max(values) / min(values) >= LOG_RATIO)


def lines_of(keys: Sequence[str], rows: Sequence[Row]) -> Lines | None:
    """The lines over the numeric key with most values; None where bars are clearer."""
    values = {key: {row[key] for row in rows} for key in keys if all(_is_number(row[key]) for row in rows)}
    if not values:
        return None
    best = max(values, key=lambda key: len(values[key]))
    if len(values[best]) < MIN_VALUES:
        return None
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: float(row[best])):
        lines.setdefault(shown({key: row[key] for key in keys if key != best}), []).append(row)
    return Lines(best, lines) if len(lines) <= MAX_LINES else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _draw(keys: Sequence[str], rows: Sequence[Row], column: str, label: str, file: Path) -> None:
    from matplotlib.figure import Figure

    lines = lines_of(keys, rows)
    height = 1.2 + 0.35 * len(rows) if lines is None else 5.0
    figure = Figure(figsize=(8.0, height), layout="constrained")
    axes = figure.subplots()
    if lines is None:
        _draw_bars(axes, keys, rows, column, label)
    else:
        _draw_lines(axes, lines, column, label)
    figure.savefig(file, dpi=120)


def _draw_bars(axes: Axes, keys: Sequence[str], rows: Sequence[Row], column: str, label: str) -> None:
    shown_rows = list(reversed(rows))  # the first row on top
    names = [row_name(keys, row) for row in shown_rows]
    values = [row[column] or 0.0 for row in shown_rows]
    below, above = _errors(shown_rows, column)
    axes.barh(names, values)
    if any(below) or any(above):
        axes.errorbar(values, names, xerr=(below, above), fmt="none", ecolor="black", capsize=3.0)
    for index, row in enumerate(shown_rows):
        place = (values[index] + above[index], index)
        axes.annotate(_mark(row, column), place, (4, 0), textcoords="offset points", va="center")
    axes.margins(x=0.15)
    axes.set_xlabel(label)


def _draw_lines(axes: Axes, lines: Lines, column: str, label: str) -> None:
    for name, rows in lines.rows.items():
        known = [row for row in rows if row[column] is not None]
        below, above = _errors(known, column)
        axes.errorbar(
            [row[lines.key] for row in known],
            [row[column] for row in known],
            yerr=(below, above),
            marker="o",
            capsize=3.0,
            label=name or None,
        )
        for row in known:
            if row["status"] != FINISHED:
                axes.annotate(row["status"], (row[lines.key], row[column]))
    if lines.is_logarithmic:
        axes.set_xscale("log")
        values = sorted({row[lines.key] for rows in lines.rows.values() for row in rows})
        if len(values) <= MAX_TICKS:
            axes.set_xticks(values, [f"{value:g}" for value in values])
            axes.minorticks_off()
    if len(lines.rows) > 1:
        axes.legend()
    axes.set_xlabel(lines.key)
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _errors(rows: Sequence[Row], column: str) -> tuple[list[float], list[float]]:
    """How far the lowest and the highest repeat are from the median; zeros where there is one repeat."""
    if column not in RANGES:
        return [0.0] * len(rows), [0.0] * len(rows)
    low, high = RANGES[column]
    below = [0.0 if row[low] is None else row[column] - row[low] for row in rows]
    above = [0.0 if row[high] is None else row[high] - row[column] for row in rows]
    return below, above


def _mark(row: Row, column: str) -> str:
    number = row[column]
    value = "" if number is None else f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"
    return value if row["status"] == FINISHED else f"{value} {row['status']}".strip()
