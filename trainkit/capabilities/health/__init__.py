"""Measures the health of hosts and GPUs while their ranks run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainkit.capability import Capability, Companion, HostView, Part, Planned

if TYPE_CHECKING:
    from datetime import datetime

    from trainkit.capability import Reading
    from trainkit.config.loaded import LoadedConfig
    from trainkit.job.node.rendezvous import Rendezvous
    from trainkit.plan.facts import Facts
    from trainkit.plan.launch import LaunchPlan
    from trainkit.run.events import Event
    from trainkit.run.history import RunHistory
    from trainkit.run.rundir import AttemptDir


@dataclass(frozen=True)
class HealthPlan(Part):
    """Part of the launch plan that sets the interval between health samples."""

    CAPABILITY = "health"
    every_s: float


class Health(Capability):
    """Lets one agent per node append health samples to a file."""

    name = "health"

    def plan(self, loaded: LoadedConfig, facts: Facts, draft: LaunchPlan) -> Planned:
        every_s = loaded.config.logging.health_every_s
        return Planned(None if every_s is None else HealthPlan(every_s))

    def companion(self, attempt: AttemptDir, plan: LaunchPlan, node: Rendezvous) -> Companion | None:
        part = plan.part(HealthPlan)
        # With one task per GPU, each GPU has its own agent, so let only the agent with local rank 0 take
        # samples.
        if part is None or 0 not in node.local_ranks:
            return None
        from trainkit.capabilities.health.sampler import HealthSampler
        from trainkit.run.process import own_host

        sampler = HealthSampler(attempt, own_host(), part.every_s)
        sampler.start()
        return sampler

    def hosts(self, reading: Reading, now: datetime) -> Mapping[str, HostView]:
        from trainkit.capabilities.health.samples import HealthFiles
        from trainkit.capabilities.health.shown import hosts_of

        return hosts_of(reading.history.reader(HealthFiles).newest, reading, now)

    def advice(self, attempt: AttemptDir, host: str | None, lasting: Sequence[Event]) -> Mapping[str, str]:
        from trainkit.capabilities.health.shown import memory_in_use

        return {} if host is None else {"memory_in_use": memory_in_use(attempt, host)}

    def report(self, history: RunHistory) -> Mapping[str, object]:
        from trainkit.capabilities.health.shown import read_nodes

        return {"nodes": read_nodes(history.run)}


CAPABILITY = Health
