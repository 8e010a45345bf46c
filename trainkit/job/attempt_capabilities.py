"""The capabilities of a plan in the supervisor of an attempt."""

from __future__ import annotations

from trainkit.capability import Capability, Guard
from trainkit.job.processes import log_line
from trainkit.plan.launch import LaunchPlan
from trainkit.run.end import AttemptEnd
from trainkit.run.events import events_of
from trainkit.run.files import Tail
from trainkit.run.rundir import AttemptDir


class AttemptCapabilities:
    """The capabilities of one attempt; raises UsageError if one of another package is not installed."""

    def __init__(self, attempt: AttemptDir, plan: LaunchPlan) -> None:
        self._attempt, self._plan = attempt, plan
        self._guard = Guard(plan, log_line)
        self._watches = self._guard.each(lambda one: one.watch(attempt, plan))
        self._listeners = [
            one for one in self._guard.capabilities if type(one).on_event is not Capability.on_event
        ]
        self._events = Tail(attempt.run.events_file)
        self._events.position = self._events.size()

    def poll(self) -> None:
        """Have the watches look around, and the others react to new events. Raises OSError."""
        for name, watch in self._watches:
            self._guard.call(name, watch.poll)
        if not self._listeners:
            return
        for event in events_of(self._events.records()):
            if event.attempt == self._attempt.number:
                for one in self._listeners:
                    self._guard.call(one.name, one.on_event, self._attempt, event)

    def end(self, end: AttemptEnd) -> None:
        """Have all react to the end of the attempt. Raises OSError."""
        for one in self._guard.capabilities:
            self._guard.call(one.name, one.on_end, self._attempt, self._plan, end)
        self.poll()

    def close(self) -> None:
        """Wait for what is still being sent."""
        for one in self._guard.capabilities:
            self._guard.call(one.name, one.close)
