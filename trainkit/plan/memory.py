"""Estimates the peak memory of a training step, by category, on the GPU that needs the most memory.

Weights, gradients and optimizer state are sharded as in ZeRO (arXiv 1910.02054). In float32, weights,
gradients and AdamW state take 4, 4 and 8 bytes per parameter, divided among ``dp_shard x cp x tp x pp``
ranks. Other memory varies during a step, so it is estimated for several phases; the phase with the largest
total determines the peak. Activations follow "Reducing Activation Recomputation" (arXiv 2205.05198), adapted
to blocks of RMSNorm, grouped-query attention without stored scores, and SwiGLU.

The estimate is meant for comparing layouts, so it omits small terms such as statistics, masks and the padding
of shards. Unlike the estimate, the simulation of a rank counts every tensor. The functions have no side
effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from trainkit.config.running import PipelineSchedule
from trainkit.config.training import NewtonSchulzPrecision
from trainkit.errors import Problem
from trainkit.formats import size
from trainkit.plan.feed_forward import FeedForwardKind
from trainkit.plan.gpus import Gpu
from trainkit.plan.launch import Layout
from trainkit.plan.model_shape import ModelShape, num_params, num_params_of_block
from trainkit.plan.muon import STATE_BYTES, UpdateCost, num_elements, stage_matrices, update_cost
from trainkit.plan.step_work import (
    DEFERRED_WEIGHT_GRADS,
    IMBALANCE,
    StepWork,
    losses_in_flight,
    num_stages,
    stage_layers,
    stages_of,
    worst_in_flight,
)

FLOAT32 = 4
RECOMPUTED_COPIES = 6
"""Number of copies of a block's activations in memory if weight gradients are deferred and activations are
recomputed. For each weight gradient, torch recomputes the activations, and frees no copy. Measured values
range from 5.5 to 6.4."""


class RankParams(NamedTuple):
    """Parameter counts on one pipeline rank, after tensor parallelism but before sharding."""

    layers: tuple[int, ...]
    """Number of layers in each of the rank's stages, in forward order."""
    dense_block: int
    """Number of parameters of each of the first `num_dense` blocks."""
    other_block: int
    """Number of parameters of each other block, without experts that other ranks have."""
    blocks: int
    """Number of parameters of all blocks, without experts that other ranks have."""
    experts: int
    """Number of parameters of the rank's experts, if experts are divided over `ep` ranks; otherwise 0."""
    ep: int
    tp: int
    num_dense: int
    """Number of blocks with a dense feed-forward network, in a model with experts."""
    embedding: int
    """Number of parameters of the embedding; 0 if the embedding is on another rank, or tied to a head on this
    rank."""
    head: int
    """Number of parameters of the head; 0 if the head is on another rank."""

    @property
    def num_layers(self) -> int:
        return sum(self.layers)

    @property
    def block(self) -> int:
        """Return the number of parameters of the largest block."""
        return max(self.dense_block, self.other_block)

    def of_first(self, count: int) -> int:
        """Return the number of parameters of the rank's first blocks."""
        num_dense = min(count, self.num_dense)
        return self.dense_block * num_dense + self.other_block * (count - num_dense)

    def experts_elsewhere(self, count: int) -> int:
        """Return the number of parameters by which the shards of the rank's first blocks exceed the blocks.

        The shards of all ranks with the same tensor-parallel rank contain 1 / tp of all experts. The result
        is negative if a rank has more experts than that.
        """
        num_routed = self.num_layers - self.num_dense
        in_a_block = (self.whole - self.gathered) // max(1, num_routed)
        return in_a_block * max(0, count - self.num_dense)

    @property
    def gathered(self) -> int:
        """Return the number of parameters that the rank computes with."""
        return self.blocks + self.embedding + self.head

    @property
    def whole(self) -> int:
        """Return the number of parameters in the shards of all ranks with the same tensor-parallel rank."""
        return self.gathered - self.experts + self.experts * self.ep // self.tp


@lru_cache(maxsize=4096)
def rank_params(shape: ModelShape, layout: Layout, schedule: PipelineSchedule, pp_rank: int) -> RankParams:
    """Return the parameter counts of one rank; the first stage has the embedding, and the last the head."""
    stages, mine = num_stages(layout.pp, schedule), stages_of(pp_rank, layout.pp, schedule)
    layers = [stage_layers(shape.num_layers, stages)[stage] for stage in mine]
    blocks = [_block_params(shape, layer, layout) for stage in layers for layer in stage]
    kinds = [shape.feed_forward(layer) for stage in layers for layer in stage]
    own = sum(kind.expert_params(shape.dim) for kind in kinds) // layout.ep
    num_dense = sum(layer < shape.dense_layers for stage in layers for layer in stage) if shape.moe else 0
    kinds_of_blocks = blocks[0] if num_dense else 0, blocks[-1] if len(blocks) > num_dense else 0
    matrix = shape.vocab_size * shape.dim // layout.tp
    has_head = stages - 1 in mine
    has_embedding = 0 in mine and not (has_head and shape.tie_embeddings)
    sizes = *kinds_of_blocks, sum(blocks), own if layout.ep > 1 else 0, layout.ep, layout.tp
    return RankParams(tuple(map(len, layers)), *sizes, num_dense, matrix * has_embedding, matrix * has_head)


def _block_params(shape: ModelShape, layer: int, layout: Layout) -> int:
    """Return the number of parameters of a block, and of its share of the final norm, on one rank."""
    kind = shape.feed_forward(layer)
    unsplit, experts = kind.unsplit_params(shape.dim), kind.expert_params(shape.dim)
    block = num_params_of_block(shape, layer) + shape.dim // shape.num_layers
    return (block - unsplit) // layout.tp + unsplit - experts + experts // layout.ep


def _mean_of_blocks(
    work: StepWork, params: RankParams, bytes_of: Callable[[StepWork, FeedForwardKind], int]
) -> float:
    """Return the mean bytes of a rank's blocks, which may have two kinds of feed-forward networks."""
    kinds = work.shape.feed_forward(0), work.shape.feed_forward(work.shape.num_layers - 1)
    share = params.num_dense / max(1, params.num_layers)
    return share * bytes_of(work, kinds[0]) + (1 - share) * bytes_of(work, kinds[1])


def _ranks_of(work: StepWork, kind: FeedForwardKind) -> float:
    """Return the number of ranks that split the activations of a feed-forward network.

    If experts are divided over ranks, the number is smaller for the rank that receives the most rows.
    """
    if work.divides(kind):
        return work.layout.tp / IMBALANCE
    return work.layout.tp if kind.is_split or work.parallel.sequence_parallel else 1


def stream_bytes(work: StepWork) -> int:
    """Return the size of the residual stream on one rank, in bytes per token."""
    return work.itemsize * work.shape.dim // (work.layout.tp if work.parallel.sequence_parallel else 1)


def _norm_bytes(work: StepWork) -> int:
    """Return the bytes per token that a norm saves for its backward pass; on CPUs, two float32 tensors."""
    return stream_bytes(work) * (2 * FLOAT32 // work.itemsize if work.device == "cpu" else 1)


def _scores(work: StepWork) -> float:
    """Return the number of attention scores per token on one rank."""
    return work.shape.num_heads * work.seq_len / work.layout.tp


def block_bytes(work: StepWork, kind: FeedForwardKind | None = None) -> int:
    """Return the bytes of activations that one block saves per pass without recomputation.

    `kind` is the block's feed-forward network; None means the feed-forward network of the last block.

    For each token, a block saves the inputs of all norms, of the qkv projection, and of the gate and up
    projections. Tensor parallelism splits the other tensors: queries, keys, values, the attention output,
    gate, up, silu(gate), and silu(gate) * up. Fused kernels compute silu(gate) again from gate, and save the
    float32 statistics of the norms and of attention. In float8, fused kernels also compute the outputs of the
    norms and silu(gate) * up again, because casts to float8 follow.
    """
    shape, layout, item = work.shape, work.layout, work.itemsize
    kind = kind or shape.feed_forward(shape.num_layers - 1)
    # GPUs have no flash attention for float32, so the keys and values are repeated for each query head.
    repeats_keys = work.device == "cuda" and work.dtype == "fp32"
    kv_dim = shape.query_dim if repeats_keys else shape.kv_dim
    # Context parallelism gathers keys and values, and concatenates the outputs of the two chunks.
    attended = (2 if layout.cp == 1 else 3) * shape.query_dim + 2 * kv_dim * layout.cp
    if shape.qk_norm:  # the inputs of the norms, which are float32 copies on CPUs
        attended += (shape.query_dim + shape.kv_dim) * (2 * FLOAT32 // item if work.device == "cpu" else 1)
    num_inner = 4 if not work.is_fused else 2 if work.float8 else 3
    inner = kind.saved(shape.dim, num_inner) / _ranks_of(work, kind)
    normed = 0 if work.is_fused and work.float8 else 2 * shape.dim
    a_token = shape.norms_per_block * _norm_bytes(work) + item * (normed + attended / layout.tp + inner)
    if work.materializes_scores:
        # The outputs of tanh and softmax are float32; a 16-bit copy of the latter is multiplied by values.
        a_token += (2 * FLOAT32 + (item if item < FLOAT32 else 0)) * _scores(work)
    a_token += kind.routing_bytes(shape.dim, item) / _ranks_of(work, kind)
    if work.is_fused:
        a_token += FLOAT32 * (2 + shape.num_heads)
    if shape.dropout:
        a_token += 2 * stream_bytes(work)  # Attention and feed-forward each save a dropout mask.
    mask = 0
    if layout.cp > 1 and work.device == "cpu":
        # Each of the two chunks attends to all tokens up to its own end; GPU kernels store no causal mask.
        mask = item * (work.seq_len // (2 * layout.cp)) ** 2 * (2 * layout.cp + 1)
    return round(work.tokens_per_pass * a_token) + mask


def kept_bytes(work: StepWork, kind: FeedForwardKind | None = None) -> int:
    """Return the bytes of activations that one block keeps from its forward to its backward pass.

    `kind` is the block's feed-forward network; None means the feed-forward network of the last block.
    The modes `pointwise` and `selective` keep the block's input, the results of attention, and the results of
    all or of every second matrix product. Tensor-parallel ranks keep reduced results instead of the products
    to be reduced. Fused kernels do not keep the last product, because no gradient depends on its values.
    """
    mode, shape, tp = work.parallel.activation_checkpointing, work.shape, work.layout.tp
    kind = kind or shape.feed_forward(shape.num_layers - 1)
    if mode == "none":
        return block_bytes(work, kind)
    a_token: float = stream_bytes(work)
    if mode != "full":
        is_pointwise = mode == "pointwise"
        # The products are wq, wk, wv, wo, gate, up and down; `selective` keeps wq, wv, gate and down.
        split: float = shape.query_dim + (2 if is_pointwise else 1) * shape.kv_dim
        if work.materializes_scores:  # the scores and the result of attention are matrix products too
            split += (shape.query_dim + _scores(work) * tp) if is_pointwise else 0
        else:
            # On Hopper, context-parallel attention merges the results of two kernel calls.
            split += shape.query_dim * (2 if work.layout.cp > 1 and work.device == "cuda" else 1)
        inner = work.itemsize * kind.products(shape.dim, all_of_them=is_pointwise) + kind.logit_bytes()
        a_token += work.itemsize * split / tp + inner / _ranks_of(work, kind)
        if tp > 1:
            a_token += (1 + kind.is_split) * stream_bytes(work)
        else:
            a_token += stream_bytes(work) * (is_pointwise + (kind.is_split and not work.is_fused))
        if work.is_fused:
            a_token += FLOAT32 * shape.num_heads
        if work.divides(kind) and shape.moe is not None:
            # The block is recomputed in parts, whose inputs are kept, and so are the exchanged rows.
            a_token += (2 + shape.moe.top_k * (1 + IMBALANCE)) * stream_bytes(work)
    return round(work.tokens_per_pass * a_token)


def _split_gradient_bytes(work: StepWork, kind: FeedForwardKind) -> int:
    """Return the bytes of output gradients that a block keeps per pass for deferred weight gradients."""
    shape = work.shape
    split = (shape.query_dim + 2 * shape.kv_dim) / work.layout.tp
    split += kind.output_gradients(shape.dim) / _ranks_of(work, kind)
    norms = (
        shape.norms_per_block * stream_bytes(work) * (FLOAT32 // work.itemsize if work.device == "cpu" else 1)
    )
    return round(work.tokens_per_pass * (norms + work.itemsize * (2 * shape.dim + split)))


def _logits(work: StepWork) -> float:
    ranks = work.layout.tp if work.parallel.loss_parallel else 1
    return work.tokens_per_pass * work.shape.vocab_size / ranks


def loss_bytes(work: StepWork) -> int:
    """Return the bytes that the loss of one microbatch occupies when its backward pass begins.

    The loss keeps log-probabilities, their gradients and the gradients of the logits, all in float32. torch's
    loss parallelism keeps one more copy, and a pipeline also keeps the logits. A fused loss keeps only the
    logits and their gradients, in the compute dtype. If the loss is computed in chunks, log-probabilities and
    gradients of logits exist only for one chunk, but the gradients of the head's weight and of the hidden
    states are kept as well.
    """
    is_split = work.parallel.loss_parallel and work.layout.tp > 1
    a_logit = FLOAT32 * (4 if is_split else 3)
    a_logit += work.itemsize if work.layout.pp > 1 else 0
    # The soft cap saves the output of tanh. The z-loss saves the logits and computes a second gradient; with
    # loss parallelism, the z-loss needs one copy less.
    a_logit += FLOAT32 * ((work.shape.logit_soft_cap is not None) + work.z_loss * (1 if is_split else 2))
    if work.is_fused:
        a_logit = 2 * work.itemsize
    found = _logits(work) / work.loss_chunks * a_logit
    if work.loss_chunks > 1:
        # Unless the gradient of the head's weight stays in float32, the loss also rounds the gradient.
        rounded = 0 if work.sums_in_float32 else work.itemsize
        found += work.shape.vocab_size * work.shape.dim * (FLOAT32 + rounded)
        found += work.tokens_per_pass * stream_bytes(work)
    return round(found)


@dataclass(frozen=True)
class Parts:
    """Memory in bytes, by category."""

    params: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """Activations kept for the backward pass, and activations of the block that is being recomputed."""
    loss: int = 0
    buffers: int = 0
    """Gathered and cast parameters, gradients being reduced, receive buffers of a pipeline, and matrices that
    Muon orthogonalizes."""

    @property
    def total(self) -> int:
        return sum(astuple(self))


@dataclass(frozen=True)
class Memory:
    """The memory of one rank in each phase of a step."""

    phases: dict[str, Parts]
    """Maps each phase to the memory in use. ``loss`` is the start of the backward pass of the loss,
    ``backward`` the start of the backward pass of a block, ``reduce`` the reduction of the last gradients,
    and ``update`` the optimizer step."""

    @cached_property
    def worst_phase(self) -> str:
        return max(self.phases, key=lambda phase: self.phases[phase].total)

    @cached_property
    def peak(self) -> int:
        """Return the total bytes in the phase that needs the most memory."""
        return self.phases[self.worst_phase].total

    @property
    def largest(self) -> Parts:
        """Return the maximum of each category over all phases; categories may peak in different phases."""
        return Parts(*map(max, zip(*map(astuple, self.phases.values()), strict=True)))


def memory_of(work: StepWork) -> Memory:
    """Return the memory of the rank that needs the most memory."""
    ranks = extreme_ranks(work)
    return max((rank_memory(work, rank) for rank in ranks), key=lambda found: found.peak)


def check_gpu_memory(work: StepWork, gpu: Gpu) -> tuple[str, Problem | None]:
    """Return a sentence about GPU memory use, and a problem if the run certainly does not fit in memory.

    If several GPU variants share a name, the variant with the most memory is assumed.
    """
    memory = memory_of(work)
    peak, worst = memory.peak, memory.phases[memory.worst_phase]
    text = f"about {size(peak)} of the {size(gpu.memory)} of each {gpu.name} ({peak / gpu.memory:.0%})"
    if work.splits_masters:
        text += "; each bf16 weight is the upper half of its float32 master weight: 4 bytes per parameter"
    if peak <= gpu.most_memory:
        return text if peak <= gpu.usable else f"{text}: little headroom is left", None
    # Report the config key that most affects the largest category of memory.
    state = worst.params + worst.gradients + worst.optimizer
    if state > gpu.most_memory or state > worst.total / 2:
        key, value = "parallel.dp_shard", work.layout.dp_shard
        most = f"{size(state)} for weights, gradients and optimizer state"
    else:
        key, value = "train.device_batch_size", work.device_batch_size
        most = f"{size(worst.activations + worst.loss)} for activations and loss"
    limit = f"{gpu.name} has {size(gpu.memory)}"
    if gpu.most_memory > gpu.memory:
        limit = f"even the largest GPU with that name has {size(gpu.most_memory)}"
    message = f"is {value}: each GPU needs about {size(peak)} ({most}), but {limit}"
    hint = "`trainkit plan` lists the settings that fit; add --gpus N to plan for more GPUs"
    return text, Problem(key, message, hint=hint)


def extreme_ranks(work: StepWork) -> list[int]:
    """Return the ranks that may need the most memory: first, last, and the one with the most layers."""
    pp, schedule = work.layout.pp, work.parallel.pp_schedule
    layers = [rank_params(work.shape, work.layout, schedule, rank).num_layers for rank in range(pp)]
    return sorted({0, layers.index(max(layers)), pp - 1})


def rank_memory(work: StepWork, pp_rank: int) -> Memory:
    """Return the memory of one pipeline rank; ranks with equal stages need the same amount of memory."""
    params = rank_params(work.shape, work.layout, work.parallel.pp_schedule, pp_rank)
    on_device = 0 if work.parallel.offload else params.whole // work.shards
    # A model that is not wrapped also keeps its weights in the compute dtype, unless the master weights are
    # split.
    is_cast = not work.is_wrapped and work.dtype != "fp32" and not work.splits_masters
    a_param = FLOAT32 + (work.itemsize if is_cast else 0)
    optimizer = 0.0
    if not work.parallel.offload:
        optimizer = _optimizer_bytes(work, params.whole, params.num_layers, params.num_dense)
    state = a_param * on_device, round(optimizer / work.shards)
    found: dict[str, Parts] = {}
    for name, gradients, activations, loss, buffers in (
        _phases(work, params) if work.layout.pp == 1 else _pipeline_phases(work, params, pp_rank)
    ):
        parts = Parts(state[0], gradients, state[1], activations, loss, buffers)
        found[name] = max(parts, found.get(name, parts), key=lambda item: item.total)
    return Memory(found)


def _optimizer_bytes(
    work: StepWork, num_params: int, num_layers: int, num_dense: int, layout: Layout | None = None
) -> float:
    """Return the bytes of the optimizer state of parameters that include `num_layers` blocks.

    `num_dense` of the blocks have a dense feed-forward network, in a model with experts.
    `layout`, or by default the layout of `work`, has split the parameters.
    """
    found = (work.optimizer_bytes + work.added_bytes) * num_params
    if work.muon is not None:
        matrices = stage_matrices(work.shape, num_layers, num_dense)
        found -= (work.optimizer_bytes - STATE_BYTES) * num_elements(matrices, layout or work.layout)
    return found


def muon_cost(work: StepWork, pp_rank: int) -> UpdateCost | None:
    """Return the cost of a pipeline rank's update with Muon, or None with another optimizer."""
    if work.muon is None:
        return None
    layout = work.layout
    params = rank_params(work.shape, layout, work.parallel.pp_schedule, pp_rank)
    ranks = Layout(layout.dp_replicate, layout.shards, layout.tp, ep=layout.ep)
    return _update_cost(work.shape, params.num_layers, params.num_dense, ranks, work.muon)


@lru_cache(maxsize=4096)
def _update_cost(
    shape: ModelShape, num_layers: int, num_dense: int, layout: Layout, precision: NewtonSchulzPrecision
) -> UpdateCost:
    return update_cost(stage_matrices(shape, num_layers, num_dense), layout, precision)


def muon_text(work: StepWork, cost: UpdateCost) -> str:
    """Return a sentence about the cost of an update with Muon."""
    matrices = num_elements(stage_matrices(work.shape, work.shape.num_layers, work.shape.dense_layers))
    prefix, unit = ("T", 1e12) if cost.flops >= 1e12 else ("G", 1e9)
    text = (
        f"muon for {matrices / num_params(work.shape):.0%} of the parameters, adamw for the rest; an update "
    )
    text += f"needs up to {cost.flops / unit:.3g} {prefix}FLOP per rank in {work.muon}"
    if sent := cost.exchanged_bytes + cost.shared_bytes:
        text += f", and each rank sends {size(sent)}"
    return text


def _gathered_by_muon(work: StepWork, pp_rank: int) -> int:
    cost = muon_cost(work, pp_rank)
    return 0 if cost is None else cost.peak_bytes


Phase = tuple[str, int, int, int, int]
"""A phase's name, followed by its bytes of gradients, activations, loss and buffers."""


def _phases(work: StepWork, params: RankParams) -> Iterator[Phase]:
    """Yield the phases of a step without a pipeline, where gradients are reduced once they are ready."""
    item, blocks, block, head = work.itemsize, params.num_layers, params.block, params.head
    is_wrapped, is_tied = work.is_wrapped, work.shape.tie_embeddings
    shard = FLOAT32 * params.whole // work.shards
    own = 0 if work.parallel.offload else shard
    made_bytes = (
        FLOAT32 if work.sums_in_float32 else item
    )  # Bytes per parameter of a gradient not yet reduced.
    waiting = 0  # Bytes of gradients accumulated in earlier passes.
    if work.accumulation_steps > 1:
        # With offloading, gradients move to the host after every pass if there is only one process, or if
        # there are shards without replicas.
        moves = work.layout.dp_replicate == 1 and (work.shards > 1 or work.layout.world_size == 1)
        waiting = own if moves else shard
    a_block, whole = work.block_itemsize * block, _gathered_bytes(work, params)
    # True if the parameters stay gathered for the next pass.
    stays = work.keeps_gathered and work.shards > 1 and work.passes_per_step > 1
    yield "update", own, 0, 0, _gathered_by_muon(work, 0)
    kinds = work.shape.feed_forward(0), work.shape.feed_forward(work.shape.num_layers - 1)
    kept_by_dense, kept = (kept_bytes(work, kind) for kind in kinds)
    in_block = _in_a_block(work, params)

    def kept_by_first(count: int) -> int:
        num_dense = min(count, params.num_dense)
        return kept_by_dense * num_dense + kept * (count - num_dense)

    gathered = (whole if work.keeps_gathered else item * head) if is_wrapped else 0
    yield "loss", waiting, kept_by_first(blocks) + _head_bytes(work), loss_bytes(work), gathered
    # Activations are freed and gradients created at constant rates, so the peak is near the start or end of
    # the backward pass.
    recomputed = [max(0, block_bytes(work, kind) - kept_bytes(work, kind)) for kind in kinds]
    # Tied embeddings stay gathered, and the head's gradient is kept until the embedding's gradient is ready.
    both_ends = head if is_wrapped and is_tied else 0
    for done in {0, min(1, blocks - 1), blocks - 1}:
        left = params.of_first(blocks - done)
        elsewhere = params.experts_elsewhere(blocks) - params.experts_elsewhere(blocks - done)
        own_done = params.blocks - left + elsewhere
        made = 0 if own == 0 else FLOAT32 * (own_done + head - both_ends) // work.shards
        again = recomputed[blocks - done > params.num_dense]
        buffers = in_block
        if is_wrapped:
            rest = work.block_itemsize * left + item * params.embedding
            following = min(2 * a_block, rest) if work.shards > 1 else a_block
            buffers += whole if stays else rest if work.keeps_gathered else following
            buffers += item * both_ends + FLOAT32 * (block if done else head - both_ends)
        gradients = (waiting or made) + made_bytes * both_ends
        yield "backward", gradients, kept_by_first(blocks - done) + again, 0, buffers
    if is_wrapped:
        end = params.embedding or head
        buffers = FLOAT32 * end + (whole if stays else 0)
        yield "reduce", (waiting or own) + made_bytes * end, 0, 0, buffers
        if not is_tied:  # The head's gradient is reduced before the gradients of the blocks.
            yield "reduce", waiting + made_bytes * head, kept_by_first(blocks), 0, gathered + FLOAT32 * head


def _pipeline_phases(work: StepWork, params: RankParams, pp_rank: int) -> Iterator[Phase]:
    """Yield the phases of a step with a pipeline, where gradients are reduced only after all passes."""
    item, layers, schedule = work.itemsize, params.layers, work.parallel.pp_schedule
    pp, passes, has_head = work.layout.pp, work.passes_per_step, params.head > 0
    is_deferred = schedule in DEFERRED_WEIGHT_GRADS
    # For each microbatch, a stage receives one input and one gradient. If weight gradients are deferred, the
    # gradient sent to the previous stage is kept too.
    received = (len(layers) - (pp_rank == 0)) * (2 if is_deferred else 1) + len(layers) - has_head
    buffers = received * passes * work.tokens_per_pass * stream_bytes(work)
    shard = 0 if work.parallel.offload else FLOAT32 * params.whole // work.shards
    yield "update", shard, 0, 0, buffers + _gathered_by_muon(work, pp_rank)
    buffers += _gathered_bytes(work, params)  # The parameters stay gathered for all passes.
    kept, block, split = (
        _mean_of_blocks(work, params, bytes_of)
        for bytes_of in (kept_bytes, block_bytes, _split_gradient_bytes)
    )
    last, at_head, logits = loss_bytes(work), _head_bytes(work), _logits(work)
    again, in_block, losses = max(0, round(block - kept)), _in_a_block(work, params) + item * params.head, 0
    if work.recomputes_for_weights:
        again, in_block = round(max(layers) * RECOMPUTED_COPIES * block), 0
    if has_head:
        others = losses_in_flight(schedule, pp, passes) - 1
        a_logit = item if is_deferred or work.is_fused else FLOAT32 + item
        losses = others * round(logits * a_logit + at_head)
    for state in worst_in_flight(schedule, pp, pp_rank, passes):
        # Deferred weight gradients are also kept in the compute dtype, except on the first stage.
        all_have = state.summed == len(layers)
        mean_block = params.blocks / max(1, params.num_layers)
        summed = params.gathered if all_have else state.summed * round(mean_block * layers[-1] + params.head)
        latest = summed - all_have * (params.embedding + (pp_rank == 0) * round(mean_block * layers[0]))
        gradients = FLOAT32 * summed + (item * latest if is_deferred else 0)
        activations = round(max(layers) * (state.whole * kept + state.half * (kept + split)))
        yield "backward", gradients, activations + again, losses, buffers + in_block
        if has_head:
            yield "loss", gradients, activations + at_head, last + losses, buffers


def _gathered_bytes(work: StepWork, params: RankParams) -> int:
    """Return the bytes of a rank's gathered parameters, of which the blocks' may be in float8."""
    ends = params.embedding + params.head
    return work.block_itemsize * params.blocks + work.itemsize * ends


def _head_bytes(work: StepWork) -> int:
    """Return the bytes per pass that the final norm and the head's input occupy."""
    return work.tokens_per_pass * (_norm_bytes(work) + work.itemsize * work.shape.dim)


def _in_a_block(work: StepWork, params: RankParams) -> int:
    """Return the bytes that a block's backward pass needs in addition to the saved activations.

    At first, the backward pass needs gradients of the SwiGLU's inner activations. Later, when most
    activations have been freed, the backward pass needs the gradients of all weights.
    """
    shape, tp, stream = work.shape, work.layout.tp, stream_bytes(work) * work.tokens_per_pass
    kind = shape.feed_forward(shape.num_layers - 1)
    numbers = shape.dim * (2 if tp > 1 else 1) + kind.gradients(shape.dim) / _ranks_of(work, kind)
    first = round(work.tokens_per_pass * work.itemsize * numbers)
    a_param = work.itemsize
    if work.sums_in_float32:
        # Sums that already exist from an earlier pass need no further memory.
        is_kept = work.passes_per_step > 1 and (work.shards == 1 or work.layout.pp > 1)
        a_param = 0 if is_kept else FLOAT32
        if work.device == "cpu":  # CPUs multiply copies in float32.
            first += FLOAT32 * work.tokens_per_pass * (shape.dim + (kind.hidden if kind.is_split else 0))
    first += a_param * params.block // 4
    return max(first, a_param * params.block + 4 * stream - block_bytes(work))


def checkpoint_bytes(work: StepWork) -> int:
    """Return the checkpoint size in bytes: the float32 weights and the optimizer state."""
    whole = num_params(work.shape)
    num_layers, num_dense = work.shape.num_layers, work.shape.dense_layers
    return round(FLOAT32 * whole + _optimizer_bytes(work, whole, num_layers, num_dense, Layout()))


def state_bytes(work: StepWork) -> int:
    """Return the bytes of a model's unsharded float32 weights and gradients, and of its optimizer state."""
    return checkpoint_bytes(work) + FLOAT32 * num_params(work.shape)
