"""Watches what a running attempt should be reported for: no progress, no output, no saves, or slow ranks."""

from __future__ import annotations

from typing import Any

from trainkit.job.attempt_end import last_step
from trainkit.job.notifications import (
    Notifier,
    silence_notification,
    slowdown_notification,
    stall_notification,
    unsaved_notification,
)
from trainkit.job.watch.silence import OutputWatch
from trainkit.plan.launch import LaunchPlan
from trainkit.run.events import FAILED_SAVES, SAVE_EVENTS, SILENCE_EVENTS, SLOWDOWN_EVENTS, failed_in_a_row
from trainkit.run.files import JsonlTail
from trainkit.run.rundir import AttemptDir

STALL_INTERVALS = 3.0
"""A run that writes metrics seldom is stalled after this many of its longest intervals."""
WATCHED_EVENTS = (*SLOWDOWN_EVENTS, *SILENCE_EVENTS, *SAVE_EVENTS)


class ProgressWatch:
    """Reports that an attempt is stalled, once until it makes progress again, and what its events say."""

    def __init__(self, attempt: AttemptDir, plan: LaunchPlan, notifier: Notifier) -> None:
        self._attempt = attempt
        self._notifier = notifier
        self._limit_s = plan.notify.stalled_after_s
        # The trainer logs metrics, and its logs may grow without progress; a command may write only logs.
        self._output = OutputWatch(attempt, self._limit_s, with_logs=not plan.workload.knows_run)
        self._events = JsonlTail(attempt.run.events_file, WATCHED_EVENTS)
        self._failed_saves: list[dict[str, Any]] = []
        self._silent_s = self._longest_s = 0.0
        self._is_stalled = False

    def poll(self) -> None:
        """Report what has changed. Raises OSError."""
        silent_s = self._output.poll()
        if silent_s is None:
            return
        if silent_s < self._silent_s:
            if not self._is_stalled:
                self._longest_s = max(self._longest_s, self._silent_s)
            self._is_stalled = False
        self._silent_s = silent_s
        if not self._is_stalled and silent_s > max(self._limit_s, STALL_INTERVALS * self._longest_s):
            self._is_stalled = True
            step = last_step(self._attempt, None)
            self._notifier.send(self._attempt, stall_notification(self._attempt, silent_s, step))
        for event in self._events.read():
            if event.get("attempt") == self._attempt.number:
                self._report(event)

    def _report(self, event: dict[str, Any]) -> None:
        name, attempt = event.get("event"), self._attempt
        if name in ("slow_rank", "slow_run"):
            self._notifier.send(attempt, slowdown_notification(attempt, event))
        elif name == "silent":
            self._notifier.send(attempt, silence_notification(attempt, event))
        elif name in SAVE_EVENTS:
            self._failed_saves = failed_in_a_row(self._failed_saves, event)
            if len(self._failed_saves) == FAILED_SAVES:
                self._notifier.send(attempt, unsaved_notification(attempt, self._failed_saves))
