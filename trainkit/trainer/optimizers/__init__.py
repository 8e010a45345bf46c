"""Create the optimizer that a config chooses; each optimizer is a file of this folder."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.config.training import OptimizerConfig
from trainkit.trainer.distributed import World
from trainkit.trainer.models.model import Weight
from trainkit.trainer.optimizers.adamw import ShardedAdamW
from trainkit.trainer.optimizers.by_element import ByElement
from trainkit.trainer.optimizers.interface import ShardedOptimizer
from trainkit.trainer.optimizers.lion import ShardedLion
from trainkit.trainer.optimizers.muon import ShardedMuon
from trainkit.trainer.optimizers.sgd import ShardedSGD

KINDS: dict[str, type[ByElement]] = {
    "adamw": ShardedAdamW,
    "adamw_8bit": ShardedAdamW,
    "lion": ShardedLion,
    "sgd": ShardedSGD,
}
"""Maps each element-wise optimizer of `trainkit.config.optimizers.OPTIMIZERS` to its class."""


def make_optimizer(
    weights: Sequence[Weight], config: OptimizerConfig, world: World, *, compiled: bool = False
) -> ShardedOptimizer:
    """Create the optimizer that `optimizer.name` specifies; kernels for GPUs may be compiled."""
    if config.name == "muon":
        return ShardedMuon(weights, config, world, compiled=compiled)
    return KINDS[config.name](weights, config, world.layout, compiled=compiled)
