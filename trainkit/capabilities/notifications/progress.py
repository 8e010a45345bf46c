"""Notifies the webhook if an attempt stalls, slows down or cannot save a checkpoint."""

from __future__ import annotations

from trainkit.capabilities.notifications.notifier import Notification, Notifier, event_notification
from trainkit.capabilities.slow_ranks.output_watch import OutputWatch
from trainkit.capability import Watch
from trainkit.formats import plural
from trainkit.job.attempt_end import last_step
from trainkit.plan.launch import LaunchPlan
from trainkit.run.events import FAILED_SAVES, SAVE_EVENTS, Event, events_of
from trainkit.run.files import Tail
from trainkit.run.history import Attempt
from trainkit.run.rundir import AttemptDir

STALL_INTERVALS = 3.0
"""A run is considered stalled if it writes nothing for at least this multiple of the longest interval between
its records."""
WATCHED_EVENTS = ("slow_rank", "silent", *SAVE_EVENTS)


class ProgressWatch(Watch):
    """Watches the progress and the events of an attempt, and reports each stall once."""

    def __init__(self, attempt: AttemptDir, plan: LaunchPlan, limit_s: float, notifier: Notifier) -> None:
        self._attempt = attempt
        self._notifier = notifier
        self._limit_s = limit_s
        # For the trainer, do not watch the log files, because they may grow without progress. For a COMMAND,
        # watch the log files, because it may write nothing else.
        self._output = OutputWatch(attempt, self._limit_s, with_logs=plan.workload.is_command)
        self._events = Tail(attempt.run.events_file)
        self._events.position = self._events.size()
        self._seen = Attempt(attempt.number)
        self._silent_s = self._longest_s = 0.0
        self._is_stalled = False

    def poll(self) -> None:
        """Report stalls and events since the last call. Raises OSError if the run's files cannot be read."""
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
            after = "" if step is None else f" after step {step}"
            text = f"no progress for {plural(round(silent_s / 60), 'minute')}{after}"
            self._notifier.send(self._attempt, Notification("stalled", text, "stacks", step=step))
        for event in events_of(self._events.records(WATCHED_EVENTS)):
            if event.attempt == self._attempt.number:
                self._report(event)

    def _report(self, event: Event) -> None:
        if event.name in ("slow_rank", "silent"):
            self._notifier.send(self._attempt, event_notification(event))
        elif event.name in SAVE_EVENTS:
            self._seen.add(event)
            failed = self._seen.failed_saves
            if len(failed) == FAILED_SAVES:
                since = f"{len(failed)} saves in a row have failed since step {failed[0].step}"
                text = f"cannot save checkpoints: {since}: {event.text('error')}"
                self._notifier.send(self._attempt, Notification("stalled", text, "status", step=event.step))
