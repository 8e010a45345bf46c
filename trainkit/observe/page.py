"""What the pages of reports share: HTML that requests nothing, and charts as inline SVG.

The labels of charts are HTML, so that they stay readable at any width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from trainkit.config import read_effective
from trainkit.config.names import flatten
from trainkit.errors import TrainkitError
from trainkit.formats import duration, number
from trainkit.plan.sweep import shown_value
from trainkit.resources import shipped_templates
from trainkit.run.rundir import RunDir

REPORT_FILE = "report.html"
FlatConfig = dict[str, Any]
"""Dotted key of a config -> its value as JSON."""


def render_page(template: str, **values: Any) -> str:
    """The page of a template; everything in `values` is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(shipped_templates()),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(duration=duration)
    return environment.get_template(template).render(**values)


def read_config(run: RunDir) -> FlatConfig:
    """The effective config of a run; empty when it cannot be read."""
    try:
        return dict(flatten(read_effective(run.config_file).model_dump(mode="json", by_alias=True)))
    except (OSError, TrainkitError):
        return {}


WIDTH, HEIGHT = 1000.0, 240.0
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    points: Sequence[Point]
    color: str
    """CSS classes: ``c0`` to ``c3``, ``best`` or ``thin``."""
    name: str = ""


@dataclass(frozen=True)
class Chart:
    """A chart for the template; positions of labels are in percent."""

    title: str
    paths: list[tuple[str, str]]
    """CSS class and SVG path of each line."""
    names: list[tuple[str, str]]
    """CSS class and name of each line that has a name."""
    y_labels: list[tuple[float, str]]
    x_labels: list[tuple[float, str]]
    marks: list[tuple[float, str]] = field(default_factory=list)
    """Where attempts began."""
    over: str = "steps"
    """What the horizontal axis is."""


def line_chart(title: str, lines: Sequence[Line], marks: Sequence[tuple[float, str]] = ()) -> Chart | None:
    """A chart of lines over steps; None when there is nothing to draw."""
    points = [point for line in lines for point in line.points]
    if not points:
        return None
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    right = right if right > left else left + 1
    low, high, ticks = _range([y for _, y in points])
    paths = []
    for line in lines:
        shown = [
            f"{(x - left) / (right - left) * WIDTH:.1f} {(high - y) / (high - low) * HEIGHT:.1f}"
            for x, y in line.points
        ]
        if len(shown) == 1:
            shown *= 2  # with round ends, a line of no length is a dot
        if shown:
            paths.append((line.color, "M" + "L".join(shown)))
    return Chart(
        title=title,
        paths=paths,
        names=[(line.color, line.name) for line in lines if line.name and line.points],
        y_labels=_y_labels(low, high, ticks),
        x_labels=[
            ((tick - left) / (right - left) * 100, f"{tick:,.0f}")
            for tick in nice_ticks(left, right, 4)
            if left <= tick <= right and tick == round(tick)
        ],
        marks=[((x - left) / (right - left) * 100, text) for x, text in marks if left <= x <= right],
    )


def _range(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """The lowest and highest value of an axis, and its round numbers."""
    low, high = min(values), max(values)
    low, high = (low, high) if high > low else (low - abs(low) * 0.1 - 1e-9, high + abs(high) * 0.1 + 1e-9)
    ticks = nice_ticks(low, high, 4)
    return min(low, ticks[0]), max(high, ticks[-1]), ticks


def _y_labels(low: float, high: float, ticks: Sequence[float]) -> list[tuple[float, str]]:
    return [((high - tick) / (high - low) * 100, number(tick)) for tick in ticks]


LOG_RATIO = 20.0
"""Positive values that differ by more are shown on a logarithmic axis."""
MAX_X_LABELS = 6
MAX_LABEL = 14


def dot_chart(
    title: str, key: str, values: Sequence[Any], results: Sequence[float], best: int | None = None
) -> Chart | None:
    """A dot for the result of each value of a numeric key, and a line through the medians.

    The `best` one stands out. None when there is nothing to draw.
    """
    if not results:
        return None
    low, high, ticks = _range(results)
    places = _places(values)

    def at(value: Any, result: float) -> str:
        return f"{places[shown_value(value)] * WIDTH:.1f} {(high - result) / (high - low) * HEIGHT:.1f}"

    paths = []
    by_value: dict[str, list[tuple[Any, float]]] = {}
    for value, result in zip(values, results, strict=True):
        by_value.setdefault(shown_value(value), []).append((value, result))
    if len(by_value) > 1:
        groups = sorted(by_value.values(), key=lambda items: float(items[0][0]))
        line = [at(items[0][0], median(result for _, result in items)) for items in groups]
        paths.append(("thin", "M" + "L".join(line)))
    for index, (value, result) in enumerate(zip(values, results, strict=True)):
        place = at(value, result)
        paths.append(("c1 dot" if index == best else "c0 dot", f"M{place}L{place}"))
    paths.sort(key=lambda item: item[0] == "c1 dot")  # on top of the others
    return Chart(title, paths, [], _y_labels(low, high, ticks), _value_labels(places), over=key)


def are_numbers(values: Iterable[Any]) -> bool:
    """Whether all values are numbers, which have an axis."""
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


def _places(values: Sequence[Any]) -> dict[str, float]:
    """Text of a number -> its place on the axis, 0 to 1, from left to right."""
    distinct = sorted({shown_value(value): value for value in values}.values())
    if len(distinct) == 1:
        return {shown_value(distinct[0]): 0.5}
    is_logarithmic = distinct[0] > 0 and distinct[-1] / distinct[0] >= LOG_RATIO
    scale = [math.log(value) if is_logarithmic else value for value in distinct]
    length = scale[-1] - scale[0]
    return {
        shown_value(value): 0.02 + 0.96 * (place - scale[0]) / length
        for value, place in zip(distinct, scale, strict=True)
    }


def _value_labels(places: Mapping[str, float]) -> list[tuple[float, str]]:
    """The values as labels, but none that would touch the label before it."""
    labels: list[tuple[float, str]] = []
    for text, place in places.items():
        if not labels or place * 100 - labels[-1][0] >= 100 / MAX_X_LABELS:
            labels.append((place * 100, text if len(text) <= MAX_LABEL else f"{float(text):.4g}"))
    return labels


@dataclass(frozen=True)
class Strip:
    """A chart with a row of dots for each value of a key; positions are in percent."""

    title: str
    rows: list[tuple[str, list[tuple[float, str]]]]
    """Value, and the position and CSS class of each of its dots."""
    x_labels: list[tuple[float, str]]


def strip_chart(
    title: str, values: Sequence[Any], results: Sequence[float], best: int | None = None
) -> Strip | None:
    """A row for each value of a key, whatever its type, with a dot for each result; None without results."""
    if not results:
        return None
    low, high, ticks = _range(results)
    rows: dict[str, list[tuple[float, str]]] = {}
    for index, (value, result) in enumerate(zip(values, results, strict=True)):
        dot = ((result - low) / (high - low) * 100, "c1" if index == best else "c0")
        rows.setdefault(shown_value(value), []).append(dot)
    for dots in rows.values():
        dots.sort(key=lambda dot: dot[1])  # the best on top of the others
    ends = (ticks[0], ticks[len(ticks) // 2], ticks[-1])  # all would touch each other on a phone
    labels = [((tick - low) / (high - low) * 100, number(tick)) for tick in ends]
    return Strip(title, list(rows.items()), labels)


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from at most `low` to at least `high`."""
    raw = (high - low) / count
    base = 10.0 ** math.floor(math.log10(raw))
    step = next((base * factor for factor in (1, 2, 5, 10) if base * factor >= raw), base * 10)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [index * step for index in range(first, last + 1)]
