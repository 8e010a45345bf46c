"""An attempt in the process that supervises it."""

from __future__ import annotations

from trainkit.job.decision import Observed, Outcome
from trainkit.job.outcome import NOT_RUN
from trainkit.plan.launch import LaunchPlan, damaged_plan
from trainkit.run.record import AttemptRecord, JobRecord, read_job
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.run.submitted import read_submitted


class Attempt:
    """A live attempt: its folder, its plan, what was seen of its processes, and how it ended."""

    def __init__(self, folder: AttemptDir, plan: LaunchPlan | None = None) -> None:
        self.folder = folder
        self.observed = Observed()
        self.job = JobRecord()
        """The job.json of the run at the last `update`."""
        self.outcome: Outcome = NOT_RUN
        """How it ended; `NOT_RUN` until it has."""
        self._plan = plan

    @property
    def run(self) -> RunDir:
        return self.folder.run

    @property
    def number(self) -> int:
        return self.folder.number

    def update(self) -> None:
        """Read job.json again, into which commands write what they ask of the attempt."""
        self.job = read_job(self.run)

    @property
    def entry(self) -> AttemptRecord:
        """Its entry in job.json at the last `update`."""
        return self.job.of_attempt(self.number)

    @property
    def superseding(self) -> AttemptRecord | None:
        """The entry of the attempt that has taken the run over."""
        return self.job.superseding(self.number)

    @property
    def plan(self) -> LaunchPlan:
        """Its plan as submitted, read once, or as fitted since. Raises OSError and UsageError."""
        if self._plan is None:
            try:
                self._plan = LaunchPlan.from_dict(read_submitted(self.folder))
            except ValueError as error:
                raise damaged_plan(self.folder.plan_file, error) from error
        return self._plan

    @plan.setter
    def plan(self, plan: LaunchPlan) -> None:
        self._plan = plan
