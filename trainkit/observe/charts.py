"""Line charts as inline SVG, with labels in HTML so that they stay readable at any width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 1000.0, 240.0
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    points: Sequence[Point]
    color: str
    """A CSS class, ``c0`` to ``c3``."""
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
    marks: list[tuple[float, str]]
    """Where attempts began."""


def line_chart(title: str, lines: Sequence[Line], marks: Sequence[tuple[float, str]] = ()) -> Chart | None:
    """A chart of lines over steps; None when there is nothing to draw."""
    points = [point for line in lines for point in line.points]
    if not points:
        return None
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    right = right if right > left else left + 1
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


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from at most `low` to at least `high`."""
    raw = (high - low) / count
    base = 10.0 ** math.floor(math.log10(raw))
    step = next((base * factor for factor in (1, 2, 5, 10) if base * factor >= raw), base * 10)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [index * step for index in range(first, last + 1)]


def number(value: float) -> str:
    """A number with at most four digits that matter."""
    if abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
