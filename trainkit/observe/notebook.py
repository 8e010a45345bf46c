"""Shows runs in a notebook as small HTML tables in the page's colours, with secrets masked."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence

from trainkit.formats import mask_secrets
from trainkit.observe.logs import clean
from trainkit.terminal import plain

MAX_CELL = 200
"""Maximum number of characters in a cell."""
MAX_MASKED = 10_000
"""Number of leading characters to search for secrets before a text is truncated to `MAX_CELL`."""
MAX_KEYS = 12
"""Maximum number of columns for the config keys that differ between the runs of a group."""
MAX_ROWS = 20
LEFT = ' style="text-align:left"'
"""Left-aligns a cell; by default, notebooks right-align all cells, which suits numbers."""
WIDTH, HEIGHT = 120, 24
"""Width and height of a sparkline in pixels."""
MARGIN = 2


class Markup(str):
    """A table cell whose text is already HTML."""

    __slots__ = ()


Column = tuple[str, Sequence[object]]
"""A table column: its heading and its cells. A cell whose value is None is shown as empty."""


def table(columns: Iterable[Column]) -> str:
    """Return an HTML table with columns of equal length; columns whose cells are all None are omitted."""
    shown = [(name, cells) for name, cells in columns if any(one is not None for one in cells)]
    head = "".join(f"<th{LEFT}>{_text(name)}</th>" for name, _ in shown)
    names = [name for name, _ in shown]
    rows = (
        "".join(f"<td{LEFT}>{_cell(name, one)}</td>" for name, one in zip(names, row, strict=True))
        for row in zip(*(cells for _, cells in shown), strict=True)
    )
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def details(values: Mapping[str, object]) -> str:
    """Return an HTML table of names and values, omitting values that are None."""
    rows = (
        f"<tr><th{LEFT}>{_text(name)}</th><td{LEFT}>{_cell(name, value)}</td></tr>"
        for name, value in values.items()
        if value is not None
    )
    return f"<table>{''.join(rows)}</table>"


def paragraph(text: str) -> str:
    """Return HTML for a line of text above or below an HTML table."""
    return f"<p>{_text(text)}</p>"


def sparkline(points: Sequence[tuple[float, float]], name: str) -> Markup | None:
    """Return a small image of a curve through finite points, oldest first; None for fewer than two points."""
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
    """Scale values to pixels with a margin at both ends; equal values are placed in the middle."""
    low, high = min(values), max(values)
    # Halve the values first, because the difference of two very large numbers would overflow to infinity.
    span = high / 2 - low / 2
    if not span:
        return [size / 2] * len(values)
    return [MARGIN + (value / 2 - low / 2) / span * (size - 2 * MARGIN) for value in values]


def shortened(value: object) -> str:
    """Return a shortened `repr` of a function's return value.

    Secrets in strings are masked before truncation.
    """
    try:
        return _SHORT.repr(value)
    # An exception in a user-defined `__repr__` must not hide the rest of the table.
    except Exception as error:
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
    """Return a text as one line of HTML, without characters that cannot be encoded."""
    import html  # imported here because it is slow to import, and only notebooks need HTML

    line = plain(clean(" ".join(text.split()))).encode("utf-8", "replace").decode()
    return html.escape(line if len(line) <= MAX_CELL else f"{line[: MAX_CELL - 1]}…")
