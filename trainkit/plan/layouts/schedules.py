"""What a pipeline schedule costs: how long a rank waits, and how many microbatches it holds at once. Pure.

Times are counted in passes of a stage: a forward pass takes 1, and so do the two halves of a backward pass,
the gradient of the inputs and that of the weights (zero bubble, arXiv 2401.10241). The formulas say what
torch's tables of these schedules do.
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
"""Schedules whose stages go down the ranks and up again: the first rank also has the last stage."""

TWO_BACKWARDS: tuple[PipelineSchedule, ...] = ("interleaved_zero_bubble", "zbv", "dualpipe_v")
"""Schedules that compute the gradients of inputs and of weights at different times (zero bubble)."""


def num_stages(pp: int, schedule: PipelineSchedule) -> int:
    """How many stages `pp` ranks have together; 1 without a pipeline."""
    return 1 if pp == 1 else pp * STAGES_PER_RANK[schedule]


def stages_of(pp_rank: int, pp: int, schedule: PipelineSchedule) -> list[int]:
    """The stages of one rank of a pipeline, in the order in which a microbatch meets them."""
    if pp == 1:
        return [0]
    if schedule in V_SHAPED:
        return [pp_rank, 2 * pp - 1 - pp_rank]
    return list(range(pp_rank, num_stages(pp, schedule), pp))


def stage_layers(num_layers: int, stages: int) -> list[range]:
    """The layers of each stage, as even as they can be.

    What is left over goes to stages in the middle: the first has the embedding too, the last the head.
    """
    size, left = divmod(num_layers, stages)
    start = (stages - left) // 2
    bounds = [0]
    for stage in range(stages):
        bounds.append(bounds[-1] + size + (start <= stage < start + left))
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]


PASSES = 3
"""Forward, gradient of the inputs, gradient of the weights."""
WEIGHTS_LATER: tuple[PipelineSchedule, ...] = ("interleaved_zero_bubble", "zbv")
"""Schedules that compute the gradients of weights apart from those of inputs in every pass but the first
stage's; others of `TWO_BACKWARDS` do at the ends of a step only."""


@dataclass(frozen=True)
class InFlight:
    """What a rank holds at one of the moments of its largest memory."""

    whole: int = 1
    """Passes forward, over all of its stages, of which no gradient was computed."""
    half: int = 0
    """Passes of which the gradients of inputs were computed, and those of weights not."""
    summed: int = 0
    """How many of its last stages have gradients of weights from earlier passes."""
    has_latest: bool = False
    """Whether those of the latest pass of each are not among them yet."""


def bubble_fraction(schedule: PipelineSchedule, pp: int, num_microbatches: int) -> float:
    """The share of a step in which a rank waits for others: (p - 1) / (m + p - 1) for 1F1B and GPipe."""
    if pp == 1:
        return 0.0
    idle = _idle_passes(schedule, pp, num_microbatches)
    return idle / (idle + PASSES * STAGES_PER_RANK[schedule] * num_microbatches)


def _idle_passes(schedule: PipelineSchedule, pp: int, num_microbatches: int) -> int:
    """How many passes of a stage a rank could have done while it waited."""
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
    """For how many passes forward a rank keeps activations at its worst, over all of its stages."""
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
    """The times of a schedule at which a rank may hold most, when a backward pass begins."""
    most = stages_in_flight(schedule, pp, pp_rank, num_microbatches)
    stages = STAGES_PER_RANK[schedule]
    if schedule not in WEIGHTS_LATER:
        if most < stages * num_microbatches:
            return [InFlight(most, summed=stages)]
        # All forward passes were done before the first backward pass left gradients.
        return [InFlight(most), InFlight(most - 1, summed=stages)]
    # With few microbatches the first passes forward are over when the earlier stage has gradients.
    settled = pp + 1 if schedule == "zbv" else 2 * pp + (pp_rank == pp - 1)
    summed = stages if num_microbatches >= settled else 1
    if schedule == "interleaved_zero_bubble":
        half = min(pp_rank, most - 1)
        return [InFlight(most - half, half), InFlight(most - half, half, summed, has_latest=True)]
    found = [InFlight(most), InFlight(most, 0, summed, has_latest=True)]
    half = 2 * min(pp_rank, num_microbatches - pp)
    # At the end the gradients of all weights come last.
    return [*found, InFlight(pp - pp_rank, half, stages)] if half > 0 else found


def losses_in_flight(schedule: PipelineSchedule, pp: int, num_microbatches: int) -> int:
    """For how many microbatches the last stage keeps what the loss needs at its worst."""
    if pp == 1:
        return 1
    if schedule == "gpipe":
        return num_microbatches
    if schedule == "interleaved_zero_bubble":
        return min(pp, num_microbatches)  # the gradient of the weights comes late
    return 1
