"""From a task to a model that is ready to train, in the one order that works for every layout.

Cut the model into the stages of a pipeline, split its matrices, recompute inside the blocks, compile them,
split the whole over the data-parallel ranks, and only then give it memory and values: no rank ever holds more
of the model than its own shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainkit.config.schema import RunConfig
from trainkit.plan.launch import LaunchPlan
from trainkit.trainer.activation_checkpointing import recompute_and_compile
from trainkit.trainer.distributed import World
from trainkit.trainer.float8 import apply_float8, require_float8
from trainkit.trainer.forward_backward import Passes, StepContext, WholePasses
from trainkit.trainer.models.model import Model, Part
from trainkit.trainer.parallel.context import apply_context_parallel, seen_by
from trainkit.trainer.parallel.data_parallel import apply_data_parallel, gradient_switch, reduces_on_host
from trainkit.trainer.parallel.stages import TiedEnds, parts_of
from trainkit.trainer.parallel.tensor import apply_tensor_parallel
from trainkit.trainer.precision import DTYPES
from trainkit.trainer.progress import Pulse
from trainkit.trainer.stateless_random import fill_normal_
from trainkit.trainer.tasks import Task
from trainkit.trainer.weights import Weight, local, weights_of

FIRST_CAPABILITY = (8, 0)
"""Ampere."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of queries [B, H, T, C] to keys and values [B, K, S, C]."""


def has_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's flash attention computes with this type on the device."""
    if device.type != "cuda" or dtype == torch.float32 or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def repeat_shared_heads(attentions: list[nn.Module]) -> None:
    """Give every query head keys and values of its own, where only flash attention lets them be shared.

    Without it torch would take the kernel that keeps all scores [B, H, T, S].
    """
    for attention in attentions:
        attention.attend = _repeating(cast(Attend, attention.attend))  # type: ignore[assignment]


def _repeating(attend: Attend) -> Attend:
    @wraps(attend)
    def repeating(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        each = q.shape[1] // k.shape[1]
        return attend(q, k.repeat_interleave(each, dim=1), v.repeat_interleave(each, dim=1))

    return repeating


@torch.no_grad()
def init_parameters(model: Model, seed: int) -> None:
    """Fill each rank's shard of every parameter from N(0, std) as the model says, or with ones."""
    for own_name, param in model.named_parameters():
        name = model.canonical(own_name)
        shard, offset = local(param), (0,) * param.dim()
        if isinstance(param, DTensor):
            _, offset = compute_local_shape_and_global_offset(
                param.shape, param.device_mesh, param.placements
            )
        value = model.init_std(name)
        if value is None:
            shard.fill_(1.0)
        else:
            fill_normal_(shard, value, f"{seed}/{name}", param.shape, offset)


@dataclass(frozen=True)
class BuiltModel:
    """What this rank has of the model, and how it is computed with."""

    parts: Sequence[Model]
    weights: Sequence[Weight]
    passes: Passes
    tied_ends: TiedEnds | None


def build(task: Task, config: RunConfig, plan: LaunchPlan, world: World, pulse: Pulse) -> BuiltModel:
    """The model on this rank's device, split, initialised, in training mode."""
    parts = build_parts(task, config, plan, world)
    # What is offloaded lives on the host; FSDP brings it to the device block by block, but no buffers.
    home = torch.device("cpu") if config.parallel.offload else world.device
    for part in parts:
        part.to_empty(device=home)
        part.restore()
        _move_buffers(part, world.device)
        init_parameters(part, config.seed)
    return assemble(task, config, plan, world, pulse, parts)


def build_parts(task: Task, config: RunConfig, plan: LaunchPlan, world: World) -> list[Model]:
    """What of the model this rank has, split, without memory (on the meta device)."""
    layout, schedule = plan.layout, config.parallel.pp_schedule
    if layout.pp == 1:
        return [_build_part(task, config, plan, world, None)]
    pieces = parts_of(world.place.pp, layout.pp, schedule, task.num_layers)
    return [_build_part(task, config, plan, world, piece) for piece in pieces]


def assemble(
    task: Task, config: RunConfig, plan: LaunchPlan, world: World, pulse: Pulse, parts: list[Model]
) -> BuiltModel:
    """Parts that have their memory, and how they are computed with."""
    layout, parallel = plan.layout, config.parallel
    for part in parts:
        part.train()
    positions = seen_by(world.place.cp, layout.cp, 0, 1, config.data.seq_len).attention
    context = StepContext(
        world,
        DTYPES[config.precision.dtype],
        splits_loss=parallel.loss_parallel and layout.tp > 1,
        positions=positions if layout.cp > 1 else None,
    )
    if layout.pp > 1:
        return _assemble_pipeline(task, config, plan, world, pulse, parts, context)
    [model] = parts
    passes = WholePasses(task, model, gradient_switch(model, world), world, context, pulse)
    return BuiltModel(parts, weights_of(parts), passes, None)


def _move_buffers(model: Model, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _assemble_pipeline(
    task: Task,
    config: RunConfig,
    plan: LaunchPlan,
    world: World,
    pulse: Pulse,
    parts: list[Model],
    context: StepContext,
) -> BuiltModel:
    # Imported only where there is one: that takes a quarter as long as all the rest of the trainer.
    from trainkit.trainer.parallel.pipeline import PipelinePasses

    parallel, weights = config.parallel, weights_of(parts)
    passes = PipelinePasses(
        task,
        parts,
        world,
        context,
        pulse,
        parallel.pp_schedule,
        plan.batch.pp_microbatches or parallel.pp_microbatches,
        plan.batch.accumulation_steps,
    )
    ends = [weight.param for weight in weights if weight.name in parts[0].tied_names]
    return BuiltModel(parts, weights, passes, TiedEnds(ends, world))


def _build_part(task: Task, config: RunConfig, plan: LaunchPlan, world: World, piece: Part | None) -> Model:
    layout, parallel, place = plan.layout, config.parallel, world.place
    model = task.build_model(piece)
    shares_stream = parallel.sequence_parallel and layout.tp > 1
    stream_ranks, stream_rank = (layout.tp, place.tp) if shares_stream else (1, 0)
    model.see(seen_by(place.cp, layout.cp, stream_rank, stream_ranks, config.data.seq_len))
    blocks = model.layers
    if config.precision.float8:
        require_float8(world.device)
        apply_float8(blocks)
    if layout.tp > 1:
        assert world.mesh is not None
        apply_tensor_parallel(
            model,
            model.TENSOR_PLAN,
            world.mesh["tp"],
            sequence_parallel=parallel.sequence_parallel,
            loss_parallel=parallel.loss_parallel,
        )
        # Before anything is sharded: two parameters that only share their memory come apart there.
        model.tie()
    flash = has_flash(world.device, DTYPES[config.precision.dtype])
    if world.cp_group is not None:
        apply_context_parallel(model.attentions, world.cp_group, flash)
    if world.device.type == "cuda" and not flash:
        repeat_shared_heads(model.attentions)
    recompute_and_compile(blocks, parallel.activation_checkpointing, compiled=parallel.compile)
    if world.mesh is not None and not reduces_on_host(world):
        apply_data_parallel(
            model,
            blocks,
            world.mesh,
            layout,
            DTYPES[config.precision.dtype],
            zero=parallel.zero,
            offload=parallel.offload,
        )
    return model


def set_determinism(deterministic: bool) -> None:
    """Ask for kernels that give the same bits every time; the others are refused by torch."""
    if deterministic:
        torch.use_deterministic_algorithms(True)
