"""How a run came back: why, and how long each part of it took, from the events in its folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from trainkit.observe.text import verdict_line
from trainkit.rundir import parse_time


@dataclass(frozen=True)
class Comeback:
    """The way from one attempt to the next; seconds are None where an event is missing."""

    attempt: int
    """The one that ended."""
    action: str
    """``restart`` in the allocation, ``requeue`` of the job, ``resubmit`` or ``follow_up`` as another one."""
    cause: str
    """``preempted timeout node_fail crash hang``, or ``asked`` by a person."""
    verdict: dict[str, Any] | None
    """The first failure, where there was one."""
    save_s: float | None
    """From the signal to the published checkpoint."""
    end_s: float | None
    """From there, or from the signal or failure, to the end of the attempt."""
    queue_s: float | None
    """From there to the start of the next one."""
    start_s: float | None
    """From there to its first step."""
    total_s: float | None
    """From the signal or the failure to that step."""


def find_comebacks(events: Iterable[Mapping[str, Any]]) -> list[Comeback]:
    """The comebacks that a run's events tell of, oldest first."""
    by_attempt: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        if isinstance(event.get("attempt"), int):
            by_attempt.setdefault(event["attempt"], []).append(event)
    found = []
    for attempt, own in sorted(by_attempt.items()):
        # The last one: what was decided first may have turned out to be impossible.
        decision = _first(list(reversed(own)), "requeue_decision")
        if decision is not None and decision.get("action") in ("restart", "requeue", "resubmit", "follow_up"):
            found.append(_comeback(attempt, decision, own, by_attempt.get(attempt + 1, [])))
    return found


def _comeback(
    attempt: int,
    decision: Mapping[str, Any],
    own: Sequence[Mapping[str, Any]],
    following: Sequence[Mapping[str, Any]],
) -> Comeback:
    failure = _first(own, "rank_failed")
    failed = decision.get("cause") in ("crash", "hang", "node_fail")
    told = _time(_first(own, "signal"))
    if failed and failure is not None:
        told = _time({"time": failure.get("failed_at")})
    commits = [event for event in own if event.get("event") == "checkpoint_commit"]
    saved = None if failed or not commits else _time(commits[-1])
    if saved is not None and told is not None and saved < told:
        saved = None  # nothing was new
    stopped = _time(_first(own, "stopped"))
    started, first_step = _time(_first(following, "started")), _time(_first(following, "first_step"))
    return Comeback(
        attempt=attempt,
        action=str(decision.get("action")),
        cause=str(decision.get("cause")),
        verdict=None if failure is None else dict(failure),
        save_s=_between(told, saved),
        end_s=_between(saved or told, stopped),
        queue_s=_between(stopped, started),
        start_s=_between(started, first_step),
        total_s=_between(told, first_step),
    )


def comebacks_line(comebacks: Sequence[Comeback]) -> str:
    """All of them in one line: how many and why, and how long the last one took."""
    counts = Counter(comeback.cause for comeback in comebacks)
    causes = ", ".join(f"{count} {cause}" for cause, count in counts.most_common())
    last = comebacks[-1]
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
    why = f"; {verdict_line(last.verdict)}" if last.verdict is not None else ""
    return f"{len(comebacks)} ({causes}); the last by {last.action}{took}{split}{why}"


def _first(events: Iterable[Mapping[str, Any]], name: str) -> Mapping[str, Any] | None:
    return next((event for event in events if event.get("event") == name), None)


def _time(event: Mapping[str, Any] | None) -> datetime | None:
    return parse_time((event or {}).get("time"))


def _between(begin: datetime | None, end: datetime | None) -> float | None:
    return None if begin is None or end is None else round((end - begin).total_seconds(), 3)
