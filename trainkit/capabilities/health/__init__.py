"""The health of hosts and GPUs, sampled while their ranks run."""

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
class HealthPlan(Part):
    """How often the nodes of a run are sampled."""

    CAPABILITY = "health"
    every_s: float


class Health(Capability):
    """The capability: an agent of each node appends samples to a file."""

    name = "health"

    def plan(self, loaded: LoadedConfig, facts: Facts, draft: LaunchPlan) -> Planned:
        every_s = loaded.config.logging.health_every_s
        return Planned(None if every_s is None else HealthPlan(every_s))

    def companion(self, attempt: AttemptDir, plan: LaunchPlan, node: Rendezvous) -> Companion | None:
        part = plan.part(HealthPlan)
        # With one task per GPU, each GPU has an agent.
        if part is None or 0 not in node.local_ranks:
            return None
        from trainkit.capabilities.health.sampler import HealthSampler
        from trainkit.run.process import own_host

        sampler = HealthSampler(attempt, own_host(), part.every_s)
        sampler.start()
        return sampler


CAPABILITY = Health
