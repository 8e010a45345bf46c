"""The status of runs as text for a terminal: the table of all runs, one run, one group of runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import join, quote
from typing import Any

from trainkit.formats import table
from trainkit.observe.group import GroupStatus, PointStatus, most_relevant
from trainkit.observe.restarts import restarts_line
from trainkit.observe.status import RunStatus
from trainkit.observe.text import duration, event_line, failure_line
from trainkit.plan.sweep import short_keys, shown_value

HEADING = ("RUN", "STATE", "ATTEMPT", "WORKERS", "STEP", "LOSS", "TOKENS/S", "AGE")
MAX_ENDED_RUNS = 15
MAX_POINTS = 20
MAX_REASON = 60


def relative_path(path: str, cwd: Path) -> str:
    """A path relative to `cwd` if it is below `cwd`, else unchanged; both are valid as RUN."""
    is_below = Path(path).is_relative_to(cwd) and Path(path) != cwd
    return str(Path(path).relative_to(cwd)) if is_below else path


def runs_table(statuses: Sequence[RunStatus | GroupStatus], cwd: Path) -> str:
    """One line per run or group, identified by folder because names need not be unique."""
    return table([HEADING, *(_row(status, cwd) for status in statuses)])


def _row(status: RunStatus | GroupStatus, cwd: Path) -> tuple[str, ...]:
    place, age = relative_path(status.run_dir, cwd), duration(status.age_s)
    workers = f"{_text(status.num_nodes)} x {_text(status.workers_per_node)}"
    if isinstance(status, GroupStatus):
        best = "-" if status.best is None else _best(status.best)
        return place, state_counts(status.states), "-", workers, "-", best, "-", age
    return (
        *(place, status.state, _text(status.attempt), workers, _steps(status)),
        *(_number(status.loss, ".4f"), _number(status.tokens_per_s, ",.0f"), age),
    )


def state_counts(states: Mapping[str, int]) -> str:
    """``3 running, 97 pending``."""
    return ", ".join(f"{count:,} {state}" for state, count in states.items())


def _tracker(position: Mapping[str, Any]) -> str:
    """``up to step 40: PLACE``, or the problem that keeps it there."""
    end = position.get("problem") or position.get("place") or "not sent yet"
    return f"up to step {_text(position.get('step'))}: {end}"


def run_details(status: RunStatus) -> str:
    """One run in detail, one value per line."""
    reason = f" - {status.reason}" if status.reason else ""
    lines = {
        "run": status.name,
        "folder": status.run_dir,
        "command": "" if status.command is None else join(status.command),
        "state": f"{status.state}{reason}",
        "attempt": f"{_text(status.attempt)} as {_text(status.job_id)}, started {duration(status.age_s)} ago",
        "workers": f"{_text(status.num_nodes)} x {_text(status.workers_per_node)} on {_text(status.device)}",
    }
    if status.command is None or status.step is not None:
        first = f" (first: {status.first_val_loss:.4f})" if status.first_val_loss is not None else ""
        lines |= {
            "step": f"{_steps(status)}, last metrics {duration(status.metrics_age_s)} ago",
            "loss": _number(status.loss, ".4f"),
            "val loss": _number(status.val_loss, ".4f") + first,
            "tokens/s": _number(status.tokens_per_s, ",.0f"),
        }
    if status.command is None or status.checkpoint is not None:
        lines["checkpoint"] = _text(status.checkpoint)
    is_failed = status.state in ("failed", "died")
    lines |= {name: _tracker(position) for name, position in status.trackers.items()}
    lines |= {
        "last event": event_line(status.last_event) if status.last_event else "-",
        "restarts": restarts_line(status.restarts) if status.restarts else "",
        "failure": failure_line(status.verdict) if status.verdict else "",
        "hint": (status.verdict and status.verdict.hint) or "",
        "diagnosis": f"`trainkit diagnose {quote(status.run_dir)}` names the cause" if is_failed else "",
    }
    text = [f"{key:<10}  {value}" for key, value in lines.items() if value]
    text += [f"warning: {warning}" for warning in status.warnings]
    if status.batch_log:
        text += ["", "last lines of the batch script:", *(f"  {line}" for line in status.batch_log)]
    return "\n".join(text)


def group_details(status: GroupStatus, show_all: bool) -> str:
    """A group in detail, with all of its runs or the `MAX_POINTS` most relevant ones."""
    best = status.best
    lines = {
        "group": status.name,
        "folder": status.run_dir,
        "job": f"{_text(status.job_id)} [{status.array}], submitted {duration(status.age_s)} ago",
        "runs": f"{len(status.points):,}: {state_counts(status.states)}",
        "best": "-" if best is None else f"{best}: {_metric(best)} {_best(best)} at step {_step(best)}",
    }
    text = [f"{key:<10}  {value}" for key, value in lines.items()]
    return "\n".join([*text, "", points_table(status.points, status.keys, status.run_dir, show_all)])


def points_table(points: Sequence[PointStatus], keys: Sequence[str], folder: str, show_all: bool) -> str:
    """The runs of a group or bench in `folder`: all, or the `MAX_POINTS` most relevant ones."""
    shown = points if show_all else most_relevant(points, MAX_POINTS)
    heading = ["POINT", "STATE", *(key.upper() for key in short_keys(keys)), "BEST", "REASON"]
    text = table([heading, *(_point_row(point, keys, folder) for point in shown)])
    rest = len(points) - len(shown)
    return f"{text}\n{not_shown(rest)}" if rest else text


def not_shown(count: int) -> str:
    """The last line of a truncated list."""
    return f"{count:,} more not shown; --all shows them"


def _point_row(point: PointStatus, keys: Sequence[str], folder: str) -> list[str]:
    # The reason of a running or finished run is of no interest.
    reason = "" if point.state in ("running", "finished") else " ".join((point.reason or "").split())
    short = reason if len(reason) <= MAX_REASON else reason[: MAX_REASON - 1] + "…"
    values = (shown_value(point.values[key]) if key in point.values else "-" for key in keys)
    name = os.path.relpath(point.run_dir, folder)
    return [name, point.state, *values, _best(point), short]


def _steps(status: RunStatus) -> str:
    """``12/200``, or ``12`` when the total is unknown, as for a COMMAND."""
    if status.total_steps is None:
        return _text(status.step)
    return f"{_text(status.step)}/{status.total_steps}"


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _number(value: float | None, spec: str) -> str:
    return format(value, spec) if isinstance(value, (int, float)) else "-"


def _best(point: PointStatus) -> str:
    return f"{point.best['value']:.4f}" if point.best else "-"


def _metric(point: PointStatus) -> str:
    return str((point.best or {}).get("metric"))


def _step(point: PointStatus) -> str:
    return _text((point.best or {}).get("step"))
