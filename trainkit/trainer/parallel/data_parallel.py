"""Data parallelism: `replicate` where every rank holds the model, `fully_shard` where it is split.

Copies on CPUs are the exception: there is nothing to wrap, their gradients are averaged by `HostReduction`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from trainkit.plan.launch import Layout
from trainkit.trainer.distributed import World
from trainkit.trainer.parallel.host_reduction import HostReduction

# Under tensor parallelism a block's output is a view of its DTensor; nothing here writes into one in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")

MIN_UNIT_BYTES = 25 * 2**20
"""Blocks are grouped up to this size: smaller collectives cost more in latency than overlap gains."""


def communication_units(blocks: list[nn.Module], min_bytes: int = MIN_UNIT_BYTES) -> list[list[nn.Module]]:
    """Split consecutive blocks into groups of at least `min_bytes` of parameters.

    What is left at the end is not a group: it belongs to the root, with the embedding and the head.
    """
    units: list[list[nn.Module]] = []
    unit: list[nn.Module] = []
    size = 0
    for block in blocks:
        unit.append(block)
        size += sum(p.numel() * p.element_size() for p in block.parameters())
        if size >= min_bytes:
            units.append(unit)
            unit, size = [], 0
    return units


def mixed_precision(dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Compute in `dtype`, reduce gradients in float32.

    Inputs are left as they are: activations have the type already, and rotation tables must stay float32.
    """
    if dtype == torch.float32:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def apply_data_parallel(
    model: nn.Module,
    blocks: list[nn.Module],
    mesh: DeviceMesh,
    layout: Layout,
    dtype: torch.dtype,
    *,
    zero: int = 3,
    offload: bool = False,
) -> None:
    """Wrap the model in place; gradients then come out averaged over the data-parallel ranks.

    Ranks that share a sequence are averaged over too: each has the gradient of its part. Where ranks share a
    sample but there is nothing to average, wrapping is still what casts the parameters.
    """
    policy = mixed_precision(dtype)
    units = communication_units(blocks)
    if layout.dp_shard * layout.cp == 1 and layout.dp_replicate > 1 and not offload:
        replicate_mesh = mesh["dp_replicate"]
        for unit in units:
            for block in unit:
                replicate(block, mesh=replicate_mesh, mp_policy=policy)
        replicate(model, mesh=replicate_mesh, mp_policy=policy)
        return
    options: dict[str, Any] = {
        "mesh": mesh["dp_shard"] if layout.dp_replicate == 1 else mesh["dp_replicate", "dp_shard"],
        "mp_policy": policy,
        # A pipeline comes back to the parameters with every microbatch.
        "reshard_after_forward": zero == 3 and layout.pp == 1,
    }
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    for unit in units:
        fully_shard(unit, **options)
    # Its own parameters are needed again right after the forward pass.
    fully_shard(model, **{**options, "reshard_after_forward": False})


GradientSwitch = Callable[[bool], None]
"""Switches off (for all but the last microbatch of a step) and on what can wait until a step is whole."""


def reduces_on_host(world: World) -> bool:
    """Whether the model stays as it is and `HostReduction` averages its gradients."""
    layout = world.layout
    return (
        world.device.type == "cpu"
        and layout.dp_shard == 1
        and not layout.splits_model
        and not world.is_simulated
    )


def gradient_switch(model: nn.Module, world: World) -> GradientSwitch:
    """The switch of a model that is ready to train; begins to average where no wrapper does."""
    if world.mesh is None:
        return lambda enabled: None
    if not isinstance(model, FSDPModule):
        return HostReduction(model, world.mesh["dp_replicate"].get_group()).set_enabled
    if world.layout.dp_shard * world.layout.cp == 1:
        return model.set_requires_gradient_sync
    # Between shards gradients are reduced after every microbatch: whole ones would wait on every rank.
    return model.set_requires_all_reduce
