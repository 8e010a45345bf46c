"""Describes the work of a training step, and pipeline schedules, for estimating memory and time.

The functions have no side effects.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

from trainkit.config.optimizers import is_own
from trainkit.config.running import ParallelConfig, PipelineSchedule
from trainkit.config.schema import RunConfig, capabilities_of
from trainkit.config.training import NewtonSchulzPrecision
from trainkit.plan.feed_forward import FeedForwardKind
from trainkit.plan.launch import Batch, Layout
from trainkit.plan.model_shape import ModelShape
from trainkit.plan.optimizer_state import optimizer_bytes
from trainkit.shipped import load

STAGES_PER_RANK: dict[PipelineSchedule, int] = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved_1f1b": 2,
    "interleaved_zero_bubble": 2,
    "zbv": 2,
    "dualpipe_v": 2,
}
V_SHAPED: tuple[PipelineSchedule, ...] = ("zbv", "dualpipe_v")
"""Schedules that assign stages down the ranks and back up, so that the first rank also has the last stage."""

SPLIT_BACKWARD: tuple[PipelineSchedule, ...] = ("interleaved_zero_bubble", "zbv", "dualpipe_v")
"""Schedules that compute input gradients and weight gradients separately (zero bubble)."""


def num_stages(pp: int, schedule: PipelineSchedule) -> int:
    """Return the total number of stages on `pp` ranks; 1 without a pipeline."""
    return 1 if pp == 1 else pp * STAGES_PER_RANK[schedule]


def stages_of(pp_rank: int, pp: int, schedule: PipelineSchedule) -> list[int]:
    """Return the stages of one pipeline rank, in forward order."""
    if pp == 1:
        return [0]
    if schedule in V_SHAPED:
        return [pp_rank, 2 * pp - 1 - pp_rank]
    return list(range(pp_rank, num_stages(pp, schedule), pp))


def stage_layers(num_layers: int, stages: int) -> list[range]:
    """Split layers across stages as evenly as possible.

    The middle stages get the remaining layers, because the first stage also has the embedding and the last
    stage the head.
    """
    size, left = divmod(num_layers, stages)
    start = (stages - left) // 2
    bounds = [0]
    for stage in range(stages):
        bounds.append(bounds[-1] + size + (start <= stage < start + left))
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]


def compiles(parallel: ParallelConfig, layout: Layout, device: str) -> bool:
    """Return whether transformer blocks are compiled on a device type, ``cpu`` or ``cuda``.

    By default, blocks are not compiled if the pipeline schedule splits the backward pass, nor on CPUs, where
    compilation takes longer than a short run.
    """
    if parallel.compile is not None:
        return parallel.compile
    return device == "cuda" and (layout.pp == 1 or parallel.pp_schedule not in SPLIT_BACKWARD)


def sums_in_float32(parallel: ParallelConfig, layout: Layout, dtype: str, float8: bool) -> bool:
    """Return whether linear layers add 16-bit products to float32 sums of their weight gradients.

    Tensor parallelism and float8 replace the linear layers. If a schedule splits the backward pass, torch
    requests the weight gradients itself, and fails if a layer returns none.
    """
    splits = layout.pp > 1 and parallel.pp_schedule in SPLIT_BACKWARD
    return dtype != "fp32" and not float8 and layout.tp == 1 and not splits


MIN_BLOCK_HEAD_DIM = 16
"""Smallest head dimension for which the attention kernel can apply the document mask."""


def attends_in_blocks(parallel: ParallelConfig, shape: ModelShape, dtype: str, device: str) -> bool:
    """Return whether the attention kernel applies the document mask; requires a GPU and a 16-bit dtype."""
    compiled = device == "cuda" and parallel.compile is not False
    return compiled and dtype != "fp32" and shape.head_dim >= MIN_BLOCK_HEAD_DIM


@dataclass(frozen=True)
class StepWork:
    """The model, layout and batch of a step."""

    shape: ModelShape
    layout: Layout
    parallel: ParallelConfig
    """The config section `parallel`, except that the degrees in `layout` take precedence."""
    seq_len: int
    device_batch_size: int
    accumulation_steps: int
    dtype: str = "bf16"
    optimizer_bytes: float = 8
    """Bytes of optimizer state per parameter, except the matrices that Muon updates."""
    has_own_optimizer: bool = False
    """True for a user's optimizer, which needs whole float32 weights."""
    muon: NewtonSchulzPrecision | None = None
    """The precision in which Muon orthogonalizes the matrices of blocks; None with another optimizer."""
    added_bytes: float = 0
    """Bytes per parameter of the state that capabilities add."""
    warmup_batch_sizes: tuple[int, ...] = ()
    """The global batch sizes of the first steps; see ``train.batch_warmup``."""
    device: str = "cuda"
    """The type of device, ``cpu`` or ``cuda``. The estimate depends on the device, because CPU kernels save
    more activations than GPU kernels."""
    z_loss: bool = False
    """True if the gradient of the loss contains the z-loss."""
    document_mask: bool = False
    """True if attention uses a document mask, which rules out context and pipeline parallelism."""
    float8_gather: bool = False
    """True if the sharded weight matrices of blocks are gathered in float8."""
    float8: bool = False
    """True if blocks use float8 in any way."""

    @property
    def itemsize(self) -> int:
        """Return the bytes per element in the compute dtype."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def is_fused(self) -> bool:
        """Return whether compiled kernels of a GPU compute whole blocks and the loss.

        With tensor parallelism, the loss is not compiled.
        """
        compiled = compiles(self.parallel, self.layout, self.device)
        return compiled and self.device == "cuda" and self.layout.tp == 1

    @property
    def materializes_scores(self) -> bool:
        """Return whether soft-capped attention keeps all scores in memory."""
        if self.shape.attention_soft_cap is None:
            return False
        in_blocks = attends_in_blocks(self.parallel, self.shape, self.dtype, self.device)
        return self.layout.cp > 1 or not in_blocks

    @property
    def sums_in_float32(self) -> bool:
        """Return whether linear layers add 16-bit products to float32 sums of their weight gradients."""
        return sums_in_float32(self.parallel, self.layout, self.dtype, self.float8)

    @property
    def block_itemsize(self) -> int:
        """Return the bytes per parameter of a gathered block, ignoring the block's small norms."""
        return 1 if self.float8_gather and self.shards > 1 else self.itemsize

    @property
    def shards(self) -> int:
        """Return the number of ranks over which parameters, gradients and optimizer state are sharded."""
        return self.layout.shards

    @property
    def is_wrapped(self) -> bool:
        """Return whether `fully_shard` or `replicate` casts each unit's parameters when they are used."""
        return self.layout.world_size > 1 or self.parallel.wraps_one

    @property
    def splits_masters(self) -> bool:
        """Return whether the weights that compute are the upper halves of the float32 master weights."""
        return not self.is_wrapped and self.dtype == "bf16" and not self.has_own_optimizer

    @property
    def keeps_gathered(self) -> bool:
        """Return whether parameters stay gathered between the forward and the backward pass.

        Unsharded replicas have nothing to gather, and a pipeline needs the parameters for every microbatch.
        """
        copies = self.shards == 1 and self.layout.dp_replicate > 1 and not self.parallel.offload
        return copies or self.parallel.zero == 2 or self.layout.pp > 1

    @property
    def samples_per_pass(self) -> int:
        if self.layout.pp == 1:
            return self.device_batch_size
        return self.device_batch_size // self.parallel.pp_microbatches

    @property
    def passes_per_step(self) -> int:
        """Return the number of passes (microbatches) that a rank computes per optimizer step."""
        if self.layout.pp == 1:
            return self.accumulation_steps
        return self.parallel.pp_microbatches * self.accumulation_steps

    @property
    def recomputes_for_weights(self) -> bool:
        """Return whether activations are recomputed for input gradients and again for weight gradients."""
        parallel = self.parallel
        goes_back_twice = self.layout.pp > 1 and parallel.pp_schedule in SPLIT_BACKWARD
        return goes_back_twice and parallel.activation_checkpointing == "full"

    @property
    def tokens_per_pass(self) -> int:
        """Return the number of tokens per pass on a rank."""
        return self.samples_per_pass * self.seq_len // self.layout.cp

    @property
    def loss_chunks(self) -> int:
        """Return the number of chunks used to compute the loss of a pass."""
        return loss_chunks(self.layout, self.shape, self.tokens_per_pass)

    @property
    def tokens_per_step(self) -> int:
        """Return the total number of tokens per optimizer step across all ranks."""
        return self.samples_per_step * self.seq_len

    @property
    def samples_per_step(self) -> int:
        """Return the total number of samples per optimizer step, which is the global batch size."""
        return self.device_batch_size * self.accumulation_steps * self.layout.dp

    def divides(self, kind: FeedForwardKind) -> bool:
        """Return whether a feed-forward network has experts that are divided over ranks."""
        return self.layout.ep > 1 and kind.expert_params(self.shape.dim) > 0

    def with_parallel(self, **changes: object) -> StepWork:
        return replace(self, parallel=self.parallel.model_copy(update=changes))


IMBALANCE = 1.25
"""Assumed number of rows of the rank whose experts get the most rows, relative to the mean of all ranks."""

MAX_CHUNK_LOGITS = 2**28
"""Maximum number of logits per chunk, equivalent to 1 GiB in float32. Smaller chunks would be slower,
because each chunk reads and writes the gradient of the head's weight."""


def loss_chunks(layout: Layout, shape: ModelShape, tokens: int) -> int:
    """Return the number of chunks used to compute the loss of a pass; 1 means all tokens at once.

    With several chunks, the logits of a whole pass are never in memory at the same time. The loss is compiled
    for each chunk length, so chunks have equal lengths unless this requires at least twice the minimum number
    of chunks. Chunks require the head's gradient in float32, so they save memory only for large numbers of
    tokens. Tensor parallelism and pipelines already split the logits.
    """
    if layout.tp > 1 or layout.pp > 1 or tokens < 2 * shape.dim:
        return 1
    least = -(-tokens * shape.vocab_size // MAX_CHUNK_LOGITS)
    return next((chunks for chunks in range(least, 2 * least) if tokens % chunks == 0), least)


def work_of(
    config: RunConfig, shape: ModelShape, layout: Layout, batch: Batch, device: str = "cuda"
) -> StepWork:
    """Return the work of a step with the given config and layout; `batch` sets the number of microbatches."""
    microbatches = batch.pp_microbatches or config.parallel.pp_microbatches
    added_bytes = sum(load(name).bytes_per_param(config) for name in capabilities_of(config))
    return StepWork(
        shape=shape,
        layout=layout,
        parallel=config.parallel.model_copy(update={"pp_microbatches": microbatches}),
        seq_len=config.data.seq_len,
        device_batch_size=batch.device_batch_size,
        accumulation_steps=batch.accumulation_steps,
        dtype=config.precision.dtype,
        optimizer_bytes=optimizer_bytes(config.optimizer, shape),
        has_own_optimizer=is_own(config.optimizer.name),
        muon=config.optimizer.ns_precision if config.optimizer.name == "muon" else None,
        added_bytes=added_bytes,
        warmup_batch_sizes=tuple(stage.global_batch_size for stage in config.train.batch_warmup),
        device=device,
        z_loss=config.train.z_loss > 0,
        document_mask=config.data.document_mask,
        float8_gather=config.precision.float8 == "gather",
        float8=bool(config.precision.float8),
    )


# The functions below compute the pipeline bubble and the number of microbatches in flight for each schedule.
# Time is measured in forward passes through one stage. A forward pass takes 1, and a backward pass takes 2: 1
# for input gradients and 1 for weight gradients (zero bubble, arXiv 2401.10241). The formulas match torch's
# implementations of the pipeline schedules.

PASSES = 3
"""Number of passes per microbatch and stage: forward, input gradients and weight gradients."""
DEFERRED_WEIGHT_GRADS: tuple[PipelineSchedule, ...] = ("interleaved_zero_bubble", "zbv")
"""Schedules that defer weight gradients in every pass, except in the first stage. The other schedules in
`SPLIT_BACKWARD` defer weight gradients only at the start and end of a step."""


class InFlight(NamedTuple):
    """The passes and gradients that a pipeline rank keeps in memory at a potential memory peak."""

    whole: int
    """Number of forward passes, over all of the rank's stages, whose gradients have not been computed yet."""
    half: int = 0
    """Number of passes whose input gradients have been computed, but whose weight gradients have not."""
    summed: int = 0
    """Number of the rank's stages that have accumulated weight gradients."""


def bubble_fraction(schedule: PipelineSchedule, pp: int, num_microbatches: int) -> float:
    """Return the idle fraction of a rank's step: (p - 1) / (m + p - 1) for 1F1B and GPipe."""
    if pp == 1:
        return 0.0
    idle = _idle_passes(schedule, pp, num_microbatches)
    return idle / (idle + PASSES * STAGES_PER_RANK[schedule] * num_microbatches)


def _idle_passes(schedule: PipelineSchedule, pp: int, num_microbatches: int) -> int:
    """Return the idle time of a rank per step, in forward passes through one stage."""
    hops = pp - 1
    missing = max(0, pp - num_microbatches)
    if schedule == "interleaved_1f1b":
        return PASSES * (hops + missing)
    if schedule == "interleaved_zero_bubble":
        return hops + 2 * missing
    if schedule == "zbv":
        return max(hops, 4 * hops - 2 * (num_microbatches - 1))
    if schedule == "dualpipe_v":
        return hops
    return PASSES * hops


def stages_in_flight(schedule: PipelineSchedule, pp: int, pp_rank: int, num_microbatches: int) -> int:
    """Return the maximum number of forward passes whose activations a rank keeps, over all of its stages."""
    if pp == 1:
        return 1
    both = 2 * num_microbatches
    rounds = max(1, num_microbatches // pp)
    a_round = num_microbatches // rounds
    if schedule == "gpipe":
        return num_microbatches
    if schedule == "1f1b":
        return min(num_microbatches, pp - pp_rank)
    if schedule == "interleaved_1f1b":
        return min(both, a_round + 2 * (pp - 1 - pp_rank) + 1)
    if schedule == "interleaved_zero_bubble":
        return min(both, a_round + pp)
    if schedule == "zbv":
        return min(both, 2 * pp, num_microbatches + 1 + pp_rank)
    return min(both, 2 * pp + 1)


def worst_in_flight(
    schedule: PipelineSchedule, pp: int, pp_rank: int, num_microbatches: int
) -> list[InFlight]:
    """Return a rank's in-flight passes at the start of each backward pass where memory may peak."""
    most = stages_in_flight(schedule, pp, pp_rank, num_microbatches)
    stages = STAGES_PER_RANK[schedule]
    if schedule in DEFERRED_WEIGHT_GRADS:
        # With few microbatches, a rank finishes all its forward passes before the first of its two stages has
        # accumulated weight gradients.
        settled = pp + 1 if schedule == "zbv" else 2 * pp + (pp_rank == pp - 1)
        summed = stages if num_microbatches >= settled else 1
        if schedule == "interleaved_zero_bubble":
            half = min(pp_rank, most - 1)
            return [InFlight(most - half, half, summed)]
        half = 2 * min(pp_rank, num_microbatches - pp)
        # Deferred weight gradients are computed at the end of the step.
        at_end = [InFlight(pp - pp_rank, half, stages)] if half > 0 else []
        return [InFlight(most, summed=summed), *at_end]
    if most < stages * num_microbatches:
        return [InFlight(most, summed=stages)]
    # All forward passes finish before the first backward pass has produced gradients.
    return [InFlight(most), InFlight(most - 1, summed=stages)]


def losses_in_flight(schedule: PipelineSchedule, pp: int, num_microbatches: int) -> int:
    """Return the maximum number of microbatches whose losses the last stage keeps for backward passes."""
    if pp == 1:
        return 1
    if schedule == "gpipe":
        return num_microbatches
    if schedule == "interleaved_zero_bubble":
        return min(pp, num_microbatches)  # Interleaved zero bubble defers weight gradients.
    return 1
