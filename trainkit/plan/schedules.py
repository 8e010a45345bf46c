"""Bubble and microbatches in flight of pipeline schedules. Pure.

The unit of time is one pass of a stage: a forward pass takes 1, and so do both halves of a backward pass,
for input gradients and for weight gradients (zero bubble, arXiv 2401.10241). The formulas match torch's
implementations of these schedules.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from trainkit.config.running import PipelineSchedule

STAGES_PER_RANK: dict[PipelineSchedule, int] = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved_1f1b": 2,
    "interleaved_zero_bubble": 2,
    "zbv": 2,
    "dualpipe_v": 2,
}
V_SHAPED: tuple[PipelineSchedule, ...] = ("zbv", "dualpipe_v")
"""Schedules whose stages go down the ranks and back up: the first rank also has the last stage."""

SPLIT_BACKWARD: tuple[PipelineSchedule, ...] = ("interleaved_zero_bubble", "zbv", "dualpipe_v")
"""Schedules that split the backward pass into input gradients and weight gradients (zero bubble)."""


def num_stages(pp: int, schedule: PipelineSchedule) -> int:
    """The total number of stages of `pp` ranks; 1 without a pipeline."""
    return 1 if pp == 1 else pp * STAGES_PER_RANK[schedule]


def stages_of(pp_rank: int, pp: int, schedule: PipelineSchedule) -> list[int]:
    """The stages of one rank of a pipeline, in forward order."""
    if pp == 1:
        return [0]
    if schedule in V_SHAPED:
        return [pp_rank, 2 * pp - 1 - pp_rank]
    return list(range(pp_rank, num_stages(pp, schedule), pp))


def stage_layers(num_layers: int, stages: int) -> list[range]:
    """Split layers over stages as evenly as possible.

    The remainder goes to the stages in the middle: the first also has the embedding, the last the head.
    """
    size, left = divmod(num_layers, stages)
    start = (stages - left) // 2
    bounds = [0]
    for stage in range(stages):
        bounds.append(bounds[-1] + size + (start <= stage < start + left))
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]


PASSES = 3
"""Passes per microbatch and stage: forward, input gradients, weight gradients."""
DEFERRED_WEIGHT_GRADS: tuple[PipelineSchedule, ...] = ("interleaved_zero_bubble", "zbv")
"""Schedules that defer weight gradients in every pass, except on the first stage; the others in
`SPLIT_BACKWARD` do so only at the ends of a step."""


@dataclass(frozen=True)
class InFlight:
    """The passes and gradients that a rank of a pipeline holds at a possible memory peak."""

    whole: int = 1
    """Forward passes, over all of its stages, whose gradients are not computed yet."""
    half: int = 0
    """Passes whose input gradients are computed, but not their weight gradients."""
    summed: int = 0
    """Number of its stages, counted from the last, that hold accumulated weight gradients."""
    has_latest: bool = False
    """Whether these stages also hold the weight gradients of their latest pass, not accumulated yet."""


def bubble_fraction(schedule: PipelineSchedule, pp: int, num_microbatches: int) -> float:
    """The fraction of a step in which a rank is idle: (p - 1) / (m + p - 1) for 1F1B and GPipe."""
    if pp == 1:
        return 0.0
    idle = _idle_passes(schedule, pp, num_microbatches)
    return idle / (idle + PASSES * STAGES_PER_RANK[schedule] * num_microbatches)


def _idle_passes(schedule: PipelineSchedule, pp: int, num_microbatches: int) -> int:
    """The idle time of a rank per step, in passes of a stage."""
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
    """The maximum number of forward passes whose activations a rank keeps, over all of its stages."""
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
    """The states of a rank at the start of those backward passes at which memory may peak."""
    most = stages_in_flight(schedule, pp, pp_rank, num_microbatches)
    stages = STAGES_PER_RANK[schedule]
    if schedule not in DEFERRED_WEIGHT_GRADS:
        if most < stages * num_microbatches:
            return [InFlight(most, summed=stages)]
        # All forward passes are done before the first backward pass leaves gradients.
        return [InFlight(most), InFlight(most - 1, summed=stages)]
    # With few microbatches, the forward passes are over before the earlier stage has gradients.
    settled = pp + 1 if schedule == "zbv" else 2 * pp + (pp_rank == pp - 1)
    summed = stages if num_microbatches >= settled else 1
    if schedule == "interleaved_zero_bubble":
        half = min(pp_rank, most - 1)
        return [InFlight(most - half, half), InFlight(most - half, half, summed, has_latest=True)]
    found = [InFlight(most), InFlight(most, 0, summed, has_latest=True)]
    half = 2 * min(pp_rank, num_microbatches - pp)
    # Deferred weight gradients are computed at the end of the step.
    return [*found, InFlight(pp - pp_rank, half, stages)] if half > 0 else found


def losses_in_flight(schedule: PipelineSchedule, pp: int, num_microbatches: int) -> int:
    """The maximum number of microbatches whose loss the last stage keeps for the backward pass."""
    if pp == 1:
        return 1
    if schedule == "gpipe":
        return num_microbatches
    if schedule == "interleaved_zero_bubble":
        return min(pp, num_microbatches)  # weight gradients are deferred
    return 1
