"""The status of runs as text for a terminal: the table of all runs, one run, one group of runs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import join, quote

from trainkit.formats import cell, duration, short_keys, table
from trainkit.observe.group import GroupStatus, PointStatus, most_relevant
from trainkit.observe.status import Restart, RunStatus
from trainkit.run.end import Best
from trainkit.run.files import Record

HEADING = ("RUN", "STATE", "ATTEMPT", "WORKERS", "STEP", "LOSS", "TOKENS/S", "AGE")
MAX_ENDED_RUNS = 15
MAX_POINTS = 20
MAX_REASON = 60


def relative_path(path: str, cwd: Path) -> str:
    """A path relative to `cwd` if it is below `cwd`, else unchanged; both are valid as RUN."""
    is_below = Path(path).is_relative_to(cwd) and Path(path) != cwd
    return str(Path(path).relative_to(cwd)) if is_below else path


def runs_rows(statuses: Sequence[RunStatus | GroupStatus], cwd: Path) -> list[Sequence[str]]:
    """A heading, and a row per run or group, which its folder identifies: names need not be unique."""
    return [HEADING, *(_row(status, cwd) for status in statuses)]


def _row(status: RunStatus | GroupStatus, cwd: Path) -> Sequence[str]:
    place, age = relative_path(status.run_dir, cwd), duration(status.age_s)
    workers = f"{cell(status.num_nodes)} x {cell(status.workers_per_node)}"
    if isinstance(status, GroupStatus):
        best = "-" if status.best is None else _best(status.best)
        return place, state_counts(status.states), "-", workers, "-", best, "-", age
    return (
        *(place, status.state, cell(status.attempt), workers, _steps(status)),
        *(cell(status.loss, ".4f"), cell(status.tokens_per_s, ",.0f"), age),
    )


def state_counts(states: Mapping[str, int]) -> str:
    """``3 running, 97 pending``."""
    return ", ".join(f"{count:,} {state}" for state, count in states.items())


def _tracker(position: Record) -> str:
    """``up to step 40: PLACE``, or the problem that keeps it there."""
    end = position.text("problem") or position.text("place") or "not sent yet"
    return f"up to step {cell(position.count('step'))}: {end}"


def run_details(status: RunStatus) -> str:
    """One run in detail, one value per line."""
    reason = f" - {status.reason}" if status.reason else ""
    lines = {
        "run": status.name,
        "folder": status.run_dir,
        "command": join(status.command or ()),
        "state": f"{status.state}{reason}",
        "attempt": f"{cell(status.attempt)} as {cell(status.job_id)}, started {duration(status.age_s)} ago",
        "workers": f"{cell(status.num_nodes)} x {cell(status.workers_per_node)} on {cell(status.device)}",
    }
    if not status.is_command or status.step is not None:
        first = f" (first: {status.first_val_loss:.4f})" if status.first_val_loss is not None else ""
        lines |= {
            "step": f"{_steps(status)}, last metrics {duration(status.metrics_age_s)} ago",
            "loss": cell(status.loss, ".4f"),
            "val loss": cell(status.val_loss, ".4f") + first,
            "tokens/s": cell(status.tokens_per_s, ",.0f"),
        }
    if not status.is_command or status.checkpoint is not None:
        lines["checkpoint"] = cell(status.checkpoint)
    is_failed = status.state in ("failed", "died")
    lines |= {name: _tracker(position) for name, position in status.trackers.items()}
    lines |= {
        "last event": status.last_event.line if status.last_event else "-",
        "restarts": restarts_line(status.restarts) if status.restarts else "",
        "failure": status.verdict.line if status.verdict else "",
        "hint": (status.verdict and status.verdict.hint) or "",
        "diagnosis": f"`trainkit diagnose {quote(status.run_dir)}` names the cause" if is_failed else "",
    }
    text = [details(lines)]
    text += [f"warning: {warning}" for warning in status.warnings]
    if status.batch_log:
        text += ["", "last lines of the batch script:", *(f"  {line}" for line in status.batch_log)]
    return "\n".join(text)


def restarts_line(restarts: Sequence[Restart]) -> str:
    """A one-line summary of all restarts: their number and causes, and the duration of the last one."""
    counts = Counter(restart.cause for restart in restarts)
    shown = {"asked": "requested", "slow_host": "slow host"}
    causes = ", ".join(f"{count} {shown.get(cause, cause)}" for cause, count in counts.most_common())
    last = restarts[-1]
    parts = [
        f"{word} {seconds:.1f}"
        for word, seconds in (
            ("save", last.save_s),
            ("end", last.end_s),
            ("queue", last.queue_s),
            ("start", last.start_s),
        )
        if seconds is not None
    ]
    took = f" in {last.total_s:.1f} s" if last.total_s is not None else ""
    split = f" ({', '.join(parts)})" if parts else ""
    failure = f"; {last.verdict.failure.line}" if last.verdict is not None else ""
    return f"{len(restarts)} ({causes}); last: {last.action}{took}{split}{failure}"


def details(lines: Mapping[str, str]) -> str:
    """One value per line, without those that are empty."""
    return "\n".join(f"{key:<10}  {value}" for key, value in lines.items() if value)


def group_details(status: GroupStatus, show_all: bool) -> str:
    """A group in detail, with all of its runs or the `MAX_POINTS` most relevant ones."""
    best = status.best
    lines = {
        "group": status.name,
        "folder": status.run_dir,
        "job": f"{cell(status.job_id)} [{status.array}], submitted {duration(status.age_s)} ago",
        "runs": f"{len(status.points):,}: {state_counts(status.states)}",
        "best": "-" if best is None else f"{best}: {_result(best)}",
    }
    return f"{details(lines)}\n\n{points_table(status, show_all)}"


def points_table(status: GroupStatus, show_all: bool) -> str:
    """The runs of a group or bench: all, or the `MAX_POINTS` most relevant ones."""
    shown = status.points if show_all else most_relevant(status.points, MAX_POINTS)
    text = table(points_rows(status, shown))
    rest = len(status.points) - len(shown)
    return f"{text}\n{not_shown(rest)}" if rest else text


def points_rows(status: GroupStatus, points: Sequence[PointStatus]) -> list[Sequence[str]]:
    """A heading, and a row per run of a group or bench."""
    keys = [key.upper() for key in short_keys(status.keys)]
    rows: list[Sequence[str]] = [["POINT", "STATE", *keys, "BEST", "REASON"]]
    for point in points:
        short = point.problem if len(point.problem) <= MAX_REASON else point.problem[: MAX_REASON - 1] + "…"
        name = os.path.relpath(point.run_dir, status.run_dir)
        rows.append([name, point.state, *point.texts(status.keys), _best(point), short])
    return rows


def not_shown(count: int) -> str:
    """The last line of a truncated list."""
    return f"{count:,} more not shown; --all shows them"


def _steps(status: RunStatus) -> str:
    """``12/200``, or ``12`` when the total is unknown, as for a COMMAND."""
    if status.total_steps is None:
        return cell(status.step)
    return f"{cell(status.step)}/{status.total_steps}"


def _best(point: PointStatus) -> str:
    return cell(point.best and point.best.value, ".4f")


def _result(point: PointStatus) -> str:
    best = point.best or Best()
    return f"{best.metric} {best.value:.4f} at step {cell(best.step)}"
