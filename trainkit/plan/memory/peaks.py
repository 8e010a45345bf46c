"""Peak memory of a step on the GPU that needs the most, by category. Pure.

Parameters, gradients and optimizer state are sharded as in ZeRO (arXiv 1910.02054): in float32, 4, 4 and, for
AdamW, 8 bytes per parameter, over ``dp_shard x cp x tp x pp`` ranks. Other memory varies within a step, so it
is computed for a few phases; the phase with the most memory is the peak.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import cached_property

from trainkit.plan.memory.activations import (
    block_bytes,
    document_mask_bytes,
    gradient_bytes,
    head_bytes,
    kept_bytes,
    kept_loss_bytes,
    loss_bytes,
    recomputed_bytes,
    split_gradient_bytes,
    split_loss_bytes,
    stream_bytes,
)
from trainkit.plan.memory.weights import (
    FLOAT32,
    ParamCounts,
    StageParams,
    rank_param_counts,
    stage_params,
    unit_blocks,
)
from trainkit.plan.schedules import DEFERRED_WEIGHT_GRADS, InFlight, losses_in_flight, worst_in_flight
from trainkit.plan.step_work import StepWork

RECOMPUTED_COPIES = 6
"""Copies of a block's activations during deferred weight gradients with recomputation: torch recomputes them
for each weight and frees none. Measured: 5.5 to 6.4 copies."""


@dataclass(frozen=True)
class Simulation:
    """The second step of one rank, as the simulation in the trainer counts it."""

    rank: int
    world_size: int
    peak_bytes: dict[str, int]
    """By kind, and ``total``."""
    collectives: dict[str, int]
    """Kind -> how many."""
    num_params: int
    """On this rank."""
    seconds: float
    """Duration of the simulation."""


@dataclass(frozen=True)
class Parts:
    """Memory by category, in bytes."""

    params: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """Activations kept for the backward pass, and those of the block being recomputed."""
    loss: int = 0
    buffers: int = 0
    """Gathered and cast parameters, gradients in communication, and pipeline receive buffers."""

    @property
    def total(self) -> int:
        return self.params + self.gradients + self.optimizer + self.activations + self.loss + self.buffers

    def plus(self, *, gradients: int = 0, activations: int = 0, loss: int = 0, buffers: int = 0) -> Parts:
        """These parts with additional bytes."""
        return Parts(
            self.params,
            self.gradients + gradients,
            self.optimizer,
            self.activations + activations,
            self.loss + loss,
            self.buffers + buffers,
        )


def receive_buffers(work: StepWork, params: StageParams) -> int:
    """The bytes of a pipeline's receive buffers: one input and one gradient per microbatch."""
    if work.layout.pp == 1:
        return 0
    inputs, outputs = (len(params.layers) - is_end for is_end in (params.has_embedding, params.has_head))
    if work.parallel.pp_schedule in DEFERRED_WEIGHT_GRADS:
        inputs *= 2  # the input's gradient, which is sent on, is also kept until the end of the step
    return (inputs + outputs) * work.passes_per_step * work.tokens_per_pass * stream_bytes(work)


@dataclass(frozen=True)
class MemoryPeaks:
    """Computes the memory of one rank in each phase of a step."""

    work: StepWork
    stage_params: StageParams
    counts: ParamCounts
    in_flight: InFlight

    def loss(self) -> Parts:
        """The memory at the start of the loss's backward pass, with all activations allocated."""
        blocks = self.stage_params.num_layers
        return self._static().plus(
            gradients=self._waiting(blocks) + self._reduced(0, has_head=False),
            activations=self._activations(blocks) + head_bytes(self.work),
            loss=loss_bytes(self.work) + self._other_losses(),
            buffers=self._cast(blocks),
        )

    def backward(self) -> Parts:
        """The memory at the start of the backward pass of the block with the highest peak.

        Activations are freed and gradients allocated at constant rates, so the peak is near one of the ends.
        """
        units = -(-self.stage_params.num_layers // self._unit_blocks)
        places = {0} if self.work.layout.pp > 1 else {0, min(1, units - 1), max(0, units - 2), units - 1}
        return max((self._backward_after(place) for place in places), key=lambda parts: parts.total)

    def reduce(self) -> Parts:
        """The memory while the gradients outside the blocks are copied to the communication buffer."""
        if self.work.layout.pp > 1:
            # A pipeline reduces gradients only after the schedule ends.
            blocks = self.stage_params.num_layers
            return self._static().plus(
                gradients=self._waiting(blocks), buffers=self._cast(blocks) + FLOAT32 * self._unit
            )
        found = [self._reduce_last(), *([self._reduce_head()] if self.counts.head_unit else [])]
        return max(found, key=lambda parts: parts.total)

    def _reduce_head(self) -> Parts:
        """The memory while the head's gradient is copied, before the backward pass of the blocks."""
        blocks, head = self.stage_params.num_layers, self.counts.head_unit
        return self._static().plus(
            gradients=self._waiting(blocks) + self._reduced(0, has_head=False) + self.work.itemsize * head,
            activations=self._activations(blocks),
            buffers=self._cast(blocks) + FLOAT32 * head,
        )

    def _reduce_last(self) -> Parts:
        """The memory while the last gradients are copied, after the backward pass of the blocks."""
        counts = self.counts
        last = counts.embedding_unit or counts.root
        # The unsharded gradients are freed before this rank's shard of them is allocated.
        shard = last * counts.ends_shard // max(1, counts.ends)
        whole = (FLOAT32 if self.has_gradients else self.work.itemsize) * last
        reduced = self._reduced(self.stage_params.num_layers, has_head=True)
        return self._static().plus(gradients=reduced + max(whole, FLOAT32 * shard), buffers=FLOAT32 * last)

    def update(self) -> Parts:
        """The memory during the optimizer step."""
        return self._static().plus(gradients=0 if self.work.parallel.offload else self._all_reduced)

    def _backward_after(self, units_done: int) -> Parts:
        """The memory at the start of a block's backward pass, after `units_done` units."""
        work = self.work
        done = units_done * self._unit_blocks
        left = self.stage_params.num_layers - done
        parts = self._static().plus(
            gradients=self._waiting(left, has_head=False)
            + self._reduced(done, has_head=True)
            + self._head_gradient(),
            activations=self._activations(left) + recomputed_bytes(work),
            loss=self._other_losses(),
            buffers=self._cast(left, has_head=False) + self._gathered_units(left) + self._in_a_block(),
        )
        in_flight = self._unit if done else self.counts.head_unit
        return parts.plus(buffers=FLOAT32 * in_flight if work.is_wrapped and work.layout.pp == 1 else 0)

    def _static(self) -> Parts:
        """The memory that is allocated in every phase."""
        sharded = self.counts.block_shard * self.stage_params.num_layers + self.counts.ends_shard
        on_device = 0 if self.work.parallel.offload else sharded
        # One process also keeps the weights in the compute type.
        is_cast = not self.work.is_wrapped and self.work.dtype != "fp32"
        return Parts(
            params=(FLOAT32 + (self.work.itemsize if is_cast else 0)) * on_device,
            optimizer=round(self.work.optimizer_bytes * on_device),
            buffers=receive_buffers(self.work, self.stage_params),
        )

    def weights(self) -> Parts:
        """The memory during deferred weight gradients with recomputation."""
        work, blocks = self.work, self.stage_params.num_layers
        a_block = split_gradient_bytes(work) + RECOMPUTED_COPIES * block_bytes(work)
        return self._static().plus(
            gradients=self._waiting(blocks),
            activations=self._activations(blocks) + max(self.stage_params.layers) * a_block,
            loss=self._other_losses(),
            buffers=self._cast(blocks),
        )

    @property
    def has_gradients(self) -> bool:
        """Whether earlier passes of the step left gradients that are not reduced yet."""
        return self.in_flight.summed > 0

    @property
    def _unit_blocks(self) -> int:
        return unit_blocks(self.work.shape, self.stage_params)

    @property
    def _unit(self) -> int:
        """Number of parameters gathered together."""
        return self.counts.block * self._unit_blocks

    @property
    def _all_reduced(self) -> int:
        """Bytes of this rank's shards of all gradients, once reduced."""
        return FLOAT32 * (self.counts.block_shard * self.stage_params.num_layers + self.counts.ends_shard)

    def _waiting(self, blocks_left: int, *, has_head: bool = True) -> int:
        """The bytes of unsharded gradients from earlier passes that are not reduced yet.

        `has_head`: whether those of a head that is reduced by itself are among them.
        """
        if not self.has_gradients:
            return 0
        if self.work.layout.pp > 1:
            return self._waiting_stages()
        if not self.work.is_wrapped:
            # A single process does not reduce gradients.
            return FLOAT32 * (self.counts.block * self.stage_params.num_layers + self.counts.ends)
        head = 0 if has_head else self.counts.head_unit
        return FLOAT32 * (self.counts.block * blocks_left + self.counts.ends - head)

    def _waiting_stages(self) -> int:
        """The bytes of unsharded gradients of the stages of a pipeline."""
        counts, params, summed = self.counts, self.stage_params, self.in_flight.summed
        blocks = sum(params.layers[-summed:])
        ends = counts.ends if summed == len(params.layers) else counts.head
        found = FLOAT32 * (counts.block * blocks + ends)
        if self.in_flight.has_latest:
            # The first stage does not defer weight gradients, so its latest ones are accumulated already.
            with_first = params.has_embedding and summed == len(params.layers)
            blocks -= params.layers[0] if with_first else 0
            found += self.work.itemsize * (counts.block * blocks + counts.head)
        return found

    def _reduced(self, blocks_done: int, *, has_head: bool) -> int:
        """The bytes of reduced gradients, from this pass and earlier ones.

        `has_head`: whether those of a head that is reduced by itself are among them.
        """
        work = self.work
        if work.parallel.offload and (work.layout.dp_replicate == 1 or not work.accumulates_shards):
            return 0  # offloaded immediately, unless they wait for the all-reduce over replicas
        if work.accumulates_shards:
            return self._all_reduced
        if self.has_gradients and not work.is_wrapped:
            return 0
        head = self.counts.head_unit_shard if has_head and work.is_wrapped else 0
        return FLOAT32 * (self.counts.block_shard * blocks_done + head)

    def _head_gradient(self) -> int:
        """The bytes of the head's gradient if it is reduced together with the embedding's."""
        if self.work.is_wrapped:
            is_apart = self.counts.head_unit > 0 and self.work.layout.pp == 1
            return 0 if is_apart else self.work.itemsize * self.counts.head
        return 0 if self.has_gradients else FLOAT32 * self.counts.head

    def _cast(self, blocks_left: int, *, has_head: bool = True) -> int:
        """The bytes of parameters in the compute type that are kept until their backward pass.

        `has_head`: whether the backward pass of the head is still to come.
        """
        work, counts = self.work, self.counts
        if not work.is_wrapped:
            return 0
        done = 0 if has_head or work.layout.pp > 1 else counts.head_unit
        if work.keeps_gathered:
            return work.itemsize * (counts.ends - done + counts.block * blocks_left)
        return work.itemsize * (counts.root + counts.head_unit - done)

    def _gathered_units(self, blocks_left: int) -> int:
        """The bytes of the gathered unit in use and of the next one, which is prefetched."""
        work = self.work
        if not work.is_wrapped or work.keeps_gathered:
            return 0
        following = self._unit if blocks_left > self._unit_blocks else self.counts.embedding_unit
        return work.itemsize * (self._unit + (following if work.shards > 1 else 0))

    def _in_a_block(self) -> int:
        """The bytes that the backward pass of a block needs in addition to its kept activations.

        First these are gradients of activations, later gradients of all weights, after most activations are
        freed.
        """
        work = self.work
        first = gradient_bytes(work) + work.itemsize * self.counts.block // 4
        later = work.itemsize * self._unit + 4 * stream_bytes(work) * work.tokens_per_pass - block_bytes(work)
        return max(first, later)

    def _activations(self, blocks_left: int) -> int:
        """The activation bytes of all passes in flight."""
        work = self.work
        kept = kept_bytes(work)
        if work.layout.pp == 1:
            return kept * blocks_left + document_mask_bytes(work)
        waiting = self.in_flight.whole * kept + self.in_flight.half * (kept + split_gradient_bytes(work))
        return waiting * max(self.stage_params.layers)

    def _other_losses(self) -> int:
        """The bytes of the losses of other passes in flight."""
        work, pp = self.work, self.work.layout.pp
        if not self.stage_params.has_head:
            return 0
        schedule = work.parallel.pp_schedule
        loss = split_loss_bytes(work) if schedule in DEFERRED_WEIGHT_GRADS else kept_loss_bytes(work)
        others = losses_in_flight(schedule, pp, work.passes_per_step) - 1
        return others * (loss + head_bytes(work))


@dataclass(frozen=True)
class Memory:
    """The memory of one rank, by phase of a step."""

    pp_rank: int
    phases: dict[str, Parts]
    """``loss``: start of the loss's backward pass; ``backward``: start of a block's backward pass;
    ``weights``: deferred weight gradients; ``reduce``: reduction of the last gradients;
    ``update``: optimizer step."""

    @cached_property
    def worst_phase(self) -> str:
        """The phase with the most memory."""
        return max(self.phases, key=lambda phase: self.phases[phase].total)

    @cached_property
    def peak(self) -> int:
        """Total bytes in the worst phase."""
        return self.phases[self.worst_phase].total

    @property
    def at_peak(self) -> Parts:
        """The memory by category in the worst phase."""
        return self.phases[self.worst_phase]

    @property
    def largest(self) -> Parts:
        """The maximum of each category over all phases; these do not coincide."""
        each = zip(*(astuple(parts) for parts in self.phases.values()), strict=True)
        return Parts(*(max(values) for values in each))


def memory_of(work: StepWork) -> Memory:
    """The memory of the rank that needs the most."""
    return max((rank_memory(work, rank) for rank in extreme_ranks(work)), key=lambda found: found.peak)


def extreme_ranks(work: StepWork) -> list[int]:
    """The pipeline ranks that may need the most: both ends, and the first one with the most layers."""
    pp, schedule = work.layout.pp, work.parallel.pp_schedule
    layers = [stage_params(rank, pp, schedule, work.shape.num_layers).num_layers for rank in range(pp)]
    return sorted({0, layers.index(max(layers)), pp - 1})


def rank_memory(work: StepWork, pp_rank: int) -> Memory:
    """The memory of one pipeline rank; all ranks with the same stages need the same."""
    params = stage_params(pp_rank, work.layout.pp, work.parallel.pp_schedule, work.shape.num_layers)
    counts = rank_param_counts(work.shape, params, work.layout)
    found: dict[str, Parts] = {}
    for in_flight in _in_flight(work, pp_rank):
        rank = MemoryPeaks(work, params, counts, in_flight)
        phases = {"backward": rank.backward(), "update": rank.update()}
        if params.has_head:
            phases["loss"] = rank.loss()
        if work.is_wrapped:
            phases["reduce"] = rank.reduce()
        if work.recomputes_for_weights:
            phases["weights"] = rank.weights()
        for name, parts in phases.items():
            found[name] = max(parts, found.get(name, parts), key=lambda item: item.total)
    return Memory(pp_rank, found)


def _in_flight(work: StepWork, pp_rank: int) -> list[InFlight]:
    """The passes in flight at each possible memory peak of a rank."""
    pp = work.layout.pp
    if pp == 1:
        return [InFlight(summed=int(work.accumulates))]
    return worst_in_flight(work.parallel.pp_schedule, pp, pp_rank, work.passes_per_step)
