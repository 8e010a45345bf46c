"""Defines the part of the launch plan that contains the limits for slow ranks and silent commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainkit.capability import Part

if TYPE_CHECKING:
    from trainkit.plan.launch import LaunchPlan


@dataclass(frozen=True)
class SlowRanksPlan(Part):
    """The values of config keys in `requeue` that apply to slow ranks and silent commands."""

    CAPABILITY = "slow_ranks"
    inspect_s: float | None = 600.0
    silence_s: float | None = None
    slow_hosts: str = "ignore"
    slow_after_s: float = 300.0

    @property
    def inspect_after_s(self) -> float | None:
        """Return after how many seconds without output to inspect a command; at most half of `silence_s`."""
        limits = (self.inspect_s, None if self.silence_s is None else self.silence_s / 2)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def silence(self) -> str:
        """Describe, for a dry run, what happens to a command that prints nothing."""
        if self.inspect_after_s is None:
            return "not watched: requeue.inspect_s and requeue.silence_s are null"
        case = "if nothing has been printed yet or a rank waits for a lock file"
        reported = f"reported after {self.inspect_after_s:g} s {case}"
        if self.silence_s is None:
            return f"{reported}; never treated as a hang, because requeue.silence_s is null"
        return f"{reported}; treated as a hang after {self.silence_s:g} s"


def slow_ranks_plan(plan: LaunchPlan) -> SlowRanksPlan:
    """Return the slow-rank part of a plan, or default values if the plan lacks this part."""
    return plan.part(SlowRanksPlan) or SlowRanksPlan()
