"""Build the model of a task, applying all transformations in the only order that works for every layout.

The order is: pipeline split, tensor parallelism, expert parallelism, context parallelism, activation
checkpointing, compilation, data parallelism. Parameters are allocated and initialized last, so that no rank
allocates more than its own shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from logging import getLogger
from types import CodeType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainkit.config.optimizers import is_own
from trainkit.config.running import Recomputation
from trainkit.config.schema import RunConfig
from trainkit.errors import UsageError
from trainkit.plan.launch import LaunchPlan, Layout
from trainkit.plan.step_work import attends_in_blocks, compiles, loss_chunks, sums_in_float32
from trainkit.run.files import open_private, write_atomic
from trainkit.run.rundir import RunDir
from trainkit.task import Task
from trainkit.trainer.causal_lm import CausalLM
from trainkit.trainer.checkpoint.state import StateBuffers
from trainkit.trainer.distributed import World, gather_from_all
from trainkit.trainer.forward_backward import (
    ForwardBackward,
    ForwardContext,
    LossModule,
    SequentialForwardBackward,
    TaskForwardBackward,
)
from trainkit.trainer.load_balance import LoadBalance
from trainkit.trainer.metrics import LocalGradient
from trainkit.trainer.models.decoder import Decoder
from trainkit.trainer.models.experts import Experts
from trainkit.trainer.models.model import (
    Model,
    ReadWeight,
    StageSpec,
    Weight,
    allocate,
    local_tensor,
    move_buffers,
    shard_index,
    weights_of,
)
from trainkit.trainer.parallel.context import (
    apply_context_parallel,
    attention_to_last,
    has_flash_attention,
    position_slice,
    repeat_kv_heads,
)
from trainkit.trainer.parallel.data_parallel import (
    apply_data_parallel,
    gradient_switch,
    reduces_on_host,
    sum_in_float32,
)
from trainkit.trainer.parallel.expert import apply_expert_parallel, experts_of
from trainkit.trainer.parallel.tensor import apply_tensor_parallel, fill_shards, find_styles, split_model
from trainkit.trainer.precision import DTYPES, Float8Gather, apply_float8, cast_weights, require_float8
from trainkit.trainer.progress import Progress
from trainkit.trainer.quantization import read_quantized
from trainkit.trainer.split_master import SPLIT_DTYPE, split_weights
from trainkit.trainer.stateless_random import fill_normal_, stable_key
from trainkit.trainer.task_batches import digest_of, seed_generators
from trainkit.trainer.torch_private import (
    ATTENTION_OPS,
    EXCHANGE_OPS,
    GROUPED_OPS,
    PRODUCT_OPS,
    compiled_anew,
    copy_each,
)
from trainkit.trainer.user_code import errors_of_user, refusal
from trainkit.trainer.user_task import UserTask

log = getLogger(__name__)
AnyTask = CausalLM | UserTask


def build_task(config: RunConfig, run: RunDir | None = None, checks_data: bool = True) -> AnyTask:
    """Return the task that a config specifies; if `run` is given, load user code from its code snapshot.

    If `checks_data`, check the size of every data shard; pass True on only one rank per job.
    """
    if not config.has_decoder:
        return UserTask(config, run)
    return CausalLM(config, run, checks_data)


@torch.no_grad()
def init_parameters(model: Model, seed: int) -> None:
    """Initialize this rank's shard of each parameter from N(0, std²) or with ones, as the model specifies."""
    for own_name, param in model.named_parameters():
        name = model.canonical(own_name)
        shard, offset = local_tensor(param), [part.start for part in shard_index(param)]
        std = model.init_std(name)
        if std is None:
            shard.fill_(1.0)
        else:
            fill_normal_(shard, std, f"{seed}/{name}", param.shape, offset)


def recompute_and_compile(
    blocks: list[nn.Module],
    mode: Recomputation,
    *,
    compiled: bool,
    preserve_rng_state: bool = False,
    divides_experts: bool = False,
) -> None:
    """Replace each block's forward method with a checkpointed and, if `compiled`, compiled version.

    The mode `full` recomputes the whole block. The mode `pointwise` saves the outputs of attention, of every
    matrix product and of reductions across tensor-parallel ranks, and recomputes everything else. The mode
    `selective` also recomputes every second matrix product. Parameter names do not change. In trainkit's
    models, dropout depends only on the sample, so recomputation draws the same mask. Modules that use torch's
    global random number generators need `preserve_rng_state`.

    If `divides_experts`, the parts of a block that has experts are compiled separately. With the modes
    `pointwise` and `selective`, the parts are also recomputed separately.
    """
    for block in blocks:
        if divides_experts and experts_of(block):
            _recompute_and_compile_parts(block, mode, compiled=compiled)
            continue
        if mode == "full":
            # Compile inside `checkpoint`: if torch.compile wrapped `checkpoint`, it would silently fall back
            # to eager mode.
            inner = torch.compile(block.forward) if compiled else block.forward
            block.forward = partial(
                checkpoint, inner, use_reentrant=False, preserve_rng_state=preserve_rng_state
            )
            continue
        if mode != "none":
            contexts = _all_products_saved if mode == "pointwise" else _half_of_products_saved
            block.forward = _selectively(block, contexts, preserve_rng_state)
        if compiled:
            # Do not use `block.compile()`, which would also try to compile the FSDP hooks, and fail.
            block.forward = torch.compile(block.forward)


def _recompute_and_compile_parts(block: nn.Module, mode: Recomputation, *, compiled: bool) -> None:
    """Call `recompute_and_compile` for each part of a block whose experts are divided over ranks.

    FSDP gathers and frees the experts' parameters around their forward method. Selective checkpointing would
    record these operations, and fail because they differ in the backward pass.
    """
    parts_mode: Recomputation = "none" if mode == "full" else mode
    for part in _parts(block):
        if isinstance(part, Experts) and compiled:
            # The sizes of the exchange depend on the data, so the exchange stands between compiled halves.
            part.dispatch = torch.compiler.disable(part.dispatch)  # type: ignore[no-untyped-call]
            part.compute = torch.compile(part.compute, dynamic=True)  # type: ignore[method-assign]
        # Compiled code cannot be interrupted inside `checkpoint`.
        is_whole = parts_mode == "none" or not isinstance(part, Experts)
        recompute_and_compile([part], parts_mode, compiled=compiled and is_whole)
    if mode == "full":
        recompute_and_compile([block], mode, compiled=False)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the experts in a module, and the largest modules that contain no experts."""
    if isinstance(module, Experts) or not experts_of(module):
        yield module
        return
    for child in module.children():
        yield from _parts(child)


class CompileCache:
    """Code compiled on rank 0, saved in the run folder so that later attempts can reuse it on other hosts.

    In addition, torch caches compiled code on each host's disk. If a later attempt uses a CPU or a different
    GPU model, torch compiles again.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._loaded: set[str] = set()

    def load(self) -> None:
        """Load the code saved by an earlier attempt, unless it is damaged or from another torch version."""
        file = self._run.compiled_file
        try:
            with open_private(file) as stream:  # must be private, because torch unpickles this file
                info = torch.compiler.load_cache_artifacts(stream.read())
            self._loaded = set() if info is None else {*chain(*info.artifacts.values())}
        except FileNotFoundError:
            pass
        except (OSError, UsageError) as error:
            log.warning(f"cannot load the compiled code from {file} ({error})")

    def save(self) -> None:
        """Save the compiled code, unless all of it was loaded from the run folder."""
        found = torch.compiler.save_cache_artifacts()
        if found is None or self._loaded.issuperset(chain(*found[1].artifacts.values())):
            return
        try:
            write_atomic(self._run.compiled_file, found[0])
        except OSError as error:
            log.error(f"cannot save the compiled code to {self._run.compiled_file} ({error})")

    def source(self) -> str:
        """Return which cache was used, ``run`` or ``host``, or ``cold`` if any code was newly compiled."""
        if compiled_anew():
            return "cold"
        return "run" if self._loaded else "host"


def _selectively(
    block: nn.Module, contexts: Callable[[], Any], preserve_rng_state: bool
) -> Callable[..., Any]:
    """Return a closure that checkpoints the forward method of a block selectively.

    The closure is not a `partial`, because torch.compile cannot trace a `partial`.
    """
    inner = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            inner,
            *args,
            use_reentrant=False,
            preserve_rng_state=preserve_rng_state,
            context_fn=contexts,
            **kwargs,
        )

    # torch.compile limits the number of graphs per code object, so each class of modules has its own.
    forward.__code__ = _code_of(type(block), forward.__code__)  # type: ignore[arg-type]
    return forward


@cache
def _code_of(kind: type, code: CodeType) -> CodeType:
    """Return a copy of a code object, the same copy for each call with the same class."""
    return code.replace()


def _all_products_saved() -> Any:
    """Return checkpoint contexts that save matrix products, attention and reductions."""

    def policy(context: Any, op: Callable[..., Any], *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op in ATTENTION_OPS or op in EXCHANGE_OPS or (op in PRODUCT_OPS and not _is_partial(args))
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def _half_of_products_saved() -> Any:
    """Return checkpoint contexts with a new policy, so that each block's matmuls are counted separately."""
    counts: Counter[bool] = Counter()

    def policy(context: Any, op: Callable[..., Any], *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in ATTENTION_OPS or op in EXCHANGE_OPS:
            return CheckpointPolicy.MUST_SAVE
        if op is torch.ops.aten.mm.default or op in GROUPED_OPS:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 and not _is_partial(args):
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def _is_partial(args: tuple[Any, ...]) -> bool:
    """Return whether a matrix product yields partial results; the reduction's result is saved instead."""
    left = args[-2]
    return isinstance(left, DTensor) and any(part.is_shard(left.ndim - 1) for part in left.placements)


@dataclass(frozen=True)
class BuiltModel:
    """This rank's part of the model, with its forward and backward passes."""

    model_parts: Sequence[nn.Module]
    """The whole model, or this rank's pipeline stages."""
    weights: Sequence[Weight]
    forward_backward: ForwardBackward[Any]
    buffers: StateBuffers | None = None
    """Buffers that a forward pass may change; None for a `Model`, whose buffers are computed from its
    configuration, except those of its `load_balance`."""
    read_weight: ReadWeight | None = None
    """Reads the initial value of a weight whose `is_read` is set."""
    sum_tied_gradients: Callable[[], None] = lambda: None
    """Sums the gradients of an embedding and a head that share weights but are in different pipeline
    stages."""
    load_balance: LoadBalance | None = None
    """Balances the load of the experts; None for a model without experts."""
    update_scales: Callable[[], None] = lambda: None
    """Updates the scales of weights that are gathered in float8; to be called whenever the weights have
    changed."""
    after_step: Callable[[], None] = lambda: None
    """Calls `Task.after_step` if the task defines this method."""
    unsplit_reason: str = ""
    """Why the bf16 weights are not the upper halves of float32 master weights, if they could be."""

    @property
    def saved_buffers(self) -> Mapping[str, Tensor]:
        """Map names to the buffers that a checkpoint contains."""
        if self.load_balance is not None:
            return self.load_balance.biases
        return {} if self.buffers is None else self.buffers.tensors


def build(
    task: AnyTask, plan: LaunchPlan, world: World, progress: Progress, local_gradient: LocalGradient
) -> BuiltModel:
    """Return this rank's part of the model on its device, in training mode, with its initial values.

    Weights with `is_read` set are still uninitialized: their values are later read from files.
    """
    if isinstance(task, UserTask):
        return build_for_task(task, world, progress, local_gradient)
    config, model_parts = task.config, build_model_parts(task, plan, world)
    # FSDP copies offloaded parameters to the device block by block, but does not copy buffers.
    param_device = torch.device("cpu") if config.parallel.offload else world.device
    for model in model_parts:
        model.to_empty(device=param_device)
        model.rebuild_buffers()
        move_buffers(model, world.device)
        if not task.reads_weights:
            init_parameters(model, config.seed)
    return assemble(task, plan, world, progress, model_parts, local_gradient)


def build_model_parts(task: CausalLM, plan: LaunchPlan, world: World) -> list[Model]:
    """Return this rank's model parts, one per pipeline stage, on the meta device."""
    pp, schedule = plan.layout.pp, task.config.parallel.pp_schedule
    if pp == 1:
        return [_build_part(task, plan, world, None)]
    from trainkit.trainer.parallel.pipeline import stage_specs  # slow to import, so imported only when needed

    stages = stage_specs(world.place.pp, pp, schedule, task.shape.num_layers)
    return [_build_part(task, plan, world, stage) for stage in stages]


def assemble(
    task: CausalLM,
    plan: LaunchPlan,
    world: World,
    progress: Progress,
    model_parts: list[Model],
    local_gradient: LocalGradient | None = None,
) -> BuiltModel:
    """Return a `BuiltModel` with allocated model parts, and forward and backward passes for the layout."""
    layout, config, parallel = plan.layout, task.config, task.config.parallel
    for model in model_parts:
        model.train()
    positions = position_slice(world.place.cp, layout.cp, 0, 1, config.data.seq_len).attention
    # Compile the loss, because a compiled loss does not keep the float32 logits in memory. With tensor
    # parallelism, do not compile the loss, because the logits may be a DTensor.
    is_compiled = compiles(parallel, layout, world.device.type) and layout.tp == 1
    context = ForwardContext(
        world,
        torch.compile(task.nll_sum) if is_compiled else task.nll_sum,
        use_loss_parallel=parallel.loss_parallel and layout.tp > 1,
        positions=positions.to(world.device) if layout.cp > 1 else None,
    )
    update_scales = _gather_in_float8(task, layout, world, model_parts)
    load_balance = None if task.shape.moe is None else LoadBalance(model_parts, task.shape, world.device)
    dtype = DTYPES[config.precision.dtype]
    is_cast = dtype != torch.float32 and not isinstance(model_parts[0], FSDPModule)
    sums = sums_in_float32(parallel, layout, config.precision.dtype, bool(config.precision.float8))
    can_split = is_cast and dtype == SPLIT_DTYPE
    reason = _own_optimizer(config) if can_split else ""
    read_weight = task.read_weight if task.reads_weights else None
    lowers = split_weights(model_parts[0], rounds_gradients=not sums) if can_split and not reason else {}
    masters = cast_weights(model_parts[0], dtype) if is_cast else {}
    if sums:
        for model in model_parts:
            sum_in_float32(model, masters)
    if layout.pp > 1:
        # Import the pipeline module only if needed, because importing it adds 25 % to the trainer's start-up
        # time.
        from trainkit.trainer.parallel.pipeline import PipelineForwardBackward, sum_tied_gradients

        weights = weights_of(model_parts, is_read=task.reads_weights)
        pipeline = PipelineForwardBackward(model_parts, context, progress, parallel, plan.batch)
        if load_balance is not None:
            pipeline.set_shapes(dtype)  # A pass that determines shapes would be counted as a load.
        tied = [weight.param for weight in weights if weight.name in model_parts[0].tied_names]
        sum_tied = partial(sum_tied_gradients, tied, world)
        return BuiltModel(
            model_parts, weights, pipeline, None, read_weight, sum_tied, load_balance, update_scales
        )
    [model] = model_parts
    tokens = plan.batch.device_batch_size * config.data.seq_len // layout.cp
    chunks = loss_chunks(layout, model.shape, tokens) if model.COMPUTES_LOSS else 1
    switch = gradient_switch(model, world, parallel, masters, local_gradient)
    forward_backward = SequentialForwardBackward(switch, progress, model, context, chunks)
    weights = weights_of(model_parts, masters, lowers, is_read=task.reads_weights)
    return BuiltModel(
        model_parts,
        weights,
        forward_backward,
        read_weight=read_weight,
        load_balance=load_balance,
        update_scales=update_scales,
        unsplit_reason=reason,
    )


def _own_optimizer(config: RunConfig) -> str:
    """Return why master weights cannot be split for a user's optimizer, or "" for other optimizers."""
    name = config.optimizer.name
    return f"{name} needs float32 parameters" if is_own(name) else ""


def _gather_in_float8(
    task: CausalLM, layout: Layout, world: World, model_parts: list[Model]
) -> Callable[[], None]:
    """Enable float8 gathering of sharded weights if configured; return a function that updates the scales."""
    if task.config.precision.float8 != "gather" or layout.shards == 1:
        return lambda: None
    assert world.mesh is not None
    return Float8Gather(model_parts, world.mesh["dp_shard"].get_group()).update


def _build_part(task: CausalLM, plan: LaunchPlan, world: World, stage: StageSpec | None) -> Model:
    config, layout, parallel, place = task.config, plan.layout, task.config.parallel, world.place
    model = task.build_model(stage)
    splits_stream = parallel.sequence_parallel and layout.tp > 1
    stream_rank, stream_ranks = (place.tp, layout.tp) if splits_stream else (0, 1)
    model.set_positions(position_slice(place.cp, layout.cp, stream_rank, stream_ranks, config.data.seq_len))
    blocks = model.layers
    if config.precision.float8:
        require_float8(world.device)
        apply_float8(blocks, rowwise=config.precision.float8 == "rowwise")
    if layout.tp > 1:
        assert world.mesh is not None
        apply_tensor_parallel(model, world.mesh["tp"], parallel)
        # Tie the parameters before sharding, because sharding would turn tied parameters into separate
        # tensors.
        model.tie()
    if world.expert_mesh is not None:
        apply_expert_parallel(model, world.expert_mesh, balanced=world.is_simulated)
    kind, dtype, masked = (
        world.device.type,
        config.precision.dtype,
        isinstance(model, Decoder) and model.has_masks,
    )
    if world.cp_group is not None:
        to_last = attention_to_last(world.device, DTYPES[dtype], model.shape.head_dim)
        apply_context_parallel(model.attentions, world.cp_group, to_last)
    flash = has_flash_attention(world.device, DTYPES[dtype])
    in_blocks = masked and flash and layout.cp == 1
    if in_blocks and attends_in_blocks(parallel, model.shape, dtype, kind):
        cast(Decoder, model).attend_in_blocks()
    elif kind == "cuda" and (not flash or masked):
        repeat_kv_heads(model.attentions)
    compiled = compiles(parallel, layout, kind)
    recompute_and_compile(
        blocks, parallel.activation_checkpointing, compiled=compiled, divides_experts=layout.ep > 1
    )
    if world.mesh is not None and not reduces_on_host(world):
        apply_data_parallel(
            model,
            world.mesh,
            layout,
            DTYPES[config.precision.dtype],
            zero=parallel.zero,
            offload=parallel.offload,
            expert_mesh=world.expert_mesh,
        )
    return model


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Modules whose weights remain in float32, the dtype of their running statistics."""


def build_module(task: UserTask, world: World) -> LossModule:
    """Return the model of a user's task on this rank's device, wrapped for data parallelism."""
    config = task.config
    model, parallel, dtype = task.build_model(), config.parallel, DTYPES[config.precision.dtype]
    check_same_weights(model, config, world)
    with errors_of_user(config, "layers() failed"):
        layers = task.task.layers(model)
    module = LossModule(model, task.task, config)
    values: Mapping[str, Tensor] = {}
    if world.layout.tp > 1:
        assert world.mesh is not None
        styles = find_styles(task.task, config, model, world.layout.tp)
        values = split_model(config, model, styles, world.mesh["tp"])
    recompute_and_compile(
        layers,
        parallel.activation_checkpointing,
        compiled=parallel.compile is True,
        preserve_rng_state=True,
    )
    if world.mesh is None or reduces_on_host(world):
        if dtype != torch.float32:
            cast_weights(model, dtype, BATCH_NORMS, only_frozen=True)
        allocate(module, world.device)
        return module.to(world.device)
    apply_data_parallel(
        module,
        world.mesh,
        world.layout,
        dtype,
        layers=layers,
        float32=[item for item in model.modules() if isinstance(item, BATCH_NORMS)],
        zero=parallel.zero,
        offload=parallel.offload,
    )
    if hasattr(module, "set_reduce_scatter_unused_params"):
        # With PyTorch 2.13 or newer, also reduce the gradients of parameters that this rank's batch does not
        # use.
        cast(Any, module).set_reduce_scatter_unused_params(True)
    allocate(module, torch.device("cpu") if parallel.offload else world.device)
    fill_shards(model, values)
    if parallel.offload:
        move_buffers(module, world.device)
        return module
    return module.to(world.device)


def check_same_weights(model: nn.Module, config: RunConfig, world: World) -> None:
    """Raise TaskError if the initial weights differ between ranks."""
    found = gather_from_all(digest_of(model), world)
    different = next((rank for rank, value in enumerate(found) if value != found[0]), None)
    if different is not None:
        message = f"build_model() returned a different model on rank {different} than on rank 0"
        hint = "read the same files on all ranks, and do not seed random, numpy.random or torch"
        raise refusal(config, message, hint)


def build_for_task(
    task: UserTask, world: World, progress: Progress, local_gradient: LocalGradient
) -> BuiltModel:
    """Return this rank's part of the model of a user's task; see `build`."""
    config, module = task.config, build_module(task, world)
    model, dtype = module.model, DTYPES[config.precision.dtype]
    read_quantized(model, task.read_weight, world.device)
    module.train()
    is_cast = dtype != torch.float32 and not isinstance(module, FSDPModule)
    is_changed = type(task.task).after_step is not Task.after_step
    can_split = is_cast and dtype == SPLIT_DTYPE
    reason = _own_optimizer(config) if can_split else ""
    if can_split and (is_changed or task.has_own_optimizers):
        method = "Task.after_step" if is_changed else "the optimizer of Task.optimizers"
        reason = f"{method} needs float32 parameters"
    lowers = split_weights(model, keep=BATCH_NORMS) if can_split and not reason else {}
    masters = cast_weights(model, dtype, keep=BATCH_NORMS) if is_cast else {}
    weights = []
    # True if frozen parameters are read again at every start, so that checkpoints can omit them.
    is_reread = bool(getattr(task.task, "rereads_frozen", False))
    for name, param in model.named_parameters():
        master, cast_param = (masters[param], param) if param in masters else (param, None)
        options, is_read = task.task.parameter_options(name, param), name in module.read_names
        flags = is_read, is_reread, is_changed
        weights.append(Weight(name, master, False, cast_param, lowers.get(param), options, *flags))
    switch = gradient_switch(module, world, config.parallel, masters, local_gradient)
    passes = TaskForwardBackward(switch, progress, module, config, world)
    buffers = StateBuffers(model)
    built = BuiltModel([module], weights, passes, buffers, task.read_weight, unsplit_reason=reason)
    return (
        replace(built, after_step=AfterStep(module, weights, config, world.device)) if is_changed else built
    )


class AfterStep:
    """Calls `Task.after_step` with this rank's float32 parameters, then updates the low-precision copies."""

    def __init__(
        self, module: LossModule, weights: Sequence[Weight], config: RunConfig, device: torch.device
    ) -> None:
        self._module, self._config, self._device = module, config, device
        self._parameters = {weight.name: local_tensor(weight.param.detach()) for weight in weights}
        self._casts = {
            weight.name: local_tensor(weight.cast.detach()) for weight in weights if weight.cast is not None
        }

    @torch.no_grad()
    def __call__(self) -> None:
        task, dtype = self._module.task, DTYPES[self._config.precision.dtype]
        seed = stable_key(self._config.seed, "after_step", task.step)
        seed_generators(seed)
        torch.manual_seed(seed)  # also seeds the device's generator
        with torch.autocast(self._device.type, dtype, enabled=dtype != torch.float32):
            task.after_step(self._module.model, dict(self._parameters))
        if self._casts:
            copy_each(list(self._casts.values()), [self._parameters[name] for name in self._casts])
