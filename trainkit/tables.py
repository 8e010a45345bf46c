"""Plain-text tables with aligned columns."""

from __future__ import annotations

from collections.abc import Container, Sequence

GAP = "  "


def table(rows: Sequence[Sequence[str]], right: Container[int] = (), max_width: int | None = None) -> str:
    """Format rows as aligned columns, one line per row; the first row can be a heading.

    Columns whose indices are in `right` are right-aligned. A cell longer than `max_width` characters
    overflows instead of widening its column.
    """
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if max_width is not None:
        widths = [min(width, max_width) for width in widths[:-1]] + widths[-1:]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(GAP.join(cells).rstrip())
    return "\n".join(lines)
