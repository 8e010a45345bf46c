"""Runs, groups and the runs of a group as lines of a given width, for the lists of `trainkit watch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from trainkit.observe.group import GroupStatus, most_relevant
from trainkit.observe.status import RunStatus
from trainkit.observe.status_text import relative_path, state_counts
from trainkit.observe.text import duration
from trainkit.observe.view_text import DIM, number, state_style
from trainkit.plan.sweep import short_keys

MAX_POINTS = 200
STATE = 11
RUN_COLUMNS = (("step", 15), ("loss", 7), ("tokens/s", 10), ("age", 6))
MIN_NAME = 20


@dataclass(frozen=True)
class Row:
    """A line of a list."""

    run_dir: str
    is_group: bool
    text: Text


@dataclass(frozen=True)
class Listing:
    """A list with its title and heading."""

    title: str
    heading: Text
    rows: list[Row]


def runs_listing(
    statuses: Sequence[RunStatus | GroupStatus], num_hidden: int, width: int, cwd: Path
) -> Listing:
    """Active runs and groups first, then the others."""
    ordered = sorted(statuses, key=lambda status: not status.is_active)
    num_active = sum(status.is_active for status in statuses)
    hidden = f", {num_hidden:,} older ones not shown" if num_hidden else ""
    title = f"{num_active} active, {len(statuses) - num_active} ended{hidden}"
    taken = 2 + STATE + sum(width + 2 for _, width in RUN_COLUMNS)
    name = max(MIN_NAME, width - taken)
    heading = ["run".ljust(name), "state".ljust(STATE), *(head.rjust(size) for head, size in RUN_COLUMNS)]
    rows = [
        Row(status.run_dir, isinstance(status, GroupStatus), _run_line(status, name, cwd))
        for status in ordered
    ]
    return Listing(title, Text("  ".join(heading), DIM), rows)


def _run_line(status: RunStatus | GroupStatus, name: int, cwd: Path) -> Text:
    place = _end_of(relative_path(status.run_dir, cwd), name)
    if isinstance(status, GroupStatus):
        counts = state_counts(status.states)
        worst = next(iter(status.states), "unknown")
        best = status.best and status.best.best
        shown = f"; best {number(best.value)}" if best else ""
        return Text.assemble(
            place,
            "  ",
            (f"{len(status.points):,} runs".ljust(STATE), state_style(worst)),
            f"  {counts}{shown}",
        )
    step = "-" if status.step is None else f"{status.step:,}"
    if status.total_steps is not None and status.step is not None:
        step += f"/{status.total_steps:,}"
    speed = "-" if status.tokens_per_s is None else f"{status.tokens_per_s:,.0f}"
    cells = (step, number(status.loss), speed, duration(status.age_s))
    texts = [cell.rjust(size) for cell, (_, size) in zip(cells, RUN_COLUMNS, strict=True)]
    return Text.assemble(
        place, "  ", (status.state.ljust(STATE), state_style(status.state)), "  ", "  ".join(texts)
    )


def group_listing(status: GroupStatus, width: int) -> Listing:
    """The runs of a group, failures first."""
    points = most_relevant(status.points, MAX_POINTS)
    hidden = len(status.points) - len(points)
    more = f", {hidden:,} not shown" if hidden else ""
    title = f"{status.name}: {len(status.points):,} runs: {state_counts(status.states)}{more}"
    keys = short_keys(status.keys)
    values = {point.index: point.texts(status.keys) for point in points}
    sizes = [
        max([len(key), *(len(values[point.index][column]) for point in points)])
        for column, key in enumerate(keys)
    ]
    heads = [key.ljust(size) for key, size in zip(keys, sizes, strict=True)]
    heading = Text("  ".join(["point", "state".ljust(STATE), *heads, "   best", "reason"]), DIM)
    rows = []
    for point in points:
        cells = [cell.ljust(size) for cell, size in zip(values[point.index], sizes, strict=True)]
        best = number(point.best.value) if point.best else "-"
        state = (point.state.ljust(STATE), state_style(point.state))
        rest = "  ".join([*cells, best.rjust(7), point.problem])
        rows.append(Row(point.run_dir, False, Text.assemble(f"{point.index:>5}  ", state, "  ", rest)))
    return Listing(title, heading, rows)


def _end_of(path: str, width: int) -> str:
    """A path in `width` characters; its end tells runs apart."""
    return path.ljust(width) if len(path) <= width else "…" + path[len(path) - width + 1 :]
