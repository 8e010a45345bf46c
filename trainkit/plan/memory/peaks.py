"""Peak memory of a step on the GPU that needs most, by purpose. Pure.

Parameters, gradients and optimizer state are float32 and split as ZeRO does (arXiv 1910.02054): 4, 4 and,
for AdamW, 8 bytes a parameter over ``dp_shard x cp x tp x pp`` ranks. The rest comes and goes, so a step is
examined in a few phases; the worst one counts.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import cached_property

from trainkit.plan.layouts.schedules import WEIGHTS_LATER, InFlight, losses_in_flight, worst_in_flight
from trainkit.plan.memory.activations import (
    block_bytes,
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
    OPTIMIZER_BYTES,
    ParamCounts,
    StageParams,
    rank_param_counts,
    stage_params,
    unit_blocks,
)
from trainkit.plan.workload import Workload

TIMES_AGAIN = 6
"""How often what a block keeps is there while the gradients of its weights are computed apart and its
activations again: torch does that anew for each weight, and lets go of none. Measured: 5.5 to 6.4 times."""


@dataclass(frozen=True)
class Parts:
    """What memory is taken for, in bytes."""

    params: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """Kept for the backward pass, and those of the block that is computed again."""
    loss: int = 0
    buffers: int = 0
    """Gathered and cast parameters, gradients on their way, and what passes between pipeline stages."""

    @property
    def total(self) -> int:
        return self.params + self.gradients + self.optimizer + self.activations + self.loss + self.buffers

    def plus(self, *, gradients: int = 0, activations: int = 0, loss: int = 0, buffers: int = 0) -> Parts:
        """With more of these."""
        return Parts(
            self.params,
            self.gradients + gradients,
            self.optimizer,
            self.activations + activations,
            self.loss + loss,
            self.buffers + buffers,
        )


def receive_buffers(work: Workload, params: StageParams) -> int:
    """Bytes in which stages receive activations and gradients: one of each for every microbatch of a step."""
    if work.layout.pp == 1:
        return 0
    inputs, outputs = (len(params.layers) - is_end for is_end in (params.has_embedding, params.has_head))
    if work.parallel.pp_schedule in WEIGHTS_LATER:
        inputs *= 2  # the gradient that is sent on stays with the input until the step is over
    return (inputs + outputs) * work.passes_per_step * work.tokens_at_once * stream_bytes(work)


@dataclass(frozen=True)
class MemoryPeaks:
    """Memory peaks of one rank, by phase of a step."""

    work: Workload
    stage_params: StageParams
    counts: ParamCounts
    in_flight: InFlight

    def loss(self) -> Parts:
        """The backward pass of the loss begins: all activations are there."""
        blocks = self.stage_params.num_layers
        return self._always().plus(
            gradients=self._waiting(blocks) + self._reduced(0),
            activations=self._activations(blocks) + head_bytes(self.work),
            loss=loss_bytes(self.work) + self._other_losses(),
            buffers=self._cast(blocks) + self._cast_head(),
        )

    def backward(self) -> Parts:
        """The backward pass of a block begins, of those the one at which most is there.

        Activations go and gradients come at the same rate, so that is one near the ends.
        """
        units = -(-self.stage_params.num_layers // self._unit_blocks)
        places = {0} if self.work.layout.pp > 1 else {0, min(1, units - 1), max(0, units - 2), units - 1}
        return max((self._backward_after(place) for place in places), key=lambda parts: parts.total)

    def reduce(self) -> Parts:
        """The gradients that are reduced last are copied to where they are sent from."""
        work, counts = self.work, self.counts
        if work.layout.pp > 1:
            # None is reduced before the schedule ends.
            blocks = self.stage_params.num_layers
            return self._always().plus(
                gradients=self._waiting(blocks), buffers=self._cast(blocks) + FLOAT32 * self._unit
            )
        # First as they came, then, those gone, this rank's share of them.
        whole = (FLOAT32 if self.has_gradients else work.itemsize) * counts.root
        root = max(whole, FLOAT32 * counts.root_shard)
        return self._always().plus(
            gradients=self._reduced(self.stage_params.num_layers) + root, buffers=FLOAT32 * counts.root
        )

    def update(self) -> Parts:
        """The optimizer's step."""
        return self._always().plus(gradients=0 if self.work.parallel.offload else self._all_reduced)

    def _backward_after(self, units_done: int) -> Parts:
        """The start of the backward pass of a block, when `units_done` units are done."""
        work = self.work
        done = units_done * self._unit_blocks
        left = self.stage_params.num_layers - done
        parts = self._always().plus(
            gradients=self._waiting(left) + self._reduced(done) + self._head_gradient(),
            activations=self._activations(left) + recomputed_bytes(work),
            loss=self._other_losses(),
            buffers=self._cast(left) + self._in_use(left) + self._in_a_block(),
        )
        return parts.plus(buffers=FLOAT32 * self._unit if work.is_wrapped and done else 0)

    def _always(self) -> Parts:
        """What is allocated in every phase."""
        sharded = self.counts.block_shard * self.stage_params.num_layers + self.counts.root_shard
        on_device = 0 if self.work.parallel.offload else sharded
        return Parts(
            params=FLOAT32 * on_device,
            optimizer=OPTIMIZER_BYTES[self.work.optimizer] * on_device,
            buffers=receive_buffers(self.work, self.stage_params),
        )

    def weights(self) -> Parts:
        """The backward pass of a stage's weights alone, when activations are computed again."""
        work, blocks = self.work, self.stage_params.num_layers
        a_block = split_gradient_bytes(work) + TIMES_AGAIN * block_bytes(work)
        return self._always().plus(
            gradients=self._waiting(blocks),
            activations=self._activations(blocks) + max(self.stage_params.layers) * a_block,
            loss=self._other_losses(),
            buffers=self._cast(blocks),
        )

    @property
    def has_gradients(self) -> bool:
        """Whether an earlier pass of the step has left gradients that were not reduced."""
        return self.in_flight.summed > 0

    @property
    def _unit_blocks(self) -> int:
        return unit_blocks(self.work.shape, self.stage_params)

    @property
    def _unit(self) -> int:
        """Parameters that are gathered at once."""
        return self.counts.block * self._unit_blocks

    @property
    def _all_reduced(self) -> int:
        """Bytes of this rank's shards of all gradients."""
        return FLOAT32 * (self.counts.block_shard * self.stage_params.num_layers + self.counts.root_shard)

    def _waiting(self, blocks_left: int) -> int:
        """Bytes of whole gradients that earlier passes of the step left, and the last one has not reduced."""
        if not self.has_gradients:
            return 0
        if self.work.layout.pp > 1:
            return self._waiting_stages()
        if not self.work.is_wrapped:
            blocks_left = self.stage_params.num_layers  # nothing is reduced: they are the gradients
        return FLOAT32 * (self.counts.block * blocks_left + self.counts.root)

    def _waiting_stages(self) -> int:
        """Bytes of whole gradients of the stages of a pipeline."""
        counts, params, summed = self.counts, self.stage_params, self.in_flight.summed
        blocks = sum(params.layers[-summed:])
        root = counts.root if summed == len(params.layers) else counts.head
        found = FLOAT32 * (counts.block * blocks + root)
        if self.in_flight.has_latest:
            # The first stage adds its own up at once.
            with_first = params.has_embedding and summed == len(params.layers)
            blocks -= params.layers[0] if with_first else 0
            found += self.work.itemsize * (counts.block * blocks + counts.head)
        return found

    def _reduced(self, blocks_done: int) -> int:
        """Bytes of gradients that this pass has reduced, or an earlier one."""
        work = self.work
        if work.parallel.offload and (work.layout.dp_replicate == 1 or not work.adds_up_shards):
            return 0  # each goes to the host at once, unless it waits to be summed over copies
        if work.adds_up_shards:
            return self._all_reduced
        if self.has_gradients and not work.is_wrapped:
            return 0
        return FLOAT32 * self.counts.block_shard * blocks_done

    def _head_gradient(self) -> int:
        """Bytes of the head's gradient, which waits for that of the embedding."""
        if self.work.is_wrapped:
            return self.work.itemsize * self.counts.head
        return 0 if self.has_gradients else FLOAT32 * self.counts.head

    def _cast(self, blocks_left: int) -> int:
        """Bytes of parameters that are there, as they are computed with, until the backward pass is there."""
        work, blocks = self.work, self.counts.block * blocks_left
        if not work.is_wrapped:
            # Autocast keeps a copy of every matrix.
            return 0 if work.dtype == "fp32" else work.itemsize * blocks
        return work.itemsize * (self.counts.root + (blocks if work.keeps_gathered else 0))

    def _cast_head(self) -> int:
        """Bytes of the copy of the head that autocast keeps."""
        work = self.work
        return 0 if work.is_wrapped or work.dtype == "fp32" else work.itemsize * self.counts.head

    def _in_use(self, blocks_left: int) -> int:
        """Bytes of the unit that is computed with, and of the next one, which is on its way meanwhile."""
        work = self.work
        if not work.is_wrapped or work.keeps_gathered:
            return 0
        on_its_way = work.shards > 1 and blocks_left > self._unit_blocks
        return work.itemsize * self._unit * (2 if on_its_way else 1)

    def _in_a_block(self) -> int:
        """Bytes that the backward pass of a block needs besides what its forward pass kept.

        First gradients of activations, later of all weights, when most activations have gone.
        """
        work = self.work
        first = gradient_bytes(work) + work.itemsize * self.counts.block // 4
        later = work.itemsize * self._unit + 4 * stream_bytes(work) * work.tokens_at_once - block_bytes(work)
        return max(first, later)

    def _activations(self, blocks_left: int) -> int:
        """Bytes of all passes that wait for their backward pass."""
        work = self.work
        kept = kept_bytes(work)
        if work.layout.pp == 1:
            return kept * blocks_left
        waiting = self.in_flight.whole * kept + self.in_flight.half * (kept + split_gradient_bytes(work))
        return waiting * max(self.stage_params.layers)

    def _other_losses(self) -> int:
        """Bytes of the losses of earlier passes."""
        work, pp = self.work, self.work.layout.pp
        if not self.stage_params.has_head:
            return 0
        schedule = work.parallel.pp_schedule
        loss = split_loss_bytes(work) if schedule in WEIGHTS_LATER else kept_loss_bytes(work)
        others = losses_in_flight(schedule, pp, work.passes_per_step) - 1
        return others * (loss + head_bytes(work))


@dataclass(frozen=True)
class Memory:
    """The memory of one rank, phase by phase."""

    pp_rank: int
    phases: dict[str, Parts]
    """``loss``: its backward pass begins; ``backward``: that of a block; ``weights``: that of weights alone;
    ``reduce``: the gradients that are reduced last; ``update``: the optimizer's step."""

    @cached_property
    def worst_phase(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: self.phases[phase].total)

    @cached_property
    def peak(self) -> int:
        """Bytes in the worst phase."""
        return self.phases[self.worst_phase].total

    @property
    def at_peak(self) -> Parts:
        """What the peak consists of."""
        return self.phases[self.worst_phase]

    @property
    def largest(self) -> Parts:
        """The maximum of each part over all phases; they do not coincide."""
        each = zip(*(astuple(parts) for parts in self.phases.values()), strict=True)
        return Parts(*(max(values) for values in each))


def memory_of(work: Workload) -> Memory:
    """The memory of the rank that needs most."""
    return max((rank_memory(work, rank) for rank in extreme_ranks(work)), key=lambda found: found.peak)


def extreme_ranks(work: Workload) -> list[int]:
    """The ends of a pipeline, and the first of its ranks that has most layers."""
    pp, schedule = work.layout.pp, work.parallel.pp_schedule
    layers = [stage_params(rank, pp, schedule, work.shape.num_layers).num_layers for rank in range(pp)]
    return sorted({0, layers.index(max(layers)), pp - 1})


def rank_memory(work: Workload, pp_rank: int) -> Memory:
    """The memory of one rank of the pipeline; the others of its stages need as much."""
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


def _in_flight(work: Workload, pp_rank: int) -> list[InFlight]:
    """What waits for its backward pass at the times at which a rank may hold most."""
    pp = work.layout.pp
    if pp == 1:
        return [InFlight(summed=int(work.accumulates))]
    return worst_in_flight(work.parallel.pp_schedule, pp, pp_rank, work.passes_per_step)
