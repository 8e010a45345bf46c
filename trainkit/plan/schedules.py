"""What a pipeline schedule costs: how long a rank waits, and how many microbatches it holds at once. Pure.

Times are counted in passes of a stage: a forward pass takes 1, and so do the two halves of a backward pass,
the gradient of the inputs and that of the weights (zero bubble, arXiv 2401.10241). The formulas say what
torch's tables of these schedules do.
"""

from __future__ import annotations

from trainkit.config.running import PipelineSchedule
from trainkit.plan.pipeline import STAGES_PER_RANK

PASSES = 3
"""Forward, gradient of the inputs, gradient of the weights."""


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


def losses_in_flight(schedule: PipelineSchedule, pp: int, num_microbatches: int) -> int:
    """For how many microbatches the last stage keeps what the loss needs at its worst."""
    if pp == 1:
        return 1
    if schedule == "gpipe":
        return num_microbatches
    if schedule == "interleaved_zero_bubble":
        return min(pp, num_microbatches)  # the gradient of the weights comes late
    return 1
