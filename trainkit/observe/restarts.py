"""The restarts of a run, with their causes and the duration of each phase, from its events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from trainkit.observe.text import failure_line
from trainkit.run.failure import RankFailure
from trainkit.run.files import parse_time, read_record

RESTART_EVENTS = (
    *("requeue_decision", "rank_failed", "signal", "checkpoint_commit", "stopped", "started", "first_step"),
)
"""The events that `find_restarts` needs."""


@dataclass(frozen=True)
class Restart:
    """One restart, from the end of an attempt to the next; durations are None where an event is missing."""

    attempt: int
    """The attempt that ended."""
    action: str
    """``restart`` in the allocation, ``requeue`` of the job, ``resubmit`` or ``follow_up`` as another job."""
    cause: str
    """``preempted timeout node_fail crash hang``, ``slow_host`` to continue without one, or ``asked`` for
    `trainkit requeue`."""
    verdict: dict[str, Any] | None
    """The first failure, where there was one."""
    save_s: float | None
    """From the signal to the published checkpoint."""
    end_s: float | None
    """From the published checkpoint, else from the signal or failure, to the end of the attempt."""
    queue_s: float | None
    """From the end of the attempt to the start of the next one."""
    start_s: float | None
    """From the start of the next attempt to its first step."""
    total_s: float | None
    """From the signal or failure to that first step."""


def find_restarts(events: Iterable[Mapping[str, Any]]) -> list[Restart]:
    """The restarts in a run's events, oldest first."""
    by_attempt: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        if isinstance(event.get("attempt"), int):
            by_attempt.setdefault(event["attempt"], []).append(event)
    found = []
    for attempt, own in sorted(by_attempt.items()):
        # The last decision counts: an earlier one may have turned out to be impossible.
        decision = _first(list(reversed(own)), "requeue_decision")
        if decision is not None and decision.get("action") in ("restart", "requeue", "resubmit", "follow_up"):
            found.append(_restart(attempt, decision, own, by_attempt.get(attempt + 1, [])))
    return found


def _restart(
    attempt: int,
    decision: Mapping[str, Any],
    own: Sequence[Mapping[str, Any]],
    following: Sequence[Mapping[str, Any]],
) -> Restart:
    failure = _first(own, "rank_failed")
    failed = decision.get("cause") in ("crash", "hang", "node_fail")
    began = _time(_first(own, "signal"))
    if failed and failure is not None:
        began = _time({"time": failure.get("failed_at")})
    commits = [event for event in own if event.get("event") == "checkpoint_commit"]
    saved = None if failed or not commits else _time(commits[-1])
    if saved is not None and began is not None and saved < began:
        saved = None  # there was nothing new to save
    stopped = _time(_first(own, "stopped"))
    started, first_step = _time(_first(following, "started")), _time(_first(following, "first_step"))
    return Restart(
        attempt=attempt,
        action=str(decision.get("action")),
        cause=str(decision.get("cause")),
        verdict=None if failure is None else dict(failure),
        save_s=_between(began, saved),
        end_s=_between(saved or began, stopped),
        queue_s=_between(stopped, started),
        start_s=_between(started, first_step),
        total_s=_between(began, first_step),
    )


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
    failure = f"; {failure_line(read_record(RankFailure, last.verdict))}" if last.verdict is not None else ""
    return f"{len(restarts)} ({causes}); last: {last.action}{took}{split}{failure}"


def _first(events: Iterable[Mapping[str, Any]], name: str) -> Mapping[str, Any] | None:
    return next((event for event in events if event.get("event") == name), None)


def _time(event: Mapping[str, Any] | None) -> datetime | None:
    return parse_time((event or {}).get("time"))


def _between(begin: datetime | None, end: datetime | None) -> float | None:
    return None if begin is None or end is None else round((end - begin).total_seconds(), 3)
