"""Events, failures and durations as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainkit.run.failure import RankFailure


def event_line(event: Mapping[str, Any]) -> str:
    """One event as one line: ``12:00:01  attempt 1  checkpoint_commit  step=100``."""
    clock = str(event.get("time") or "")[11:19]
    parts = [clock, f"attempt {event.get('attempt')}", event_content(event)]
    return "  ".join(part for part in parts if part)


def event_content(event: Mapping[str, Any]) -> str:
    """The name and the values of an event: ``checkpoint_commit  step=100``."""
    fields = [
        f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in event.items()
        if key not in ("time", "attempt", "event", "reason", "failed_at")
        and value is not None
        and value is not False
        and not isinstance(value, dict)
    ]
    parts = [str(event.get("event")), " ".join(fields)]
    if event.get("reason"):
        parts.append(f"({event['reason']})")
    return "  ".join(part for part in parts if part)


def failure_line(first: RankFailure) -> str:
    """The first failure as one line: rank, host, step and cause."""
    if first.type == "HostLost":
        return f"host {first.host} failed first: {first.message}"
    subject = "the job" if first.rank is None else f"rank {first.rank}"
    where = f" on {first.host}" if first.host else ""
    when = "" if first.step is None else f" at step {first.step}"
    cause = first.message if first.type == "exit" else f"{first.type}: {first.message}"
    return f"{subject} failed first{where}{when}: {cause}"


def duration(seconds: float | None) -> str:
    """A duration in at most two units: ``42s``, ``3m10s``, ``5h02m``, ``2d03h``; ``-`` for None."""
    if seconds is None:
        return "-"
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02d}h"


def slowdown_line(event: Mapping[str, Any]) -> str:
    """Say which rank is slow since when, of an event ``slow_rank`` or ``slow_run``."""
    is_rank = event.get("rank") is not None
    who = f"rank {event.get('rank')} on {event.get('host')}" if is_rank else "the run"
    own, usual = (f"{1e3 * float(event.get(key) or 0.0):,.0f} ms" for key in ("own_s", "usual_s"))
    than = f"the other ranks {usual}" if is_rank else f"{usual} before"
    return f"{who} is slow since step {event.get('since_step')} ({event.get('phase')}): {own} a step, {than}"


def failed_saves_line(failed: Sequence[Mapping[str, Any]]) -> str:
    """Say since when no checkpoint could be saved, of the events ``checkpoint_failed`` since then."""
    since, error = failed[0].get("step"), failed[-1].get("error")
    return f"no checkpoint could be saved since step {since} ({len(failed)} saves in a row failed): {error}"
