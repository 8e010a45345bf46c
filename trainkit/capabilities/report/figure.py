"""Defines the figure that `Curves.plot` returns, and applies its style to changes that a user makes.

matplotlib reads most settings when an artist is created or when a figure is saved. Users create artists and
save figures outside the code that draws the curves, so these classes apply `STYLE` again.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from typing import IO

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.text import Text

TICK_SIZE = 7
STYLE = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "figure.titlesize": 8,
    "legend.fontsize": 7,
    "legend.title_fontsize": 7,
    "xtick.labelsize": TICK_SIZE,
    "ytick.labelsize": TICK_SIZE,
    "lines.linewidth": 1.2,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,  # embed TrueType fonts, because many publishers reject Type 3 fonts
    "svg.fonttype": "none",
    "svg.hashsalt": "trainkit",  # With a fixed salt, the same data always produce the same file.
}
UNDATED = {"pdf": "CreationDate", "svg": "Date"}
"""Maps a file format to the metadata key of its date, which is omitted, so that the same data always produce
the same file."""


def style() -> AbstractContextManager[None]:
    """Return a context manager that makes matplotlib use `STYLE`."""
    return rc_context(STYLE)  # type: ignore[arg-type]


class CurveAxes(Axes):
    """Axes whose title and legend use the font sizes of the figure."""

    def set_title(self, *args: object, **kwargs: object) -> Text:
        """Set the title of the chart; see `matplotlib.axes.Axes.set_title`."""
        with style():
            return super().set_title(*args, **kwargs)  # type: ignore[arg-type]

    def legend(self, *args: object, **kwargs: object) -> Legend:
        """Add a legend to the chart; see `matplotlib.axes.Axes.legend`."""
        if not args:
            kwargs.setdefault("handles", _lines_of([self]))
        with style():
            return super().legend(*args, **kwargs)


class CurveFigure(Figure):
    """A figure that `savefig` saves with `STYLE`, exactly as ``trainkit compare --plot`` does."""

    def suptitle(self, *args: object, **kwargs: object) -> Text:
        """Set the title of the figure; see `matplotlib.figure.Figure.suptitle`."""
        with style():
            return super().suptitle(*args, **kwargs)  # type: ignore[arg-type]

    def legend(self, *args: object, **kwargs: object) -> Legend:
        """Add a legend to the figure; see `matplotlib.figure.Figure.legend`."""
        if not args:
            kwargs.setdefault("handles", _lines_of(self.axes))
        with style():
            return super().legend(*args, **kwargs)

    def savefig(self, fname: str | PathLike[str] | IO[bytes], **kwargs: object) -> None:
        """Save the figure without a date; see `matplotlib.figure.Figure.savefig`."""
        suffix = Path(fname).suffix if isinstance(fname, str | PathLike) else ""
        kind = str(kwargs.get("format") or suffix.removeprefix(".")).lower()
        if kind in UNDATED:
            metadata = kwargs.get("metadata")
            kwargs["metadata"] = {UNDATED[kind]: None, **(metadata if isinstance(metadata, dict) else {})}
        with style():
            super().savefig(fname, **kwargs)  # type: ignore[arg-type]


def _lines_of(charts: Iterable[Axes]) -> list[Line2D]:
    """For each label, return the first line that has it; these lines are the default entries of a legend.

    The band and the crosses of a line have the same label as the line, so matplotlib's own default would
    repeat the label.
    """
    found: dict[str, Line2D] = {}
    for axes in charts:
        for line in axes.lines:
            found.setdefault(str(line.get_label()), line)
    return [line for label, line in found.items() if not label.startswith("_")]
