"""Draws the charts of a report as inline SVG, and prepares the chart data for the JavaScript in the page.

Chart labels are HTML elements, not SVG text, so that they stay readable when the SVG is stretched. The script
`templates/charts.js` zooms the charts and shows values. The script redraws charts by the same rules as this
module, so change each rule in both files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from shlex import join
from statistics import median
from typing import NamedTuple

from trainkit.capabilities.report.plot import (
    COLORS,
    DASHES,
    LARGEST,
    LIGHT_END,
    band_floor,
    crosses,
    is_wide,
    number_places,
    typical,
)
from trainkit.formats import shown_value

WIDTH, HEIGHT = 2000, 500
"""Width and height of each SVG's coordinate system, which the browser stretches to fit the page."""
Point = tuple[float, float]
"""A position on the horizontal axis and a value, which is nan or -inf if it is not finite."""
TINY = 1e-300
"""Values with a magnitude below this limit are drawn as 0."""
MAX_LOG_TICKS = 6
MAX_X_LABELS = 6
EDGE = 0.08
"""Margin on each side of a `dot_chart`, as a fraction of its width, which leaves room for half a label."""
DENSE = 400
"""A line with more points than this is drawn thinner, because its peaks would otherwise merge."""
MAX_LABEL = 14
MAX_CHARTS = 40
TITLES = {
    "loss": "Loss",
    "val_loss": "Validation loss",
    "tokens_per_s": "Tokens per second",
    "samples_per_s": "Samples per second",
    "tokens_per_s_per_gpu": "Tokens per second per rank",
    "mfu": "Model FLOPs utilisation",
    "step_s": "Step (s)",
    "data_wait_s": "Wait for data (s)",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "mem_gib_peak": "Peak memory (GiB)",
}
"""Maps a metric that the trainer logs to its chart title. Metrics logged by the user's code have their names
as titles."""
_PART = re.compile(r"(?:train|training|val|valid|validation|eval|evaluation|test)[_/.](.+)")


class Color(NamedTuple):
    """A colour with one variant for the light theme and one for the dark theme."""

    light: str
    dark: str


PALETTE = [
    Color(light, dark)
    for light, dark in zip(
        COLORS, ("#4BA3DC", "#FF8A45", "#2FC79B", "#E9A3CB", "#F2B632", "#9AD7F7", "#E4E8EE"), strict=True
    )
]
"""Colours for lines whose config values are not numbers. The colours can be distinguished with any kind of
colour vision."""
BEST, OTHER, MEDIAN = PALETTE[1], PALETTE[0], Color("#9AA3AF", "#6B7686")
VIRIDIS = (
    "440154", "482475", "414487", "355F8D", "2A788E", "21918C", "22A884", "44BF70", "7AD151",
    "BDDF26", "FDE725",
)  # fmt: skip
"""The viridis colormap at 0, 0.1, ..., 1."""


def viridis(place: float) -> Color:
    """Return the viridis colour at a position from 0 to 1.

    The lightest colours are left out in the light theme, and the darkest in the dark theme.
    """
    return Color(_viridis(LIGHT_END * place), _viridis(0.25 + 0.75 * place))


def _viridis(place: float) -> str:
    index = min(int(place * 10), 9)
    low, high = ([int(text[i : i + 2], 16) for i in (0, 2, 4)] for text in VIRIDIS[index : index + 2])
    share = place * 10 - index
    return "#" + "".join(f"{round(a + (b - a) * share):02X}" for a, b in zip(low, high, strict=True))


def colors_of(values: Sequence[object]) -> list[Color]:
    """Return a colour for each config value: viridis colours for numbers, `PALETTE` colours for names."""
    places = number_places(list(map(as_number, values)))
    if places is not None:
        return list(map(viridis, places))
    names = list(dict.fromkeys(map(repr, values)))
    return [PALETTE[names.index(repr(value)) % len(PALETTE)] for value in values]


def as_number(value: object) -> float | None:
    """Convert a number, or a numeric string such as ``1e-4``, to a float; return None for other values."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) <= LARGEST else None


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    points: Sequence[Point]
    color: Color
    name: str = ""
    spread: Sequence[float] | None = None
    """The standard deviation at each point, nan where unknown; None if the line has no band."""
    kind: str = ""
    """CSS classes: ``best``, ``median``, ``dot``, and ``d1`` to ``d3`` for dashed lines."""

    @property
    def style(self) -> str:
        """The CSS variables that set the line's colours."""
        return f"--l:{self.color.light};--d:{self.color.dark}"


@dataclass(frozen=True)
class Drawn:
    """A line as drawn: its CSS classes and style, its SVG path, and the SVG path of its band."""

    kind: str
    style: str
    line: str
    band: str = ""


@dataclass(frozen=True)
class Label:
    """A text, and its position on an axis in percent of the axis length."""

    place: float
    text: str
    style: str = ""
    is_low: bool = False
    """True for a cross at the lower edge of the chart, False for one at the upper edge."""


@dataclass(frozen=True)
class Chart:
    """The values that the HTML template needs to render a chart."""

    title: str
    over: str
    """The name of the quantity on the horizontal axis."""
    paths: list[Drawn]
    y_labels: list[Label]
    x_labels: list[Label]
    data: dict[str, object]
    """The chart data for the JavaScript in the page, embedded as JSON."""
    names: list[Drawn] = field(default_factory=list)
    """The legend entries; the `line` of each entry is the name of a line."""
    crosses: list[Label] = field(default_factory=list)
    """Positions of crosses for values that are non-finite or outside the axis range."""
    marks: list[Label] = field(default_factory=list)
    """The steps at which attempts began, as marks on the horizontal axis."""

    @property
    def alt(self) -> str:
        """The alternative text of the chart for screen readers."""
        return f"{self.title} over {self.over}"


class Scale(NamedTuple):
    """An axis, described by the values at its ends and at its ticks."""

    low: float
    high: float
    ticks: list[float]
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return the position of a value on the axis, from 0 to 1."""
        if not self.is_log:
            return (value - self.low) / (self.high - self.low)
        return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))

    def fits(self, value: float) -> bool:
        """Return whether a value is within the range of the axis; False for NaN."""
        return self.low <= value <= self.high

    def labels(self) -> Iterator[tuple[float, str]]:
        """Yield the position and the label of each tick."""
        step = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else self.high - self.low
        largest = max(map(abs, self.ticks), default=0.0)
        for tick in self.ticks:
            text = tick_text(tick, tick, tick) if self.is_log else tick_text(tick, step, largest)
            yield self.place(tick), text


def scale_of(values: Iterable[float]) -> Scale:
    """Return an axis for the given values, logarithmic if they are positive and span a wide range."""
    found = list(values)
    low, high = min(found, default=0.0), max(found, default=1.0)
    if low >= TINY and is_wide(found):
        return _log_scale(low, high)
    if (size := max(abs(low), abs(high))) < TINY:
        low, high = 0.0, 1.0
    elif high - low <= 1e-9 * size:
        low, high = low - 0.1 * size, high + 0.1 * size
    ticks = nice_ticks(low, high, 4)
    return Scale(min(low, ticks[0]), max(high, ticks[-1]), ticks)


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers that cover the range from `low` to `high`."""
    raw = (high - low) / count
    base = 10.0 ** math.floor(math.log10(raw))
    step = next((base * factor for factor in (1, 2, 5, 10) if base * factor >= raw), base * 10)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [index * step for index in range(first, last + 1)]


def _log_scale(low: float, high: float) -> Scale:
    """Return a logarithmic axis whose ends are 1, 2 or 5 times a power of ten.

    If the axis spans many powers of ten, only some of them have ticks.
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    round_ones = [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]
    below = max(tick for tick in round_ones if tick <= low * (1 + 1e-9))
    above = min(tick for tick in round_ones if tick >= high * (1 - 1e-9))
    ticks = [tick for tick in round_ones if below <= tick <= above]
    if len(ticks) > MAX_LOG_TICKS:
        every = math.ceil((last - first) / MAX_LOG_TICKS)
        powers = [10.0**power for power in range(first, last + 1) if power % every == 0]
        ticks = [tick for tick in powers if below <= tick <= above]
    return Scale(min(below, low), max(above, high), ticks, is_log=True)


def tick_text(value: float, step: float, largest: float) -> str:
    """Return the label of a tick, such as ``0.25``, ``20k`` or ``3e-4``.

    The label has enough digits to distinguish the tick from the next tick, which is `step` larger.
    """
    if value == 0:
        return "0"
    step = abs(step)
    if largest >= 1e9 or largest < 1e-3:
        digits = min(12, max(0, math.ceil(math.log10(abs(value) / step) - 1e-9)))
        mantissa, _, power = f"{value:.{digits}e}".partition("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}e{int(power)}"
    unit, name = (1e6, "M") if largest >= 1e6 else (1e3, "k") if largest >= 1e4 else (1.0, "")
    digits = min(12, max(0, -math.floor(math.log10(step / unit) + 1e-9)))
    return f"{value / unit:.{digits}f}{name}"


def line_chart(
    title: str,
    lines: Sequence[Line],
    marks: Sequence[tuple[float, str]] = (),
    over: str = "step",
    has_names: bool = True,
) -> Chart | None:
    """Return a line chart, or None if no line has points."""
    lines = [line for line in lines if line.points]
    if not lines:
        return None
    xs = [x for line in lines for x, _ in line.points]
    left, right = min(xs), max(xs)
    right = right if right > left else left + 1
    values = typical(value for line in lines for _, value in line.points)
    floor = _band_floor(values, lines)
    y = scale_of([*values, *_band_ends(values, lines, floor)])
    ticks = [tick for tick in nice_ticks(left, right, 4) if tick == round(tick)]
    x = Scale(left, right, [tick for tick in ticks if left <= tick <= right])
    named = [line for line in lines if line.name and has_names]
    return Chart(
        title=title,
        over=over,
        paths=[
            Drawn(_kind(line, y), line.style, _path(line.points, x, y), _band(line, x, y, floor))
            for line in lines
        ],
        names=[Drawn(line.kind, line.style, line.name) for line in named] if len(named) > 1 else [],
        y_labels=_y_labels(y) if any(y.fits(value) for line in lines for _, value in line.points) else [],
        x_labels=[Label(100 * place, text) for place, text in x.labels()],
        crosses=[
            Label(100 * x.place(at), _outside(line.name or title, at, value), line.style, value < y.low)
            for line in lines
            for at, value in crosses(line.points, y.low, y.high)
        ],
        marks=[Label(100 * x.place(at), text) for at, text in marks if left <= at <= right],
        data={
            "title": title,
            "over": over,
            "marks": [[at, text] for at, text in marks if left <= at <= right],
            "lines": [_data(line) for line in lines],
        },
    )


def _band_floor(values: Sequence[float], lines: Iterable[Line]) -> float:
    """Return the lower limit for spread bands on a logarithmic axis, or -inf if the axis is linear."""
    if not is_wide(values):
        return -math.inf
    return band_floor(values[0], (value - size for line in lines for value, size in _spread(line)))


def _band_ends(values: Sequence[float], lines: Iterable[Line], floor: float) -> Iterator[float]:
    """Yield the values that the axis must cover, in addition to `values`, so that all spread bands fit."""
    if floor > -math.inf:
        yield floor
        return
    for line in lines:
        for value, size in _spread(line):
            if math.isfinite(size) and values[0] <= value <= values[-1]:
                yield from (value - size, value + size)


def _spread(line: Line) -> Iterator[tuple[float, float]]:
    """Yield each value of a line with its standard deviation."""
    return ((value, size) for (_, value), size in zip(line.points, line.spread or (), strict=False))


def _outside(name: str, at: float, value: float) -> str:
    """Return the tooltip of a cross: where the line leaves the axis range, and the line's value there."""
    return (
        f"{name}: {value:.4g} at {at:,.0f}" if math.isfinite(value) else f"{name}: not finite from {at:,.0f}"
    )


def _y_labels(y: Scale) -> list[Label]:
    return [Label(100 - 100 * place, text) for place, text in y.labels()]


def _kind(line: Line, y: Scale) -> str:
    """Return the CSS classes for a line; a line with a single point is drawn as a dot."""
    is_dot = sum(y.fits(value) for _, value in line.points) == 1
    more = "dot" if is_dot else "dense" if len(line.points) > DENSE else ""
    return f"{line.kind} {more}".strip()


def _pieces(
    points: Iterable[tuple[float, float, float]], y: Scale
) -> Iterator[list[tuple[float, float, float]]]:
    """Yield each sequence of consecutive points whose values are within the axis range."""
    piece: list[tuple[float, float, float]] = []
    for point in points:
        if y.fits(point[1]):
            piece.append(point)
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _path(points: Sequence[Point], x: Scale, y: Scale) -> str:
    """Return the SVG path of a line, with gaps where its values are outside the axis range."""
    pieces = _pieces(((at, value, 0.0) for at, value in points), y)
    return "".join(_drawn([(x.place(at), y.place(value)) for at, value, _ in piece]) for piece in pieces)


def _band(line: Line, x: Scale, y: Scale, floor: float) -> str:
    """Return the SVG path of a line's spread band, cut off below `floor`."""
    if line.spread is None:
        return ""
    text = ""
    points = ((at, value, size) for (at, value), size in zip(line.points, line.spread, strict=True))
    for piece in _pieces(points, y):
        spread = [(x.place(at), value, 0.0 if math.isnan(size) else size) for at, value, size in piece]
        upper = [(at, _within(value + size, y)) for at, value, size in spread]
        lower = [(at, _within(max(value - size, floor), y)) for at, value, size in spread]
        text += f"{_drawn([*upper, *lower[::-1]])}z"
    return text


def _within(value: float, y: Scale) -> float:
    """Return the vertical position of an edge of a spread band, clipped to the axis range."""
    return y.place(min(max(value, y.low), y.high))


def _drawn(places: Sequence[Point]) -> str:
    """Return an SVG path through points whose coordinates are between 0 and 1.

    The path uses relative coordinates, which need fewer characters than absolute ones.
    """
    found = [(round(x * WIDTH), round((1 - y) * HEIGHT)) for x, y in places]
    (left, top), *_ = found
    steps = [
        (x - before_x, y - before_y)
        for (before_x, before_y), (x, y) in pairwise(found)
        if (x, y) != (before_x, before_y)
    ]
    # Remove the space before a minus sign, because the sign also separates two numbers.
    text = " ".join(f"{dx} {dy}" for dx, dy in steps).replace(" -", "-")
    return f"M{left} {top}" + (f"l{text}" if steps else "h0")


def _data(line: Line) -> dict[str, object]:
    """Return a line's data for the JavaScript in the page.

    Each step is written, unrounded, as the difference from the previous step. Values are written with six
    significant digits, or as null if they are non-finite. `low` lists the indices of the values that are
    -inf.
    """
    steps = [x for x, _ in line.points]
    found: dict[str, object] = {
        "name": line.name,
        "style": line.style,
        "x": [_whole(b - a) for a, b in zip([0, *steps], steps, strict=False)],
        "y": [_short(y) for _, y in line.points],
    }
    if lows := [index for index, (_, y) in enumerate(line.points) if y == -math.inf]:
        found["low"] = lows
    return found if line.spread is None else {**found, "spread": list(map(_short, line.spread))}


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return _whole(value if isinstance(value, int) else float(f"{value:.6g}"))


def _whole(value: float) -> float | int:
    """Return a whole number as an int, because it needs fewer characters in JSON than a float."""
    return int(value) if value == int(value) and abs(value) < 2**53 else value


@dataclass(frozen=True)
class Dot:
    """A run's result, plotted at the run's value of a config key."""

    value: object
    result: float | None
    """The result of the run; None if the run diverged."""
    name: str
    is_best: bool = False


def dot_chart(title: str, key: str, dots: Sequence[Dot]) -> Chart | None:
    """Return a chart that plots results against a config key, or None if no run has a result.

    If the config values are numbers, a line connects the medians of the results. The best result is drawn in
    a different colour. A run that has no result, or a result far from all others, is shown as a cross at the
    edge.
    """
    results = [dot.result for dot in dots if dot.result is not None]
    if not results:
        return None
    numbers = [as_number(dot.value) for dot in dots]
    are_numbers = None not in numbers
    places, y = _places([dot.value for dot in dots]), scale_of(typical(results))
    x = Scale(0.0, 1.0, [])
    by_place: dict[float, list[float]] = {place: [] for place in sorted(set(places.values()))}
    lines = []
    # Draw the best dot last, so that no other dot covers it.
    for dot in sorted(dots, key=lambda dot: dot.is_best):
        if dot.result is not None and y.fits(dot.result):
            place = places[shown_value(dot.value)]
            by_place[place].append(dot.result)
            lines.append(Line([(place, dot.result)], BEST if dot.is_best else OTHER, dot.name, kind="big"))
    if len(places) > 1 and are_numbers:
        middle = [(place, median(own)) for place, own in by_place.items() if own]
        lines.insert(0, Line(middle, MEDIAN, kind="median"))
    return Chart(
        title=title,
        over=key,
        paths=[Drawn(_kind(line, y), line.style, _path(line.points, x, y)) for line in lines],
        y_labels=_y_labels(y),
        x_labels=[Label(100 * place, text) for place, text in _value_labels(places)],
        crosses=[
            Label(
                100 * places[shown_value(dot.value)],
                f"{dot.name}: {'diverged' if dot.result is None else f'{dot.result:.4g}'}",
                Line([], OTHER).style,
                dot.result is not None and dot.result < y.low,
            )
            for dot in dots
            if dot.result is None or not y.fits(dot.result)
        ],
        data={
            "title": title,
            "over": key,
            "dots": [
                [round(places[shown_value(dot.value)], 4), shown_value(dot.value), dot.result, dot.name]
                for dot in dots
            ],
        },
    )


def _places(values: Sequence[object]) -> dict[str, float]:
    """Map the text of each value to its position on the axis, from 0 to 1; the positions are evenly spaced.

    Numbers come first, in ascending order, followed by other values.
    """

    def order(value: object) -> tuple[bool, float]:
        number = as_number(value)
        return number is None, number or 0.0

    texts = list(dict.fromkeys(map(shown_value, sorted(values, key=order))))
    length = len(texts) - 1
    return {
        text: EDGE + (1 - 2 * EDGE) * index / length if length else 0.5 for index, text in enumerate(texts)
    }


def _value_labels(places: Mapping[str, float]) -> list[tuple[float, str]]:
    """Return the labels of the horizontal axis, excluding labels that would overlap the previous label."""
    labels: list[tuple[float, str]] = []
    for text, place in places.items():
        if not labels or place - labels[-1][0] >= 1 / MAX_X_LABELS:
            if len(text) > MAX_LABEL:
                number = as_number(text)
                text = f"{text[: MAX_LABEL - 1]}…" if number is None else f"{number:.4g}"
            labels.append((place, text))
    return labels


def metric_order(names: Iterable[str], first: str | None = None) -> list[str]:
    """Sort metrics in the order of their charts on the page.

    The order is: the metric `first`, losses, the user's metrics, speed, learning rate, gradient norm and
    memory.
    """
    own = list(names)
    shown = list(TITLES)

    def order(name: str) -> tuple[int, int]:
        if name == first:
            return -1, 0
        if name in ("loss", "val_loss"):
            return 0, shown.index(name)
        if base_of(name) == "loss":
            return 0, len(shown)
        return (2, shown.index(name)) if name in TITLES else (1, own.index(name))

    return sorted(own, key=order)


def base_of(name: str) -> str:
    """Return a metric's name without its data split: ``loss`` for both ``val_loss`` and ``train/loss``."""
    found = _PART.fullmatch(name)
    return found[1] if found else name


def title_of(name: str, counts_samples: bool) -> str:
    """Return a chart's title; with `counts_samples`, ``tokens_per_s`` counts samples instead of tokens."""
    title = TITLES.get(name, name)
    is_speed = counts_samples and name.startswith("tokens_per_s")
    return title.replace("Tokens", "Samples") if is_speed else title


def run_charts(
    series: Mapping[str, Sequence[Point]],
    marks: Sequence[tuple[float, str]],
    counts_samples: bool = False,
    first: str | None = None,
) -> list[Chart]:
    """Return the charts of a run: one per metric, with both its training and its validation values.

    The chart of the metric `first` comes first.
    """
    together: dict[str, list[str]] = {}
    for name in metric_order(series, first):
        together.setdefault(base_of(name), []).append(name)
    charts = []
    for base, names in together.items():
        lines = [
            Line(series[name], PALETTE[index % len(PALETTE)], name, kind=dash(index // len(PALETTE)))
            for index, name in enumerate(names)
        ]
        title = title_of(base if len(names) > 1 else names[0], counts_samples)
        charts.append(line_chart(title, lines, marks))
    return [chart for chart in charts if chart is not None]


def csv_command(folder: str, metrics: Iterable[str]) -> str:
    """Return the shell command that writes all points of the given metrics as CSV."""
    names = [name for name in dict.fromkeys(metrics) if "," not in name]
    return join(
        ["trainkit", "compare", folder, "--curves", ",".join(metric_order(names)), "--csv", "curves.csv"]
    )


def dash(number: int) -> str:
    """Return the CSS class for a dash pattern; the patterns are ordered as in the matplotlib figures."""
    return f"d{number % len(DASHES)}" if number % len(DASHES) else ""
