"""Pipeline arithmetic: which layers make a stage, which stages a rank has, how long it waits. Pure."""

from __future__ import annotations

import itertools

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
"""Schedules in which the stages go down the ranks and come back up: the first rank has also the last."""

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
