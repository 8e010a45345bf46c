"""Plots curves with matplotlib, sized for one column of a paper."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Literal

from trainkit.cli.output import masked
from trainkit.errors import UsageError
from trainkit.extras import install_line
from trainkit.formats import did_you_mean, short_keys, shown_value
from trainkit.run.files import write_atomic
from trainkit.terminal import cut_in_the_middle

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

AXES = {"step": "step", "tokens": "tokens", "time": "time_s", "gpu_hours": "gpu_hours"}
"""Maps the name of a horizontal axis to the table column with its values."""
SEED = "seed"
"""The config key that distinguishes repetitions of a run. Runs that differ only in their seeds are drawn as
one line."""
Color = str | tuple[float, float, float, float]
WIDTH_IN, HEIGHT_IN, ROW_IN = 3.4, 2.3, 0.15
"""Figure width, height of each metric's chart, and height of a legend row, in inches."""
KINDS = ("pdf", "svg", "png")
LARGEST = 1e300
"""Values above this limit are drawn as non-finite, because sums of such values overflow."""
MAX_LABEL = 44
"""Maximum number of characters of a legend entry."""
BEHIND = 1.9
"""The zorder of artists behind the lines, whose zorder is 2."""
MAX_CROSSES = 20
"""Maximum number of crosses per line; more crosses would merge into a bar."""
MIN_TYPICAL = 5
"""Minimum number of values for detecting outliers."""
FAR, FAR_DECADES = 1000, 10
"""A value is an outlier if its distance from the median exceeds the interquartile range by this factor.

`FAR` applies to linear distances, and `FAR_DECADES` to distances in powers of ten.
"""
LOG_FROM = 50
"""An axis for positive values is logarithmic if the largest value exceeds the smallest by this factor."""
MAX_RANKED = 8
"""Maximum number of different numbers whose colours are evenly spaced."""
LOG_COLORS_FROM = 10
"""The colours of positive numbers are on a logarithmic scale if the largest number is at least this factor
times the smallest."""
MAX_LEGEND = 12
"""Maximum number of entries in a legend. A figure with more lines has a colour bar, or a legend that lists
only the first lines."""
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The Okabe-Ito palette, whose colours can be distinguished with any kind of colour vision."""
DASHES: Sequence[Literal["-", "--", ":", "-."]] = ("-", "--", ":", "-.")
LIGHT_END = 0.7
"""Upper end of the viridis range used on a white background; lighter colours are hard to see, also in
print."""
LABELS = {
    "step": "step",
    "tokens": "tokens",
    "time": "training time",
    "gpu_hours": "GPU-hours",
    "worker_hours": "worker-hours",
    "loss": "training loss",
    "val_loss": "validation loss",
    "lr": "learning rate",
    "tokens_per_s": "tokens per second",
}


@dataclass(frozen=True)
class DrawnRun:
    """A run that is plotted in a figure."""

    name: str
    values: Mapping[str, object] | None
    """Values of the config keys that differ between the runs; None if the run's config cannot be read."""
    points: Mapping[str, Mapping[int, tuple[float, float]]]
    """Maps each metric to its points by step: the position on the horizontal axis, and the value (nan or -inf
    if non-finite)."""
    typed: Mapping[str, object] = field(default_factory=dict)
    """Values of config keys as the user typed them, for example ``1e-3``, for the legend."""


@dataclass(frozen=True)
class Line:
    """One metric of a single run, or its mean over runs that differ only in their seeds."""

    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float] | None = None
    """Sample standard deviation over the runs at each point; None for a single run."""
    diverged_at: float | None = None
    """The position of the first non-finite value after the last finite one; None if the last value is
    finite."""
    diverged_to: float = math.nan
    """The value at `diverged_at`: nan or -inf."""


@dataclass(frozen=True)
class Series:
    """Runs with the same values for all config keys except the seed."""

    values: Mapping[str, object] | None
    runs: tuple[DrawnRun, ...]

    def label(self, keys: Sequence[str]) -> str:
        """Return the key values as text, or the names of the runs if they have none of the keys."""
        values = {**(self.values or {}), **(self.runs[0].typed if self.runs else {})}
        named = [
            f"{short}={shown_value(masked(values[key], key))}"
            for short, key in zip(short_keys(keys), keys, strict=True)
            if key in values
        ]
        text = ", ".join(named) or ", ".join(run.name for run in self.runs)
        return cut_in_the_middle(text, MAX_LABEL)


def labels_of(series: Sequence[Series], keys: Sequence[str]) -> list[str]:
    """Return the label of each series; equal labels are numbered."""
    labels = [one.label(keys) for one in series]
    return [
        f"{label} ({labels[: index + 1].count(label)})" if labels.count(label) > 1 else label
        for index, label in enumerate(labels)
    ]


def _verbatim(text: str) -> str:
    """Escape a text so that matplotlib draws it literally: ``$`` does not begin a formula.

    Characters that the font cannot draw or that SVG does not allow are replaced.
    """
    shown = (char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return "".join(shown).replace("$", r"\$")


def draw(
    runs: Sequence[DrawnRun],
    keys_that_differ: Sequence[str],
    metrics: Sequence[str],
    x: str,
    smooth: float,
    by: str | None,
    *,
    on_gpu: bool,
) -> Figure:
    """Draw each metric in a separate chart; see `Curves.plot` for the arguments."""
    if not 0 <= smooth < 1:
        raise UsageError(f"smooth must be at least 0 and less than 1: {smooth}", hint="a common value is 0.9")
    keys = [key for key in keys_that_differ if key != SEED]
    if by == SEED:
        raise UsageError(
            "runs that differ only in their seeds are drawn as one line",
            hint="choose another key for the colours",
        )
    if by is not None and by not in keys:
        hint = did_you_mean(by, keys) or (f"the runs differ in {', '.join(keys)}" if keys else "leave it out")
        raise UsageError(f"the runs do not differ in {by}", hint=hint)
    try:
        from matplotlib.ticker import EngFormatter

        from trainkit.capabilities.report.figure import TICK_SIZE, CurveAxes, CurveFigure, style
    except ModuleNotFoundError:
        raise UsageError(
            "figures need matplotlib, which is not installed", hint=install_line("plot")
        ) from None
    for metric in metrics:
        if not any(run.points[metric] for run in runs):
            hint = "choose another metric, or use --x step, which works for every run"
            raise UsageError(f"no run has values of {metric} over {x}", hint=hint)
    series = series_of(runs, keys, SEED in keys_that_differ)
    labels = labels_of(series, keys)
    num_columns = _num_columns(labels[:MAX_LEGEND])
    num_rows = -(-min(len(labels), MAX_LEGEND + 1) // num_columns) if len(labels) > 1 else 0
    note = _note(series, smooth)
    size = (WIDTH_IN, HEIGHT_IN * len(metrics) + ROW_IN * (num_rows + (note is not None)))
    with style():
        figure = CurveFigure(figsize=size, layout="constrained")
        grid = figure.subplots(
            len(metrics), 1, squeeze=False, sharex=True, subplot_kw={"axes_class": CurveAxes}
        )
        charts: list[Axes] = [*grid[:, 0]]
        by = by or (keys[0] if keys else None)
        styles = _styles(series, labels, keys, by)
        drawn = [[mean_line(one, metric) for one in series] for metric in metrics]
        unit, scale = "", 1.0
        if x == "time":
            places = (place for lines in drawn for line in lines for place in line.x)
            unit, scale = _time_unit(max(places, default=0.0))
        for axes, metric, lines in zip(charts, metrics, drawn, strict=True):
            # matplotlib creates ticks only when it draws them, and then uses the font size set here.
            axes.tick_params(which="both", labelsize=TICK_SIZE)
            found = _draw_chart(axes, lines, styles, smooth, scale)
            axes.set_ylabel(LABELS.get(metric, _verbatim(metric.replace("_", " "))))
        if x == "tokens":
            charts[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
        charts[-1].set_xlabel(LABELS[x if x != "gpu_hours" or on_gpu else "worker_hours"] + unit)
        _add_legend(figure, found, series, by if len(keys) == 1 else None, num_columns, note)
    return figure


def _note(series: Sequence[Series], smooth: float) -> str | None:
    """Return a note that explains the lines and bands, or None if there is nothing to explain."""
    sizes = sorted({len(one.runs) for one in series})
    counts = f"{sizes[0]}–{sizes[-1]}" if len(sizes) > 1 else str(sizes[0])
    notes = [f"mean and standard deviation over {counts} runs"] if sizes[-1] > 1 else []
    notes += [f"smoothed ({smooth:g})"] if smooth else []
    return ", ".join(notes) or None


def save(figure: Figure, file: Path, *, overwrites: bool = False) -> None:
    """Save a figure in the format given by the file's suffix, without a timestamp.

    Raises FileExistsError if the file exists and `overwrites` is False, OSError if it cannot be written, and
    UsageError if the suffix is not supported.
    """
    content = BytesIO()
    figure.savefig(content, format=figure_kind(file))
    write_output(file, content.getvalue(), overwrites=overwrites)


def write_output(file: Path, content: bytes, *, overwrites: bool) -> None:
    """Write an output file that the user requested. If writing fails, no incomplete file remains.

    Raises FileExistsError if the file exists and `overwrites` is False, and OSError if it cannot be written.
    """
    if overwrites and file.exists():
        mode = file.stat().st_mode & 0o777
        write_atomic(file, content)
        file.chmod(mode)
        return
    with file.open("xb") as stream:
        try:
            stream.write(content)
        except OSError:
            file.unlink()
            raise


def figure_kind(file: Path) -> str:
    """Return the figure format given by the suffix of a file.

    Raises UsageError if the suffix is not supported.
    """
    kind = file.suffix.removeprefix(".").lower()
    if kind not in KINDS:
        what = f".{kind}" if kind else "without a suffix"
        raise UsageError(f"{file}: a figure cannot be {what}", hint="name it .pdf, .svg or .png")
    return kind


def series_of(runs: Sequence[DrawnRun], keys: Sequence[str], has_seeds: bool) -> list[Series]:
    """Group runs that have equal values for all keys.

    Series with numeric key values are sorted by these values.

    Runs are grouped only if they differ in a key or, with `has_seeds`, in their seeds.
    """
    grouped: dict[str, list[DrawnRun]] = {}
    for run in runs:
        if any(run.points.values()):
            is_alone = run.values is None or not (keys or has_seeds)
            same = run.name if is_alone else repr([run.values[key] for key in keys])  # type: ignore[index]
            grouped.setdefault(same, []).append(run)
    found = [Series(own[0].values, tuple(own)) for own in grouped.values()]
    return sorted(found, key=lambda one: [_order((one.values or {}).get(key)) for key in keys])


def _order(value: object) -> tuple[bool, float, str]:
    number = _number(value)
    return number is None, number or 0.0, str(value)


def _number(value: object) -> float | None:
    """Return a value as a float, or None if it is not a finite number, or too large to draw."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= LARGEST else None  # type: ignore[arg-type]


def mean_line(series: Series, metric: str) -> Line:
    """Return the line with the mean and the standard deviation of a metric over the runs in a series.

    A step is included in the mean only if it was logged by every run whose curve extends to that step. The
    mean line ends where the first run diverged, because the mean of the remaining runs would hide the
    divergence.
    """
    points = [run.points[metric] for run in series.runs if run.points[metric]]
    steps = sorted(set().union(*points))
    ends = [math.inf if not math.isfinite(own[max(own)][1]) else max(own) for own in points]
    xs, ys, spread, diverged_at = list[float](), list[float](), list[float](), None
    for step in steps:
        there = [own.get(step) for own, end in zip(points, ends, strict=True) if step <= end]
        own = [point for point in there if point is not None]
        if len(own) < len(there):
            if any(end == math.inf and step > max(one) for one, end in zip(points, ends, strict=True)):
                break
            continue
        values = [y for _, y in own]
        is_finite = all(map(math.isfinite, values))
        xs.append(fmean(x for x, _ in own))
        ys.append(fmean(values) if is_finite else sum(values))
        spread.append(stdev(values) if is_finite and len(values) > 1 else math.nan)
    diverged_to = math.nan
    # Non-finite values are drawn as gaps unless they are at the end of the curve.
    while ys and not math.isfinite(ys[-1]):
        diverged_at, diverged_to = xs.pop(), ys.pop()
        spread.pop()
    return Line(xs, ys, spread if len(points) > 1 else None, diverged_at, diverged_to)


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Return the exponential moving average of values; `weight` is the weight of earlier values.

    The average is bias-corrected, so it does not start near zero. The bias correction follows section 3 of
    https://arxiv.org/abs/1412.6980.
    """
    found, mean, total = list[float](), 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            mean, total = weight * mean + (1 - weight) * value, weight * total + (1 - weight)
        found.append(mean / total if total else value)
    return found


@dataclass(frozen=True)
class Style:
    """Label, colour and dash pattern of a series."""

    label: str
    color: Color
    dash: Literal["-", "--", ":", "-."]


def _styles(
    series: Sequence[Series], labels: Sequence[str], keys: Sequence[str], by: str | None
) -> list[Style]:
    """Return the style of each series: the key `by` determines the colour, the other keys the dash pattern.

    Lines for numbers get viridis colours; lines for other values get colours from the palette.
    """
    names = list(map(_verbatim, labels))
    if by is None or any(one.values is None for one in series):
        return [
            Style(name, COLORS[index % len(COLORS)], DASHES[index // len(COLORS) % len(DASHES)])
            for index, name in enumerate(names)
        ]
    known = [one.values or {} for one in series]
    values = [own.get(by) for own in known]
    others = [repr([own.get(key) for key in keys if key != by]) for own in known]
    order = list(dict.fromkeys(others))
    places = number_places(values)
    if places is None:
        found = list(dict.fromkeys(map(repr, values)))
        colors: list[Color] = [COLORS[found.index(repr(value)) % len(COLORS)] for value in values]
    else:
        colors = list(map(viridis(), places))
    return [
        Style(name, color, DASHES[order.index(other) % len(DASHES)])
        for name, color, other in zip(names, colors, others, strict=True)
    ]


def viridis() -> Colormap:
    """Return the viridis colormap up to `LIGHT_END`."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps["viridis"]([LIGHT_END * place / 255 for place in range(256)]))


def number_places(values: Sequence[object]) -> list[float] | None:
    """Return the position of each number on a colormap, from 0 to 1, or None if a value is not a number.

    Up to `MAX_RANKED` different numbers are evenly spaced. More than `MAX_RANKED` numbers are placed on a
    linear scale or, if `has_log_colors` returns true, on a logarithmic scale.
    """
    found = [number for one in values if (number := _number(one)) is not None]
    if len(found) < len(values):
        return None
    if len(ranked := sorted(set(found))) <= MAX_RANKED:
        found = [float(ranked.index(one)) for one in found]
    elif has_log_colors(found):
        found = [math.log(one) for one in found]
    low, high = min(found), max(found)
    return [0.5 if high == low else (one - low) / (high - low) for one in found]


def has_log_colors(numbers: Sequence[float]) -> bool:
    """Return whether more than `MAX_RANKED` numbers are coloured on a logarithmic scale."""
    return min(numbers) > 0 and max(numbers) / min(numbers) >= LOG_COLORS_FROM


def is_wide(values: Sequence[float]) -> bool:
    """Return whether all values are positive and span a range wide enough for a logarithmic axis."""
    return bool(values) and min(values) > 0 and max(values) / min(values) > LOG_FROM


def typical(values: Iterable[float]) -> list[float]:
    """Return the finite values in ascending order, excluding outliers that would flatten a curve.

    The distance of an outlier from the median is more than `FAR` times the distance of the quartiles, and
    more than `FAR` times the absolute value of the median. If all values have the same sign, distances are
    measured in powers of ten. If all values have the same sign, an outlier is more than `FAR_DECADES` times
    as far from the median as the quartiles, and at least `FAR_DECADES` powers of ten away. Zero is never an
    outlier if distances are measured in powers of ten.
    """
    found = sorted(value for value in values if math.isfinite(value))
    has_one_sign = bool(found) and (found[0] >= 0 or found[-1] <= 0)
    scaled = sorted(math.log10(abs(value)) for value in found if value) if has_one_sign else found
    if len(scaled) < MIN_TYPICAL:
        return found
    last = len(scaled) - 1
    low, middle, high = scaled[last // 4], scaled[last // 2], scaled[-(-3 * last // 4)]
    around = max(high - middle, middle - low, 1.0 if has_one_sign else abs(middle))
    if has_one_sign:
        most = around * FAR_DECADES
        return [value for value in found if not value or abs(math.log10(abs(value)) - middle) <= most]
    return [value for value in found if abs(value - middle) <= around * FAR] if around else found


def band_floor(lowest: float, ends: Iterable[float]) -> float:
    """Return the lower limit for spread bands on a logarithmic axis, where a band cannot reach 0.

    The result is the minimum of `lowest` (the lowest value of the lines) and all lower band `ends` that are
    at least a tenth of `lowest`.
    """
    return min((end for end in ends if lowest / 10 <= end < lowest), default=lowest)


def crosses(points: Iterable[tuple[float, float]], low: float, high: float) -> list[tuple[float, float]]:
    """Return the points at which a line leaves the range from `low` to `high`, which are drawn as crosses.

    Non-finite values are considered outside the range. If there are more than `MAX_CROSSES` points, only the
    first ones and the last one are returned.
    """
    found, was_inside = list[tuple[float, float]](), True
    for place, value in points:
        is_inside = low <= value <= high
        if was_inside and not is_inside:
            found.append((place, value))
        was_inside = is_inside
    return found if len(found) <= MAX_CROSSES else [*found[: MAX_CROSSES - 1], found[-1]]


def _draw_chart(
    axes: Axes, lines: Sequence[Line], styles: Sequence[Style], smooth: float, scale: float
) -> list[Line2D]:
    """Draw the lines of a chart, and return one matplotlib line for each line.

    The band and the crosses of a line have the same label as the line, so that users can find them by this
    label.
    """
    drawn: list[Line2D] = []
    shown = typical(y for line in lines for y in line.y)
    lowest, highest = (shown[0], shown[-1]) if shown else (0.0, 0.0)
    floor = -math.inf
    if is_wide(shown):
        axes.set_yscale("log")
        ends = (y - s for line in lines for y, s in zip(line.y, line.spread or (), strict=False))
        floor = band_floor(lowest, ends)
    for line, style in zip(lines, styles, strict=True):
        xs = [place / scale for place in line.x]
        inside = [y if lowest <= y <= highest else math.nan for y in line.y]
        ys = smoothed(inside, smooth) if smooth else inside
        dots = _dots(inside)
        color, label = style.color, style.label
        marker = "o" if dots else None
        drawn += axes.plot(
            xs, ys, ls=style.dash, marker=marker, markersize=3, markevery=dots, color=color, label=label
        )
        if smooth:
            axes.plot(xs, inside, alpha=0.25, linewidth=0.6, zorder=BEHIND, color=color, label=label)
        if line.spread is not None:
            pairs = list(zip(ys, line.spread, strict=True))
            low, high = [max(y - s, floor) for y, s in pairs], [y + s for y, s in pairs]
            axes.fill_between(xs, low, high, color=color, label=label, alpha=0.2, linewidth=0)
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top)
    for line, style in zip(lines, styles, strict=True):
        points = [*zip(line.x, line.y, strict=True)]
        if line.diverged_at is not None:
            points.append((line.diverged_at, line.diverged_to))
        for place, value in crosses(points, lowest, highest):
            edge = bottom if value < lowest else top
            color, label = style.color, style.label
            axes.plot([place / scale], [edge], "x", color=color, label=label, clip_on=False, markersize=5)
    return drawn


def _dots(values: Sequence[float]) -> list[int]:
    """Return the indices of points to draw as dots: both points of a two-point line, and points between gaps.

    A point between two gaps would be invisible without a dot, because matplotlib draws only lines between
    points.
    """
    if len(values) < 3:
        return list(range(len(values)))
    around = [math.nan, *values, math.nan]
    return [
        index
        for index, (before, _, after) in enumerate(zip(around, values, around[2:], strict=False))
        if math.isnan(before) and math.isnan(after)
    ]


def _time_unit(largest_s: float) -> tuple[str, float]:
    """Return the unit for a time axis: its name, and its length in seconds."""
    for name, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if largest_s >= 2 * size:
            return f" ({name})", size
    return " (s)", 1.0


def _num_columns(labels: Sequence[str]) -> int:
    """Return the number of legend columns; three labels use 3 columns or 1, so that no cell is empty."""
    longest = max(map(len, labels), default=0)
    if len(labels) == 3:
        return 3 if longest <= MAX_LABEL // 3 else 1
    return 2 if longest <= MAX_LABEL // 2 else 1


def _add_legend(
    figure: Figure,
    lines: Sequence[Line2D],
    series: Sequence[Series],
    by: str | None,
    num_columns: int,
    note: str | None,
) -> None:
    """Add a legend of the lines below the charts, with the note as its title.

    If the lines cover many numeric values of the key `by`, a colour bar replaces the entries of the legend.
    """
    from matplotlib.lines import Line2D

    handles = list(lines) if len(lines) > 1 else []
    numbers = [] if by is None else [_number((one.values or {}).get(by)) for one in series]
    known = [number for number in numbers if number is not None]
    if len(series) > MAX_LEGEND and by is not None and len(known) == len(series):
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import LogNorm, Normalize

        norm = (LogNorm if has_log_colors(known) else Normalize)(min(known), max(known))
        figure.colorbar(ScalarMappable(norm, viridis()), ax=figure.axes, label=_verbatim(by))
        handles = []
    if num_more := len(handles[MAX_LEGEND:]):
        handles[MAX_LEGEND:] = [Line2D([], [], alpha=0, label=f"and {num_more} more")]
    if handles or note is not None:
        figure.legend(
            handles=handles,
            title=note,
            loc="outside lower center",
            ncols=num_columns,
            frameon=False,
            handlelength=1.6,
        )
