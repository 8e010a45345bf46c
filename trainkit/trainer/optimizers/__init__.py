"""Create the optimizer that a config chooses; each optimizer is a file of this folder."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.config.training import OptimizerConfig
from trainkit.plan.launch import Layout
from trainkit.trainer.distributed import ONE_PROCESS
from trainkit.trainer.models.model import Weight
from trainkit.trainer.optimizers.adamw import ShardedAdamW
from trainkit.trainer.optimizers.by_element import ByElement
from trainkit.trainer.optimizers.lion import ShardedLion
from trainkit.trainer.optimizers.sgd import ShardedSGD

KINDS: dict[str, type[ByElement]] = {
    "adamw": ShardedAdamW,
    "adamw_8bit": ShardedAdamW,
    "lion": ShardedLion,
    "sgd": ShardedSGD,
}
"""Maps each key of `trainkit.config.optimizers.OPTIMIZERS` to the class that implements the optimizer."""


def make_optimizer(
    weights: Sequence[Weight],
    config: OptimizerConfig,
    layout: Layout = ONE_PROCESS,
    *,
    compiled: bool = False,
) -> ByElement:
    """Create the optimizer that `optimizer.name` specifies."""
    return KINDS[config.name](weights, config, layout, compiled=compiled)
