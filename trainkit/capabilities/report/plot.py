"""Draws curves with matplotlib, in the size of a column of a paper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Literal

from trainkit.errors import UsageError
from trainkit.extras import install_line
from trainkit.formats import did_you_mean, shown_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

AXES = {"step": "step", "tokens": "tokens", "time": "time_s", "gpu_hours": "gpu_hours"}
"""Axis that curves can be drawn over -> the column of its values."""
SEED = "seed"
"""The key whose values are repetitions of the same run."""
Columns = Mapping[str, Sequence[Any]]
Color = str | tuple[float, float, float, float]
WIDTH_IN, HEIGHT_IN = 3.4, 2.3
"""The width of one column, and the height of the chart of one metric."""
LOG_FROM = 50
"""An axis of positive values is logarithmic if the largest is more than this multiple of the smallest."""
MAX_LEGEND = 12
"""Of more lines, a colour bar or the first names stand in place of all names."""
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The palette of Okabe and Ito, which people with any colour vision can tell apart."""
DASHES: Sequence[Literal["-", "--", ":", "-."]] = ("-", "--", ":", "-.")
LABELS = {
    "step": "step",
    "tokens": "tokens",
    "time_s": "training time",
    "gpu_hours": "GPU-hours",
    "loss": "training loss",
    "val_loss": "validation loss",
    "lr": "learning rate",
    "tokens_per_s": "tokens per second",
}
STYLE = {
    "font.size": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "legend.title_fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "lines.linewidth": 1.2,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "pdf.fonttype": 42,  # text stays text, as publishers ask
    "svg.fonttype": "none",
    "svg.hashsalt": "trainkit",  # the same data give the same file
}


@dataclass(frozen=True)
class Line:
    """One metric of one run, or the mean of runs that differ in their seeds alone."""

    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float] | None = None
    """The standard deviation over seeds; None for a single run."""
    diverged_at: float | None = None
    """The first place from which on no value is finite."""


@dataclass(frozen=True)
class Series:
    """The runs with the same values of all keys but the seed."""

    values: Mapping[str, object]
    runs: tuple[str, ...]

    def label(self, keys: Sequence[str]) -> str:
        """What tells the series apart; the name of the run where its keys do not."""
        named = [f"{key.rpartition('.')[2]}={shown_value(self.values[key])}" for key in keys]
        return ", ".join(named) or ", ".join(self.runs)


def draw(
    curves: Columns, keys: Sequence[str], metrics: Sequence[str], x: str, smooth: float, by: str | None
) -> Figure:
    """Draw the metrics of a table, each in a chart of its own; see `Curves.plot`."""
    if x not in AXES:
        raise UsageError(f"unknown axis {x}", hint=did_you_mean(x, AXES) or f"axes are {', '.join(AXES)}")
    if not 0 <= smooth < 1:
        raise UsageError(f"smooth must be from 0 to below 1: {smooth}", hint="0.9 is a common value")
    has_seeds, keys = SEED in keys, [key for key in keys if key != SEED]
    if by is not None and by not in keys:
        hint = did_you_mean(by, keys) or (f"they differ in {', '.join(keys)}" if keys else "leave it out")
        raise UsageError(f"the runs do not differ in {by}", hint=hint)
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise UsageError(
            "figures need matplotlib, which is not installed", hint=install_line("plot")
        ) from None
    series = _series(curves, keys, has_seeds)
    column = AXES[x]
    with _style():
        figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN * len(metrics)), layout="constrained")
        charts: list[Axes] = [*figure.subplots(len(metrics), 1, squeeze=False, sharex=True)[:, 0]]
        styles = _styles(series, keys, by or (keys[0] if keys else None))
        for axes, metric in zip(charts, metrics, strict=True):
            lines = [_line(curves, one, column, metric) for one in series]
            if not any(line.x for line in lines):
                raise UsageError(f"no run has {metric} by {x}", hint="`--x step` is there for every run")
            _draw_chart(axes, lines, styles, smooth)
            axes.set_ylabel(LABELS.get(metric, metric.replace("_", " ")))
        unit = _scale_time(charts) if column == "time_s" else ""
        charts[-1].set_xlabel(LABELS[column] + unit)
        _add_legend(figure, charts, series, styles, keys, by)
    return figure


def save(figure: Figure, file: Path) -> None:
    """Write a figure in the format that the suffix of the file names, without the time; a file is kept.

    Raises FileExistsError, and UsageError for a suffix that matplotlib does not know.
    """
    kind = file.suffix.removeprefix(".").lower()
    known = figure.canvas.get_supported_filetypes()
    if kind not in known:
        raise UsageError(
            f"{file}: a figure cannot be {kind or 'without a suffix'}", hint="name it .pdf, .svg or .png"
        )
    stamps = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    with file.open("xb") as stream, _style():
        figure.savefig(stream, format=kind, dpi=300, metadata=stamps.get(kind))


def _style() -> AbstractContextManager[None]:
    from matplotlib import rc_context

    return rc_context(STYLE)  # type: ignore[arg-type]


def _series(curves: Columns, keys: Sequence[str], has_seeds: bool) -> list[Series]:
    """The runs by the values of their keys, in the order of these values where they are numbers."""
    runs: dict[str, tuple[object, ...]] = {}
    columns = [curves[key] for key in keys]
    for index, run in enumerate(curves["run"]):
        if run not in runs:
            runs[run] = tuple(column[index] for column in columns)
    if not keys and not has_seeds:
        return [Series({}, (run,)) for run in runs]
    grouped: dict[str, Series] = {}
    for run, values in runs.items():
        text = repr(values)
        before = grouped[text].runs if text in grouped else ()
        grouped[text] = Series(dict(zip(keys, values, strict=True)), (*before, run))
    return sorted(grouped.values(), key=lambda one: [_order(one.values[key]) for key in keys])


def _order(value: object) -> tuple[bool, float, str]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return not is_number, float(value) if is_number else 0.0, str(value)  # type: ignore[arg-type]


def _line(curves: Columns, series: Series, column: str, metric: str) -> Line:
    """The mean of a series at the steps that all of its runs have, and its spread."""
    by_run: dict[str, dict[int, tuple[float, float]]] = {run: {} for run in series.runs}
    rows = zip(curves["run"], curves["step"], curves[column], curves[metric], strict=True)
    for run, step, x, y in rows:
        if run in by_run and x is not None and y is not None:
            by_run[run][step] = (x, y)
    common = sorted(set.intersection(*(set(points) for points in by_run.values())))
    points = [[by_run[run][step] for run in series.runs] for step in common]
    finite = [all(math.isfinite(y) for _, y in own) for own in points]
    end = len(points)
    while end and not finite[end - 1]:
        end -= 1
    # Within a curve a value that is not finite leaves a gap; at its end it is a divergence.
    xs = [fmean(x for x, _ in own) for own in points[:end]]
    ys = [fmean(y for _, y in own) for own in points[:end]]
    spread = None
    if len(series.runs) > 1:
        spread = [
            stdev([y for _, y in own]) if ok else math.nan
            for own, ok in zip(points[:end], finite, strict=False)
        ]
    diverged_at = fmean(x for x, _ in points[end]) if end < len(points) else None
    return Line(xs, ys, spread, diverged_at)


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """The exponential moving mean of the values, each with `weight` of the past; without a bias to zero.

    See https://arxiv.org/abs/1412.6980, section 3, for the correction of the first values.
    """
    found, mean, total = list[float](), 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            mean, total = weight * mean + (1 - weight) * value, weight * total + (1 - weight)
        found.append(mean / total if total else value)
    return found


@dataclass(frozen=True)
class Style:
    """How a series is drawn."""

    color: Color
    dash: Literal["-", "--", ":", "-."]


def _styles(series: Sequence[Series], keys: Sequence[str], by: str | None) -> list[Style]:
    """Numbers get colours of viridis, names a palette of their own; further keys change the dashes."""
    if by is None:
        return [
            Style(COLORS[index % len(COLORS)], DASHES[index // len(COLORS) % len(DASHES)])
            for index in range(len(series))
        ]
    values = [one.values[by] for one in series]
    others = list(dict.fromkeys(repr([one.values[key] for key in keys if key != by]) for one in series))
    dashes = [
        DASHES[others.index(repr([one.values[key] for key in keys if key != by])) % len(DASHES)]
        for one in series
    ]
    places = number_places(values)
    if places is None:
        names = list(dict.fromkeys(map(repr, values)))
        colors: list[Color] = [COLORS[names.index(repr(value)) % len(COLORS)] for value in values]
    else:
        colors = list(map(viridis(), places))
    return [Style(color, dash) for color, dash in zip(colors, dashes, strict=True)]


def viridis() -> Colormap:
    """The colormap viridis without its end, which is too light on white."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps["viridis"]([0.87 * place / 255 for place in range(256)]))


def number_places(values: Sequence[object]) -> list[float] | None:
    """The places of numbers from 0 to 1, by their logarithm where they span much; None for other values."""
    found = [float(one) for one in values if isinstance(one, int | float) and not isinstance(one, bool)]
    if len(found) < len(values) or not all(map(math.isfinite, found)):
        return None
    if is_wide(found):
        found = [math.log(one) for one in found]
    low, high = min(found), max(found)
    return [0.5 if high == low else (one - low) / (high - low) for one in found]


def is_wide(values: Sequence[float]) -> bool:
    """Whether the values are positive and span so much that a logarithmic axis shows them better."""
    return bool(values) and min(values) > 0 and max(values) / min(values) > LOG_FROM


def _draw_chart(axes: Axes, lines: Sequence[Line], styles: Sequence[Style], smooth: float) -> None:
    finite = [y for line in lines for y in line.y if math.isfinite(y)]
    if is_wide(finite):
        axes.set_yscale("log")
    for line, style in zip(lines, styles, strict=True):
        ys = smoothed(line.y, smooth) if smooth else line.y
        few = "o" if len(line.x) < 3 else None  # a line of one point would be nothing
        if smooth:
            axes.plot(line.x, line.y, color=style.color, alpha=0.25, linewidth=0.6)
        axes.plot(line.x, ys, color=style.color, linestyle=style.dash, marker=few, markersize=3)
        if line.spread is not None:
            pairs = list(zip(ys, line.spread, strict=True))
            low, high = [y - s for y, s in pairs], [y + s for y, s in pairs]
            axes.fill_between(line.x, low, high, color=style.color, alpha=0.2, linewidth=0)
    top = axes.get_ylim()[1]
    axes.set_ylim(top=top)
    for line, style in zip(lines, styles, strict=True):
        if line.diverged_at is not None:
            axes.plot([line.diverged_at], [top], marker="x", color=style.color, clip_on=False, markersize=5)


def _scale_time(charts: Sequence[Axes]) -> str:
    """Show seconds as the unit that fits; returns its name."""
    from matplotlib.ticker import FuncFormatter

    largest = max(axes.get_xlim()[1] for axes in charts)
    unit, seconds = next(
        (name, size)
        for name, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
        if largest >= 2 * size or size == 1
    )
    for axes in charts:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / seconds:g}"))
    return f" ({unit})"


def _add_legend(
    figure: Figure,
    charts: Sequence[Axes],
    series: Sequence[Series],
    styles: Sequence[Style],
    keys: Sequence[str],
    by: str | None,
) -> None:
    """Name the lines below the charts; where they are many and numbers, by a colour bar."""
    from matplotlib.lines import Line2D

    by = by or (keys[0] if keys else None)
    if len(series) > MAX_LEGEND and by is not None and len(keys) == 1:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import LogNorm, Normalize

        values = [one.values[by] for one in series]
        if number_places(values) is not None:
            numbers: list[float] = [float(value) for value in values]  # type: ignore[arg-type]
            norm = (LogNorm if is_wide(numbers) else Normalize)(min(numbers), max(numbers))
            figure.colorbar(ScalarMappable(norm, viridis()), ax=list(charts), label=by)
            return
    handles = [Line2D([], [], color=style.color, ls=style.dash) for style in styles][:MAX_LEGEND]
    labels = [one.label(keys) for one in series][:MAX_LEGEND]
    if len(series) > MAX_LEGEND:
        handles.append(Line2D([], [], alpha=0))
        labels.append(f"and {len(series) - MAX_LEGEND} more")
    sizes = sorted({len(one.runs) for one in series})
    seeds = f"{sizes[0]}–{sizes[-1]}" if len(sizes) > 1 else str(sizes[0])
    title = f"mean and standard deviation of {seeds} seeds" if sizes[-1] > 1 else None
    if len(series) > 1 or title:
        figure.legend(
            handles, labels, title=title, loc="outside lower center", ncols=2, frameon=False, handlelength=1.6
        )
