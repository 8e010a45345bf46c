"""Extracts a COMMAND's curve: the agent of rank 0 reads the steps and metrics that rank 0 prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainkit.capability import Capability, Companion, Part, Planned

if TYPE_CHECKING:
    from trainkit.config.loaded import LoadedConfig
    from trainkit.job.node.rendezvous import Rendezvous
    from trainkit.plan.facts import Facts
    from trainkit.plan.launch import LaunchPlan
    from trainkit.run.rundir import AttemptDir


@dataclass(frozen=True)
class CurvesPlan(Part):
    """Part of the launch plan that describes how to extract a COMMAND's curve."""

    CAPABILITY = "curves"
    pattern: str
    """The value of `logging.pattern`: ``auto`` or a regular expression."""


class Curves(Capability):
    """Reads the log of rank 0, and writes the metrics found in it to metrics.jsonl."""

    name = "curves"

    def plan(self, loaded: LoadedConfig, facts: Facts, draft: LaunchPlan) -> Planned:
        pattern = loaded.config.logging.pattern if draft.workload.is_command else None
        return Planned(None if pattern is None else CurvesPlan(pattern))

    def companion(self, attempt: AttemptDir, plan: LaunchPlan, node: Rendezvous) -> Companion | None:
        part = plan.part(CurvesPlan)
        if part is None or not node.has_rank_0:
            return None
        from trainkit.capabilities.curves.log_curve import LogCurve

        return LogCurve(attempt, plan, part.pattern)


CAPABILITY = Curves
