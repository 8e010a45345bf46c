"""Builds the model of a task for training, in the one order that works for every layout.

Pipeline split, tensor and context parallelism, activation checkpointing, compile, data parallelism, and only
then memory and initial values: no rank ever allocates more of the model than its own shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trainkit.config.schema import RunConfig
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.layout_rules import compiles, loss_chunks
from trainkit.trainer.activation_checkpointing import recompute_and_compile
from trainkit.trainer.checkpoint.state import StateBuffers
from trainkit.trainer.distributed import World
from trainkit.trainer.forward_backward import ForwardBackward, ForwardContext, SequentialForwardBackward
from trainkit.trainer.metrics import LocalGradient
from trainkit.trainer.models.model import (
    Model,
    ReadWeight,
    StageSpec,
    Weight,
    local_tensor,
    move_buffers,
    weights_of,
)
from trainkit.trainer.parallel.context import apply_context_parallel, position_slice
from trainkit.trainer.parallel.data_parallel import apply_data_parallel, gradient_switch, reduces_on_host
from trainkit.trainer.parallel.tensor import apply_tensor_parallel
from trainkit.trainer.precision import DTYPES, apply_float8, cast_weights, require_float8
from trainkit.trainer.progress import Progress
from trainkit.trainer.quantization import read_quantized
from trainkit.trainer.stateless_random import fill_normal_
from trainkit.trainer.tasks import CausalLM
from trainkit.trainer.torch_private import shard_offset
from trainkit.trainer.user_task import UserTask, assemble_task, build_module

if TYPE_CHECKING:
    from trainkit.trainer.parallel.pipeline import TiedWeights

FLASH_CAPABILITY = (8, 0)
"""Compute capability of Ampere."""

Attend = Callable[..., Tensor]
"""Attention of queries [B, H, T, C] to keys and values [B, K, S, C], with a mask or without."""


def has_flash_attention(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's flash attention supports this dtype on the device."""
    if device.type != "cuda" or dtype == torch.float32 or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY


def repeat_kv_heads(attentions: list[nn.Module]) -> None:
    """Make attention modules repeat keys and values for every query head.

    For devices and masks without flash attention: for shared keys and values torch would choose a kernel that
    materialises all scores [B, H, T, S].
    """
    for attention in attentions:
        attention.attend = _repeating(cast(Attend, attention.attend))  # type: ignore[assignment]


def _repeating(attend: Attend) -> Attend:
    @wraps(attend)
    def repeating(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        repeats = q.shape[1] // k.shape[1]
        return attend(q, k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1), *mask)

    return repeating


@torch.no_grad()
def init_parameters(model: Model, seed: int) -> None:
    """Initialise this rank's shard of every parameter from N(0, std²) or with ones, as the model declares."""
    for own_name, param in model.named_parameters():
        name = model.canonical(own_name)
        shard, offset = local_tensor(param), cast(Sequence[int], (0,) * param.dim())
        if isinstance(param, DTensor):
            offset = shard_offset(param)
        std = model.init_std(name)
        if std is None:
            shard.fill_(1.0)
        else:
            fill_normal_(shard, std, f"{seed}/{name}", param.shape, offset)


@dataclass(frozen=True)
class BuiltModel:
    """The model on this rank and its forward and backward passes."""

    model_parts: Sequence[nn.Module]
    weights: Sequence[Weight]
    forward_backward: ForwardBackward[Any]
    tied_weights: TiedWeights | None
    buffers: StateBuffers | None = None
    """Buffers to save: those of a `Model` are functions of its shape."""
    read_weight: ReadWeight | None = None
    """The initial values of the weights with `is_read`."""


def build(
    task: CausalLM | UserTask,
    config: RunConfig,
    plan: LaunchPlan,
    world: World,
    progress: Progress,
    local_gradient: LocalGradient | None = None,
) -> BuiltModel:
    """The model of this rank on its device: split, in training mode, and with its initial values.

    Only the weights with `is_read` have no values yet.
    """
    if isinstance(task, UserTask):
        module = build_module(task, config, plan, world)
        read_quantized(module.model, task.read_weight, world.device)
        weights, forward_backward = assemble_task(task, config, world, progress, module, local_gradient)
        buffers = StateBuffers.of(module.model)
        return BuiltModel([module], weights, forward_backward, None, buffers, task.read_weight)
    model_parts = build_model_parts(task, config, plan, world)
    # Offloaded parameters stay on the host: FSDP copies them to the device per block, but not the buffers.
    param_device = torch.device("cpu") if config.parallel.offload else world.device
    for model in model_parts:
        model.to_empty(device=param_device)
        model.rebuild_buffers()
        move_buffers(model, world.device)
        if not task.reads_weights:
            init_parameters(model, config.seed)
    return assemble(task, config, plan, world, progress, model_parts, local_gradient)


def build_model_parts(task: CausalLM, config: RunConfig, plan: LaunchPlan, world: World) -> list[Model]:
    """The parts of the model on this rank, one per pipeline stage: split, on the meta device."""
    layout = plan.layout
    if layout.pp == 1:
        return [_build_part(task, config, plan, world, None)]
    from trainkit.trainer.parallel.pipeline import stage_specs  # see `_assemble_pipeline`

    stages = stage_specs(world.place.pp, layout.pp, config.parallel.pp_schedule, task.shape.num_layers)
    return [_build_part(task, config, plan, world, stage) for stage in stages]


def assemble(
    task: CausalLM,
    config: RunConfig,
    plan: LaunchPlan,
    world: World,
    progress: Progress,
    model_parts: list[Model],
    local_gradient: LocalGradient | None = None,
) -> BuiltModel:
    """Combine allocated model parts with the forward and backward passes of their layout."""
    layout, parallel = plan.layout, config.parallel
    for model in model_parts:
        model.train()
    positions = position_slice(world.place.cp, layout.cp, 0, 1, config.data.seq_len).attention
    # With loss parallelism the logits are a DTensor. Compiled, float32 logits do not reach memory.
    is_compiled = compiles(parallel, layout, world.device.type) and layout.tp == 1
    context = ForwardContext(
        world,
        torch.compile(task.nll_sum) if is_compiled else task.nll_sum,
        use_loss_parallel=parallel.loss_parallel and layout.tp > 1,
        positions=positions if layout.cp > 1 else None,
    )
    if layout.pp > 1:
        return _assemble_pipeline(task, config, plan, world, progress, model_parts, context)
    [model] = model_parts
    dtype = DTYPES[config.precision.dtype]
    is_cast = dtype != torch.float32 and not isinstance(model, FSDPModule)
    masters = cast_weights(model, dtype) if is_cast else {}
    tokens = plan.batch.device_batch_size * config.data.seq_len // layout.cp
    chunks = loss_chunks(layout, model.shape, tokens) if model.COMPUTES_LOSS else 1
    forward_backward = SequentialForwardBackward(
        model,
        gradient_switch(model, world, masters, offload=parallel.offload, local_gradient=local_gradient),
        context,
        progress,
        chunks,
    )
    weights = weights_of(model_parts, masters, is_read=task.reads_weights)
    return BuiltModel(model_parts, weights, forward_backward, None, None, task.read_weight)


def _assemble_pipeline(
    task: CausalLM,
    config: RunConfig,
    plan: LaunchPlan,
    world: World,
    progress: Progress,
    model_parts: list[Model],
    context: ForwardContext,
) -> BuiltModel:
    # Imported only if needed: it adds a quarter to the start-up time of the trainer.
    from trainkit.trainer.parallel.pipeline import PipelineForwardBackward, TiedWeights

    parallel = config.parallel
    weights = weights_of(model_parts, is_read=task.reads_weights)
    forward_backward = PipelineForwardBackward(
        model_parts,
        world,
        context,
        progress,
        parallel.pp_schedule,
        plan.batch.pp_microbatches or parallel.pp_microbatches,
        plan.batch.accumulation_steps,
    )
    tied = [weight.param for weight in weights if weight.name in model_parts[0].tied_names]
    tied_weights = TiedWeights(tied, world)
    return BuiltModel(model_parts, weights, forward_backward, tied_weights, None, task.read_weight)


def _build_part(
    task: CausalLM, config: RunConfig, plan: LaunchPlan, world: World, stage: StageSpec | None
) -> Model:
    layout, parallel, place = plan.layout, config.parallel, world.place
    model = task.build_model(stage)
    splits_stream = parallel.sequence_parallel and layout.tp > 1
    stream_rank, stream_ranks = (place.tp, layout.tp) if splits_stream else (0, 1)
    model.set_positions(position_slice(place.cp, layout.cp, stream_rank, stream_ranks, config.data.seq_len))
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
        # Before sharding, which would separate tied parameters.
        model.tie()
    flash = has_flash_attention(world.device, DTYPES[config.precision.dtype])
    if world.cp_group is not None:
        apply_context_parallel(model.attentions, world.cp_group, flash)
    if world.device.type == "cuda" and (not flash or config.data.document_mask):
        repeat_kv_heads(model.attentions)
    compiled = compiles(parallel, layout, world.device.type)
    recompute_and_compile(blocks, parallel.activation_checkpointing, compiled=compiled)
    if world.mesh is not None and not reduces_on_host(world):
        apply_data_parallel(
            model,
            world.mesh,
            layout,
            DTYPES[config.precision.dtype],
            zero=parallel.zero,
            offload=parallel.offload,
        )
    return model


def set_determinism(deterministic: bool) -> None:
    """If `deterministic`, make torch use only deterministic kernels and raise for operations without one."""
    if deterministic:
        torch.use_deterministic_algorithms(True)
