"""Watches what a running attempt should be reported for: that it makes no progress, or has become slow."""

from __future__ import annotations

from trainkit.job.attempt_end import last_step
from trainkit.job.notifications import Notifier, slowdown_notification, stall_notification
from trainkit.job.record import SLOWDOWN_EVENTS
from trainkit.job.watch.hangs import OutputWatch
from trainkit.jsonl import JsonlTail
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import AttemptDir

STALL_INTERVALS = 3.0
"""A run that writes metrics seldom is stalled after this many of its longest intervals."""


class ProgressWatch:
    """Reports that an attempt is stalled, once until it makes progress again, and its slow ranks."""

    def __init__(self, attempt: AttemptDir, plan: LaunchPlan, notifier: Notifier) -> None:
        self._attempt = attempt
        self._notifier = notifier
        self._limit_s = plan.notify.stalled_after_s
        # The trainer logs metrics, and its logs may grow without progress; a command may write only logs.
        self._output = OutputWatch(attempt, self._limit_s, with_logs=plan.command is not None)
        self._events = JsonlTail(attempt.run.events_file, SLOWDOWN_EVENTS)
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
            is_own = event.get("attempt") == self._attempt.number
            if is_own and event.get("event") in ("slow_rank", "slow_run"):
                self._notifier.send(self._attempt, slowdown_notification(self._attempt, event))
