"""An attempt as seen by its supervisor, and the capabilities that take part in the attempt."""

from __future__ import annotations

from trainkit.capability import Capability, Hosts, Watch
from trainkit.job.decision import Observed, Outcome, PlannedStop
from trainkit.job.outcome import NOT_RUN
from trainkit.job.processes import log_line
from trainkit.plan.launch import LaunchPlan, damaged_plan
from trainkit.run.end import AttemptEnd
from trainkit.run.events import events_of
from trainkit.run.files import Tail
from trainkit.run.record import AttemptRecord, JobRecord, read_job
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.run.submitted import read_submitted
from trainkit.shipped import Guard


class Attempt:
    """An attempt that a supervisor runs: its folder, plan and observations and, at the end, its outcome."""

    def __init__(self, folder: AttemptDir, plan: LaunchPlan | None = None) -> None:
        self.folder = folder
        self.observed = Observed()
        self.job = JobRecord()
        """The content of the run's job.json as of the last `update`."""
        self.outcome: Outcome = NOT_RUN
        """The outcome of the attempt; `NOT_RUN` until it has ended."""
        self._plan = plan

    @property
    def run(self) -> RunDir:
        return self.folder.run

    @property
    def number(self) -> int:
        return self.folder.number

    def update(self) -> None:
        """Read job.json again, because commands such as `trainkit cancel` write requests to the file."""
        self.job = read_job(self.run)

    @property
    def entry(self) -> AttemptRecord:
        """The attempt's entry in job.json as of the last `update`."""
        return self.job.of_attempt(self.number)

    @property
    def superseding(self) -> AttemptRecord | None:
        """The job.json entry of a newer attempt that has taken over the run, or None."""
        return self.job.superseding(self.number)

    @property
    def plan(self) -> LaunchPlan:
        """The plan as adapted to the available nodes.

        Until a plan has been set, the property reads the submitted plan from the run folder. Raises OSError
        or UsageError if the submitted plan cannot be read.
        """
        if self._plan is None:
            try:
                self._plan = LaunchPlan.from_dict(read_submitted(self.folder))
            except ValueError as error:
                raise damaged_plan(self.folder.plan_file, error) from error
        return self._plan

    @plan.setter
    def plan(self, plan: LaunchPlan) -> None:
        self._plan = plan


def _polled(watch: Watch) -> PlannedStop | None:
    """Poll a capability's watch; raise TypeError if the result is neither None nor a PlannedStop."""
    found: object = watch.poll()
    if found is None or isinstance(found, PlannedStop):
        return found
    raise TypeError(f"{type(watch).__name__}.poll returned {found!r}, which is not a PlannedStop")


class AttemptCapabilities:
    """The capabilities that take part in one attempt.

    The constructor raises UsageError if the package of a capability in the plan is not installed.
    """

    def __init__(self, attempt: AttemptDir, plan: LaunchPlan) -> None:
        self._attempt, self._plan = attempt, plan
        self._guard = Guard(plan.parts, log_line)
        self._watches: list[tuple[str, Watch]] = []
        self._listeners = [
            one for one in self._guard.capabilities if type(one).on_event is not Capability.on_event
        ]
        self._events = Tail(attempt.run.events_file)
        self._events.position = self._events.size()

    def begin(self, hosts: Hosts) -> None:
        """Create the capabilities' watches, just before the processes of the attempt start."""
        self._watches = self._guard.each(lambda one: one.watch(self._attempt, self._plan, hosts))

    def poll(self, *, is_stopping: bool) -> PlannedStop | None:
        """Poll the watches; return the first planned stop that a watch returns, or None.

        If the ranks are already stopping (`is_stopping`), only watches with `while_stopping` are polled.
        """
        polled = [(name, watch) for name, watch in self._watches if watch.while_stopping or not is_stopping]
        found = [self._guard.call(name, _polled, watch) for name, watch in polled]
        return next(filter(None, found), None)

    def pass_on_events(self) -> None:
        """Pass new events of the attempt to the capabilities. Raises OSError."""
        if not self._listeners:
            return
        for event in events_of(self._events.records()):
            if event.attempt == self._attempt.number:
                for one in self._listeners:
                    self._guard.call(one.name, one.on_event, self._attempt, event)

    def end(self, end: AttemptEnd) -> None:
        """Pass the remaining events and then the attempt's end record to the capabilities. Raises OSError."""
        self.pass_on_events()
        for one in self._guard.capabilities:
            self._guard.call(one.name, one.on_end, self._attempt, self._plan, end)

    def close(self) -> None:
        """Wait until the capabilities have sent all their data."""
        for one in self._guard.capabilities:
            self._guard.call(one.name, one.close)
