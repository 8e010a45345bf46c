"""Implements the supervisor's watch for slow ranks and silent commands."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.capabilities.slow_ranks.silence import SilenceWatch
from trainkit.capabilities.slow_ranks.slow_hosts import SlowHostWatch
from trainkit.capability import Watch
from trainkit.job.decision import PlannedStop
from trainkit.plan.launch import LaunchPlan
from trainkit.run.rundir import AttemptDir


class RanksWatch(Watch):
    """Combines the watches for slow hosts and for a silent command."""

    while_stopping = False

    def __init__(
        self, attempt: AttemptDir, plan: LaunchPlan, hosts: Sequence[str] | None, *, is_inspected: bool
    ) -> None:
        """Watch an attempt; slow hosts are excluded only if they are in `hosts`."""
        self._silence = SilenceWatch(attempt, plan) if is_inspected else None
        self._slow_hosts = None if hosts is None else SlowHostWatch(attempt, plan, hosts)

    def poll(self) -> PlannedStop | None:
        """Inspect a silent command; return a planned stop if a slow host should be excluded, otherwise None.

        Raises OSError if the attempt's files cannot be read or written.
        """
        planned_stop = None if self._slow_hosts is None else self._slow_hosts.poll()
        if planned_stop is None and self._silence is not None:
            self._silence.poll()
        return planned_stop
