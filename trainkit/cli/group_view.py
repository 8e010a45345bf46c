"""A group of runs on the terminal: counts, the best result, and a table of its points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainkit.observe.group import GroupStatus, PointStatus

SHOWN_POINTS = 20
LONGEST_REASON = 60


def group_row(status: GroupStatus) -> list[str]:
    """The line of a group in the table of all runs."""
    from trainkit.observe.words import duration

    best = status.best
    return [
        status.name,
        states_in_words(status),
        "-",
        f"{_text(status.num_nodes)} x {_text(status.workers_per_node)}",
        "-",
        "-" if best is None else _best(best),
        "-",
        duration(status.age_s),
        status.run_dir,
    ]


def states_in_words(status: GroupStatus) -> str:
    """``3 running, 97 pending``."""
    return ", ".join(f"{count:,} {state}" for state, count in status.states.items())


def group_details(status: GroupStatus, show_all: bool) -> str:
    """A group in detail; unless all are wanted, its most telling points only."""
    from trainkit.observe.group import most_telling
    from trainkit.observe.words import duration, table
    from trainkit.plan.sweep import short_keys

    best = status.best
    lines = {
        "group": status.name,
        "folder": status.run_dir,
        "job": f"{_text(status.job_id)} [{status.array}], submitted {duration(status.age_s)} ago",
        "runs": f"{len(status.points):,}: {states_in_words(status)}",
        "best": "-" if best is None else f"{best}: {_metric(best)} {_best(best)} at step {_step(best)}",
    }
    shown = status.points if show_all else most_telling(status.points, SHOWN_POINTS)
    heading = ["POINT", "STATE", *(key.upper() for key in short_keys(status.keys)), "BEST", "WHY"]
    text = [f"{key:<10}  {value}" for key, value in lines.items()]
    text += ["", table([heading, *(_point_row(point, status.keys) for point in shown)])]
    if len(shown) < len(status.points):
        text.append(f"and {len(status.points) - len(shown):,} more: --all shows them")
    return "\n".join(text)


def _point_row(point: PointStatus, keys: Sequence[str]) -> list[str]:
    from trainkit.plan.sweep import shown_value

    # What runs or has finished has no reason that a reader looks for.
    why = "" if point.state in ("running", "finished") else " ".join((point.reason or "").split())
    cut = why if len(why) <= LONGEST_REASON else why[: LONGEST_REASON - 1] + "…"
    values = (shown_value(point.values[key]) if key in point.values else "-" for key in keys)
    return [str(point.index), point.state, *values, _best(point), cut]


def _best(point: PointStatus) -> str:
    return f"{point.best['value']:.4f}" if point.best else "-"


def _metric(point: PointStatus) -> str:
    return str((point.best or {}).get("metric"))


def _step(point: PointStatus) -> str:
    return _text((point.best or {}).get("step"))


def _text(value: object) -> str:
    return "-" if value is None else str(value)
