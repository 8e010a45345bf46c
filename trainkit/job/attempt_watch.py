"""Runs and watches the processes of one attempt: what is alike on one machine and in a job of a scheduler."""

from __future__ import annotations

import signal
import time

from trainkit.job.attempt import Attempt, AttemptCapabilities
from trainkit.job.decision import RESTART_SIGNAL, Departure
from trainkit.job.hangs import HangWatch
from trainkit.job.processes import KILL_MARGIN_S, ProcessGroup, log_line
from trainkit.run.record import AttemptRecord

DELETED_AFTER_S = 10.0
"""How long the attempt's folder must be missing: longer than a remount of the filesystem takes."""
SIGNAL_RECORD_S = 2.0
"""How long the first agent has to record a signal that Slurm sent to it."""


class AttemptWatch(ProcessGroup):
    """The processes of one attempt, from their start until `observed` has how they ended."""

    poll_interval_s = 1.0

    def __init__(self, live: Attempt) -> None:
        super().__init__()
        self.live = live
        self.attempt, self.plan, self.observed = live.folder, live.plan, live.observed
        self.superseded_by: AttemptRecord | None = None
        """The entry of the attempt that has taken the run over; this one saves and ends."""
        self._hangs = HangWatch(live.folder)
        self._missing_since_s: float | None = None
        self.capabilities: AttemptCapabilities | None = None

    def poll(self) -> None:
        """End the attempt when it was moved or deleted, or when its ranks hang."""
        if self._follow() and self.observed.stop_signal is None:
            self.stop_ranks()
        if self._is_deleted():
            self.end_all()
            return
        self._poll_processes()
        if self.capabilities is not None:
            departure = self.capabilities.poll(is_stopping=self.observed.stop_signal is not None)
            if departure is not None:
                self.leave(departure)
        if not self.observed.hangs and (hangs := self._hangs.poll()):
            self.observed.hangs = hangs
            self.end_all()
        if self.capabilities is not None:
            self.capabilities.pass_on_events()

    def _follow(self) -> bool:
        """Whether the folder was moved since the last call; what is written goes to where it is now."""
        is_moved = self.attempt.run.follow()
        if is_moved:
            self.observed.moved_to = str(self.attempt.run.path)
            log_line(f"attempt {self.attempt.number}: its folder was moved to {self.observed.moved_to}")
        return is_moved

    def end_all(self) -> None:
        """End every process of the attempt immediately."""
        raise NotImplementedError

    def stop_ranks(self, as_if: str = signal.SIGTERM.name) -> None:
        """Have the ranks save and exit, as if this signal had come: by default the run stops."""
        raise NotImplementedError

    def leave(self, departure: Departure) -> None:
        """Have the ranks save and exit, and the run restart, unless they are stopping already."""
        if self.observed.stop_signal is None and self.running:
            log_line(f"attempt {self.attempt.number}: {departure.why}")
            try:
                self.stop_ranks(RESTART_SIGNAL)
            finally:
                self.observed.departure = departure

    def collect(self) -> None:
        """Complete `observed` from the run folder. May raise OSError; can then be called again."""

    def kill_after_grace(self) -> None:
        """Kill the remaining processes after the grace time; agents apply a shorter limit themselves."""
        self.kill_within(self.plan.grace_s + 2 * KILL_MARGIN_S)

    def _poll_processes(self) -> None:
        """Called by `poll` unless the attempt was deleted."""

    def _requested_signal(self) -> str | None:
        """The signal that a command's request in job.json stands for; None without a request."""
        entry = self.live.entry
        if entry.is_cancelled:
            return None if entry.cancelled_now else signal.SIGTERM.name
        return RESTART_SIGNAL if entry.requeue_requested_at is not None else None

    def _is_deleted(self) -> bool:
        """Whether the attempt's folder was replaced, or missing for DELETED_AFTER_S. Raises OSError."""
        if self.attempt.run.was_replaced:
            return True
        if self.attempt.path.is_dir():
            self._missing_since_s = None
            return False
        self._missing_since_s = self._missing_since_s or time.monotonic()
        return time.monotonic() >= self._missing_since_s + DELETED_AFTER_S
