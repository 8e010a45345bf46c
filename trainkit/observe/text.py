"""Events, failures and durations as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.run.events import Event
from trainkit.run.failure import RankFailure


def event_line(event: Event) -> str:
    """One event as one line: ``12:00:01  attempt 1  checkpoint_commit  step=100``."""
    clock = (event.time or "")[11:19]
    parts = [clock, f"attempt {event.attempt}", event_content(event)]
    return "  ".join(part for part in parts if part)


def event_content(event: Event) -> str:
    """The name and the values of an event: ``checkpoint_commit  step=100``."""
    fields = [
        f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in event.values.items()
        if key not in ("time", "attempt", "event", "reason", "failed_at")
        and value is not None
        and value is not False
        and not isinstance(value, dict)
    ]
    parts = [event.name, " ".join(fields)]
    if event.reason:
        parts.append(f"({event.reason})")
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


def slowdown_line(event: Event) -> str:
    """Say which rank is slow since when, of an event ``slow_rank`` or ``slow_run``."""
    is_rank = event.rank is not None
    who = f"rank {event.rank} on {event.host}" if is_rank else "the run"
    own, usual = (f"{1e3 * (event.number(key) or 0.0):,.0f} ms" for key in ("own_s", "usual_s"))
    than = f"the other ranks {usual}" if is_rank else f"{usual} before"
    phase, since = event.text("phase"), event.count("since_step")
    return f"{who} is slow since step {since} ({phase}): {own} a step, {than}"


def failed_saves_line(failed: Sequence[Event]) -> str:
    """Say since when no checkpoint could be saved, of the events ``checkpoint_failed`` since then."""
    since, error = failed[0].step, failed[-1].text("error")
    return f"no checkpoint could be saved since step {since} ({len(failed)} saves in a row failed): {error}"
