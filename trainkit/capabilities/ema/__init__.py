"""Averages the weights during training, with exponentially decreasing factors for earlier weights."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from trainkit.capabilities.ema.ema_plan import BYTES, SUFFIX, EmaPlan
from trainkit.capability import Capability, Planned
from trainkit.formats import plural

if TYPE_CHECKING:
    from trainkit.capability import TrainedModel, TrainerHook
    from trainkit.config.loaded import LoadedConfig
    from trainkit.config.schema import RunConfig
    from trainkit.plan.facts import Facts
    from trainkit.plan.launch import LaunchPlan


class Ema(Capability):
    """Keeps an average of the weights on the ranks, which checkpoints contain and validation uses."""

    name = "ema"

    def plan(self, loaded: LoadedConfig, facts: Facts, draft: LaunchPlan) -> Planned:
        given = loaded.config.ema
        if given.decay is None or draft.workload.is_command:
            return Planned()
        how = "step" if given.every == 1 else plural(given.every, "step")
        reason = f"updated every {how} with decay {given.decay:g}; takes {BYTES} bytes per parameter"
        return Planned(EmaPlan(given.decay, given.every), {"ema": reason})

    def bytes_per_param(self, config: RunConfig) -> float:
        return 0 if config.ema.decay is None else BYTES

    def metrics(self, config: RunConfig) -> Collection[str]:
        return () if config.ema.decay is None else (f"val_loss{SUFFIX}",)

    def trainer_hook(self, plan: LaunchPlan, model: TrainedModel) -> TrainerHook | None:
        part = plan.part(EmaPlan)
        if part is None:
            return None
        from trainkit.capabilities.ema.average import WeightAverage

        return WeightAverage(part, model)


CAPABILITY = Ema
