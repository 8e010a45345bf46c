"""What the pages of reports share: HTML that requests nothing, and charts as inline SVG.

The labels of charts are HTML, so that they stay readable at any width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from trainkit.folders import shipped_templates
from trainkit.formats import duration, mask_secrets, number, shown_value

REPORT_FILE = "report.html"


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
    return mask_secrets(environment.get_template(template).render(**values))


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


def line_chart(
    title: str,
    lines: Sequence[Line],
    marks: Sequence[tuple[float, str]] = (),
    ends: tuple[float, float] | None = None,
) -> Chart | None:
    """A chart of lines over steps; None when there is nothing to draw.

    The axis goes from the first to the last step, or between these `ends`.
    """
    points = [point for line in lines for point in line.points]
    if not points:
        return None
    left, right = ends or (min(x for x, _ in points), max(x for x, _ in points))
    right = right if right > left else left + 1
    values = [y for _, y in points]
    low, high = min(values), max(values)
    low, high = (low, high) if high > low else (low - abs(low) * 0.1 - 1e-9, high + abs(high) * 0.1 + 1e-9)
    ticks = nice_ticks(low, high, 4)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
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
        y_labels=[((high - tick) / (high - low) * 100, number(tick)) for tick in ticks],
        x_labels=[
            ((tick - left) / (right - left) * 100, f"{tick:,.0f}")
            for tick in nice_ticks(left, right, 4)
            if left <= tick <= right and tick == round(tick)
        ],
        marks=[((x - left) / (right - left) * 100, text) for x, text in marks if left <= x <= right],
    )


MAX_X_LABELS = 6
MAX_LABEL = 14


def dot_chart(
    title: str, key: str, values: Sequence[object], results: Sequence[float], best: int | None = None
) -> Chart | None:
    """A dot for the result of each value of a key, and a line through the medians of numbers.

    The `best` one stands out. None when there is nothing to draw.
    """
    if not results:
        return None
    are_numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    places, texts = _places(values, are_numbers), list(map(shown_value, values))
    dots = [
        Line([(places[text], result)], "c1 dot" if index == best else "c0 dot")
        for index, (text, result) in enumerate(zip(texts, results, strict=True))
    ]
    dots.sort(key=lambda dot: dot.color == "c1 dot")  # on top of the others
    if len(places) > 1 and are_numbers:
        by_place: dict[float, list[float]] = {place: [] for place in places.values()}
        for dot in dots:
            by_place[dot.points[0][0]].append(dot.points[0][1])
        dots.insert(0, Line([(place, median(found)) for place, found in by_place.items()], "thin"))
    chart = line_chart(title, dots, ends=(0, 1))
    return chart and replace(chart, x_labels=_value_labels(places, are_numbers), over=key)


def _places(values: Sequence[Any], are_numbers: bool) -> dict[str, float]:
    """Text of a value -> its place on the axis, 0 to 1, at equal distances; numbers in their order."""
    texts = list(dict.fromkeys(map(shown_value, sorted(values) if are_numbers else values)))
    length = len(texts) - 1
    return {text: 0.02 + 0.96 * index / length if length else 0.5 for index, text in enumerate(texts)}


def _value_labels(places: Mapping[str, float], are_numbers: bool) -> list[tuple[float, str]]:
    """The values as labels, but none that would touch the label before it."""
    labels: list[tuple[float, str]] = []
    for text, place in places.items():
        if not labels or place * 100 - labels[-1][0] >= 100 / MAX_X_LABELS:
            if len(text) > MAX_LABEL:
                text = f"{float(text):.4g}" if are_numbers else f"{text[: MAX_LABEL - 1]}…"
            labels.append((place * 100, text))
    return labels


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from at most `low` to at least `high`."""
    raw = (high - low) / count
    base = 10.0 ** math.floor(math.log10(raw))
    step = next((base * factor for factor in (1, 2, 5, 10) if base * factor >= raw), base * 10)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [index * step for index in range(first, last + 1)]
