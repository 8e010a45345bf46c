"""Watches slow and silent ranks in the supervisor."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.capabilities.slow_ranks.silence import SilenceWatch
from trainkit.capabilities.slow_ranks.slow_hosts import SlowHostWatch
from trainkit.capability import Watch
from trainkit.job.decision import PlannedStop
from trainkit.plan.launch import LaunchPlan
from trainkit.run.rundir import AttemptDir


class RanksWatch(Watch):
    """Combines the watch of slow hosts and the watch of a silent command."""

    while_stopping = False

    def __init__(
        self, attempt: AttemptDir, plan: LaunchPlan, hosts: Sequence[str] | None, *, is_inspected: bool
    ) -> None:
        """Watch an attempt; a slow host among `hosts` is excluded, and None excludes no host."""
        self._silence = SilenceWatch(attempt, plan) if is_inspected else None
        self._slow_hosts = None if hosts is None else SlowHostWatch(attempt, plan, hosts)

    def poll(self) -> PlannedStop | None:
        """Inspect a silent command, and return a planned stop for a slow host, or None. Raises OSError."""
        planned_stop = None if self._slow_hosts is None else self._slow_hosts.poll()
        if planned_stop is None and self._silence is not None:
            self._silence.poll()
        return planned_stop
