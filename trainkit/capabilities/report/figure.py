"""Defines the figure that `Curves.plot` returns, whose style also applies to changes that a user makes.

matplotlib reads most settings when an artist is created or when a figure is saved. A user does both outside
the code that draws the curves, so these classes apply `STYLE` again.
"""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.text import Text

from trainkit.capabilities.report.plot import STYLE

UNDATED: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
"""Maps a file format to the metadata that omit the date, so that the same data always produce the same
file."""


class CurveAxes(Axes):
    """A chart whose title and legend have the font sizes of the figure."""

    def set_title(self, *args: Any, **kwargs: Any) -> Text:
        with rc_context(STYLE):
            return super().set_title(*args, **kwargs)

    def legend(self, *args: Any, **kwargs: Any) -> Legend:
        with rc_context(STYLE):
            return super().legend(*args, **_handles(args, kwargs, [self]))


class CurveFigure(Figure):
    """A figure that is saved in its style, with the same result as ``trainkit compare --plot``."""

    def suptitle(self, *args: Any, **kwargs: Any) -> Text:
        with rc_context(STYLE):
            return super().suptitle(*args, **kwargs)

    def legend(self, *args: Any, **kwargs: Any) -> Legend:
        with rc_context(STYLE):
            return super().legend(*args, **_handles(args, kwargs, self.axes))

    def savefig(self, fname: Any, **kwargs: Any) -> None:
        suffix = Path(fname).suffix if isinstance(fname, str | PathLike) else ""
        kind = str(kwargs.get("format") or suffix.removeprefix(".")).lower()
        if kind in UNDATED:
            kwargs["metadata"] = {**UNDATED[kind], **(kwargs.get("metadata") or {})}
        with rc_context(STYLE):
            super().savefig(fname, **kwargs)


def _handles(args: tuple[Any, ...], kwargs: dict[str, Any], charts: Iterable[Axes]) -> dict[str, Any]:
    """Return the arguments of a legend, by default with one entry per label.

    The band and the crosses of a line have the same label as the line, so matplotlib's own default would
    repeat the label.
    """
    if args or "handles" in kwargs:
        return kwargs
    found: dict[str, Line2D] = {}
    for axes in charts:
        for line in axes.lines:
            found.setdefault(str(line.get_label()), line)
    return {**kwargs, "handles": [line for label, line in found.items() if not label.startswith("_")]}
