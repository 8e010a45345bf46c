"""From a task to a model that is ready to train, in the one order that works for every layout.

Recompute inside the blocks, compile them, split the whole over the data-parallel ranks, and only then
give it memory and values: no rank ever holds more of the model than its own shard.
"""

from __future__ import annotations

import torch
from torch import nn

from trainkit.config.schema import RunConfig
from trainkit.plan.launch import LaunchPlan
from trainkit.trainer.activation_checkpointing import apply_activation_checkpointing
from trainkit.trainer.distributed import World
from trainkit.trainer.parallel.data_parallel import (
    GradientSwitch,
    apply_data_parallel,
    gradient_switch,
    reduces_on_host,
)
from trainkit.trainer.precision import DTYPES
from trainkit.trainer.tasks import Task


def build_model(
    task: Task, config: RunConfig, plan: LaunchPlan, world: World
) -> tuple[nn.Module, GradientSwitch]:
    """The model on this rank's device, split, initialised, in training mode; with its gradients' switch."""
    model = task.build_model()
    blocks = task.blocks(model)
    apply_activation_checkpointing(blocks, config.parallel.activation_checkpointing)
    if config.parallel.compile:
        for block in blocks:
            block.compile()
    if world.mesh is not None and not reduces_on_host(world.mesh, plan.layout):
        apply_data_parallel(model, blocks, world.mesh, plan.layout, DTYPES[config.precision.dtype])
    model.to_empty(device=world.device)
    task.init_model(model, config.seed)
    return model.train(), gradient_switch(model, world.mesh)


def set_determinism(deterministic: bool) -> None:
    """Ask for kernels that give the same bits every time; the others are refused by torch."""
    if deterministic:
        torch.use_deterministic_algorithms(True)
