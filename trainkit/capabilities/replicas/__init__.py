"""Compares the replicas of the model, to detect ranks whose weights differ although they must be equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainkit.capabilities.replicas.replicas_plan import DIFFERS, ReplicasPlan
from trainkit.capability import Capability, Notice, Planned

if TYPE_CHECKING:
    from trainkit.capability import Reading, TrainedModel, TrainerHook
    from trainkit.config.loaded import LoadedConfig
    from trainkit.plan.facts import Facts
    from trainkit.plan.launch import LaunchPlan
    from trainkit.run.events import Event


class Replicas(Capability):
    """Compares checksums of the weights across the ranks that have equal shards."""

    name = "replicas"

    def plan(self, loaded: LoadedConfig, facts: Facts, draft: LaunchPlan) -> Planned:
        given = loaded.config.replicas
        if given.compare_every is None or draft.workload.is_command or draft.layout.dp_replicate == 1:
            return Planned()
        return Planned(ReplicasPlan(given.compare_every, given.on_difference))

    def trainer_hook(self, plan: LaunchPlan, model: TrainedModel) -> TrainerHook | None:
        part = plan.part(ReplicasPlan)
        if part is None:
            return None
        from trainkit.capabilities.replicas.compare import ReplicaComparison

        return ReplicaComparison(part, model)

    def notices(self, reading: Reading) -> Sequence[Notice]:
        found = [event for event in reading.lasting if event.name == DIFFERS]
        return [Notice(event.time, self.past(event), event.host, event.rank) for event in found]

    def past(self, event: Event) -> str:
        who = f"rank {event.rank} on {event.host} ({event.text('device')})"
        return f"the weights of {who} differed from rank {event.count('than')} at step {event.step}"


CAPABILITY = Replicas
