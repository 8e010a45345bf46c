"""Finds hosts with slow ranks during or after an attempt, so that these hosts can be excluded."""

from __future__ import annotations

import time
from collections.abc import Sequence

from trainkit.capabilities.slow_ranks.policy import slow_ranks_plan
from trainkit.capabilities.slow_ranks.shown import SLOWDOWN_EVENTS
from trainkit.job.attempt_end import previous_ends
from trainkit.job.decision import PlannedStop, restarts_limit
from trainkit.job.processes import log_line
from trainkit.plan.launch import LaunchPlan
from trainkit.run.events import events_of, read_events
from trainkit.run.files import Tail
from trainkit.run.history import OwnedEvents
from trainkit.run.rundir import AttemptDir


def slow_hosts(attempt: AttemptDir, hosts: Sequence[str]) -> set[str]:
    """Return those `hosts` whose ranks were slow when an attempt ended."""
    found, seen = set(), OwnedEvents(read_events(attempt.run, *SLOWDOWN_EVENTS, attempt=attempt.number))
    for event in seen.lasting(attempt.number):
        if event.host is not None and event.host in hosts:
            log_line(
                f"excluding {event.host}: rank {event.rank} was {event.number('ratio')} times slower "
                f"than the other ranks"
            )
            found.add(event.host)
    return found


class SlowHostWatch:
    """Watches an attempt's events for ranks that remain slow."""

    def __init__(self, attempt: AttemptDir, plan: LaunchPlan, hosts: Sequence[str]) -> None:
        """Watch an attempt; `hosts` are the Slurm names of the allocated hosts that have not failed."""
        self._attempt, self._policy, self._hosts = attempt, plan.requeue, hosts
        self._after_s = slow_ranks_plan(plan).slow_after_s
        self._events = Tail(attempt.run.events_file)
        self._events.position = self._events.size()
        self._seen = OwnedEvents()
        self._since_s: dict[int, float] = {}
        """Maps a slow rank to the time at which this watch first detected it."""

    def poll(self) -> PlannedStop | None:
        """Return a planned stop to restart the run without a slow host, or None if no restart is needed.

        Raises OSError if the attempt's events cannot be read.
        """
        for event in events_of(self._events.records(SLOWDOWN_EVENTS)):
            self._seen.add(event)
        slow = [event for event in self._seen.lasting(self._attempt.number) if event.host in self._hosts]
        now_s = time.monotonic()
        self._since_s = {event.rank or 0: self._since_s.get(event.rank or 0, now_s) for event in slow}
        for event in slow:
            if now_s - self._since_s[event.rank or 0] < self._after_s:
                continue
            why = (
                f"rank {event.rank} has been slow since step {event.count('since_step')} "
                f"({event.text('phase')})"
            )
            limit = restarts_limit(list(previous_ends(self._attempt).values()), self._policy)
            if limit is None:
                return PlannedStop("slow_host", f"restarts without {event.host}: {why}", event.host)
            log_line(f"not restarting without {event.host} ({why}): {limit}")
            self._hosts = ()
        return None
