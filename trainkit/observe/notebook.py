"""Runs as HTML in a notebook: small tables in the colours of its page, in which nothing is secret."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence

from trainkit.formats import mask_secrets
from trainkit.observe.logs import clean
from trainkit.terminal import plain

MAX_CELL = 200
"""Characters of a cell."""
MAX_MASKED = 10_000
"""Characters of a text that are searched for secrets, of which `MAX_CELL` are shown."""
MAX_KEYS = 12
"""Columns for the keys in which the runs of a group differ."""
MAX_ROWS = 20
LEFT = ' style="text-align:left"'
"""Notebooks align cells for numbers."""
WIDTH, HEIGHT = 120, 24
"""Pixels of a curve."""
MARGIN = 2


class Markup(str):
    """A cell that is HTML already."""

    __slots__ = ()


Column = tuple[str, Sequence[object]]
"""The heading of a column and its cells, of which None is empty."""


def table(columns: Iterable[Column]) -> str:
    """A table of columns of equal length; one with nothing but None is left out."""
    shown = [(name, cells) for name, cells in columns if any(one is not None for one in cells)]
    head = "".join(f"<th{LEFT}>{_text(name)}</th>" for name, _ in shown)
    names = [name for name, _ in shown]
    rows = (
        "".join(f"<td{LEFT}>{_cell(name, one)}</td>" for name, one in zip(names, row, strict=True))
        for row in zip(*(cells for _, cells in shown), strict=True)
    )
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def details(values: Mapping[str, object]) -> str:
    """A table of names and values, without those that are None."""
    rows = (
        f"<tr><th{LEFT}>{_text(name)}</th><td{LEFT}>{_cell(name, value)}</td></tr>"
        for name, value in values.items()
        if value is not None
    )
    return f"<table>{''.join(rows)}</table>"


def paragraph(text: str) -> str:
    """A line above or below a table."""
    return f"<p>{_text(text)}</p>"


def sparkline(points: Sequence[tuple[float, float]], name: str) -> Markup | None:
    """A curve of finite points, oldest first, as a small picture; None of fewer than two."""
    if len(points) < 2:
        return None
    every = -(-len(points) // WIDTH)
    kept = [*points[:-1:every], points[-1]]
    xs, ys = _scaled([x for x, _ in kept], WIDTH), _scaled([-y for _, y in kept], HEIGHT)
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
    label = f"{_text(name)} from {points[0][1]:.4g} to {points[-1][1]:.4g}"
    return Markup(
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-label="{label}"><title>{label}</title><polyline points="{line}" fill="none"'
        ' stroke="currentColor" stroke-width="1.5" stroke-linejoin="round"/></svg>'
    )


def _scaled(values: Sequence[float], size: int) -> list[float]:
    """Values as pixels within the margins; in the middle if all are the same."""
    low, high = min(values), max(values)
    # Halves, because the difference of the largest numbers is infinite.
    span = high / 2 - low / 2
    if not span:
        return [size / 2] * len(values)
    return [MARGIN + (value / 2 - low / 2) / span * (size - 2 * MARGIN) for value in values]


def shortened(value: object) -> str:
    """A value that a function has returned, as Python shows it; strings are masked before they are cut."""
    try:
        return _SHORT.repr(value)
    except Exception as error:  # of a class of the user's, which must not hide the rest of the table
        return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = MAX_CELL // 2
        self.maxlist = self.maxtuple = self.maxdict = 8

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(mask_secrets(x[:MAX_MASKED]), level)


_SHORT = _Short()


def _cell(name: str, value: object) -> str:
    if isinstance(value, Markup):
        return value
    if value is None:
        return ""
    before = f"{name}: "
    return _text(mask_secrets(before + str(value)[:MAX_MASKED]).removeprefix(before))


def _text(text: str) -> str:
    """A text as HTML, on one line, without what an encoder refuses."""
    import html  # which is slow to load, and commands show no HTML

    line = plain(clean(" ".join(text.split()))).encode("utf-8", "replace").decode()
    return html.escape(line if len(line) <= MAX_CELL else f"{line[: MAX_CELL - 1]}…")
