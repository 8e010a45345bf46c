"""Chooses the number of nodes that is expected to finish a run first, and lets a run grow to more nodes.

A run with `resources.grow` that has fewer than its maximum number of nodes requeues itself when more nodes
are available.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainkit.capability import Capability, Part, Planned, Watch

if TYPE_CHECKING:
    from trainkit.capability import Hosts, Reading
    from trainkit.config.loaded import LoadedConfig
    from trainkit.plan.facts import Facts
    from trainkit.plan.launch import LaunchPlan
    from trainkit.run.rundir import AttemptDir


@dataclass(frozen=True)
class GrowthPlan(Part):
    """Part of the launch plan for a run with `resources.grow`."""

    CAPABILITY = "growth"
    grow: bool = True


class Growth(Capability):
    """Lets a run grow to more nodes; the code that queries Slurm is imported only in a job."""

    name = "growth"

    def plan(self, loaded: LoadedConfig, facts: Facts, draft: LaunchPlan) -> Planned:
        resources = loaded.config.resources
        if not resources.grow:
            return Planned()
        has_range = resources.fewest_nodes < resources.most_nodes
        note = f"resources.grow has no effect because resources.nodes is {resources.nodes}"
        part = None if draft.slurm is None else GrowthPlan()
        return Planned(part, warnings=() if has_range else (note,))

    def watch(self, attempt: AttemptDir, plan: LaunchPlan, hosts: Hosts) -> Watch | None:
        part, can_requeue = plan.part(GrowthPlan), shutil.which("scontrol") is not None
        if part is None or not part.grow or not can_requeue:
            return None
        from trainkit.capabilities.growth.growth_watch import GrowthWatch

        return GrowthWatch(attempt, plan, hosts.all, len(hosts.good))

    def status(self, reading: Reading) -> Mapping[str, object]:
        newest = next((event for event in reversed(reading.lasting) if event.name == "growth"), None)
        return {"growth": None if newest is None else newest.reason}

    def rows(self, reading: Reading) -> Mapping[str, str]:
        return {name: str(reason) for name, reason in self.status(reading).items() if reason}


CAPABILITY = Growth
