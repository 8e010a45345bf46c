"""Compares a rank's layers, bubbles and microbatches in flight with papers and torch's tables."""

import logging
from collections import Counter
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.config.running import PipelineSchedule
from trainkit.plan import step_work
from trainkit.plan.launch import Layout, Place
from trainkit.plan.step_work import bubble_fraction, stage_layers, stages_in_flight, stages_of

TABLES: dict[PipelineSchedule, str] = {
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}
SIZES = [(2, 4), (2, 5), (3, 4), (3, 9), (4, 3), (4, 5), (4, 6), (4, 8), (4, 16), (8, 8), (8, 16), (8, 20)]


@pytest.mark.parametrize(
    ("schedule", "pp", "microbatches", "fraction"),
    [
        ("1f1b", 1, 4, 0.0),
        ("gpipe", 4, 8, 3 / 11),  # GPipe, arXiv 1811.06965: (K - 1) / (M + K - 1)
        ("1f1b", 4, 8, 3 / 11),  # Megatron, arXiv 2104.04473: the same value as GPipe
        ("interleaved_1f1b", 4, 8, 3 / 19),  # the same paper: half of the waiting with two stages per rank
        ("interleaved_zero_bubble", 4, 8, 3 / 51),  # arXiv 2401.10241: (p - 1)(F + B - W), halved again
        ("zbv", 4, 8, 3 / 51),
        ("dualpipe_v", 4, 8, 3 / 51),
    ],
)
def test_bubbles_of_the_papers(schedule, pp, microbatches, fraction):
    assert bubble_fraction(schedule, pp, microbatches) == pytest.approx(fraction)


def test_in_flight_of_the_papers():
    """arXiv 2104.04473: GPipe keeps all microbatches, and 1F1B at most one per following stage."""
    assert [stages_in_flight("gpipe", 4, rank, 8) for rank in range(4)] == [8, 8, 8, 8]
    assert [stages_in_flight("1f1b", 4, rank, 8) for rank in range(4)] == [4, 3, 2, 1]
    assert [stages_in_flight("1f1b", 4, rank, 2) for rank in range(4)] == [2, 2, 2, 1]
    assert (step_work.losses_in_flight("gpipe", 4, 8), step_work.losses_in_flight("1f1b", 4, 8)) == (8, 1)
    assert stages_in_flight("1f1b", 1, 0, 8) == step_work.losses_in_flight("gpipe", 1, 8) == 1


@pytest.mark.parametrize("schedule", TABLES)
def test_as_in_the_tables_of_torch(schedule):
    seen = 0
    for pp, microbatches in SIZES:
        table = table_of(schedule, pp, microbatches)
        if table is None:
            continue
        seen += 1
        for rank in range(pp):
            both, last = most_in_flight(table[rank], 2 * pp - 1)
            assert both == stages_in_flight(schedule, pp, rank, microbatches), (pp, microbatches, rank)
            if 2 * pp - 1 in stages_of(rank, pp, schedule):
                assert last == step_work.losses_in_flight(schedule, pp, microbatches)
        assert waiting(table, 2 * pp) == pytest.approx(bubble_fraction(schedule, pp, microbatches))
    assert seen >= 4


@pytest.mark.parametrize("gradients", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("schedule", step_work.DEFERRED_WEIGHT_GRADS)
def test_worst_times_are_those_of_the_tables(schedule, gradients):
    """The estimate is never below the worst time in torch's tables.

    `gradients` is the size of a stage's weight gradients in float32, relative to the memory of a pass. The
    estimate always includes the gradients of the latest pass, and is at most 43 % above the tables.
    """
    for pp, microbatches in SIZES:
        table = table_of(schedule, pp, microbatches)
        for rank in range(pp if table is not None else 0):
            most = most_at_once(table[rank], gradients)
            estimated = 0.0
            for time in step_work.worst_in_flight(schedule, pp, rank, microbatches):
                latest = time.summed - (rank == 0 and time.summed == 2)  # the first stage defers no gradients
                summed = gradients * (time.summed + latest / 2)
                estimated = max(estimated, time.whole + 1.5 * time.half + summed)
            assert most <= estimated <= (1.43 if gradients else 1.0) * most, (pp, microbatches, rank)


def most_at_once(actions: list[Any], gradients: float) -> float:
    """Return the largest memory in use when a backward pass begins.

    A pass counts 1, and 1.5 when its inputs have gradients. The gradients of weights are half as large until
    the next backward pass of the stage adds them up.
    """
    whole: Counter[int] = Counter()
    half: Counter[int] = Counter()
    latest, summed = set(), set()
    most = 0.0
    for kind, stage, _ in actions:
        begins = kind == "FULL_BACKWARD" or (kind == "BACKWARD_INPUT") == (stage > 0)
        if kind == "FORWARD":
            whole[stage] += 1
        elif begins:
            held = gradients * (len(summed) + len(latest) / 2)
            most = max(most, whole.total() + 1.5 * half.total() + held)
            whole[stage] -= 1
            if kind == "BACKWARD_INPUT":
                half[stage] += 1
            if stage in latest or kind != "BACKWARD_INPUT":
                latest.discard(stage)
                summed.add(stage)
        elif kind == "BACKWARD_WEIGHT":
            half[stage] -= 1
            latest.add(stage)
    return most


def table_of(schedule: PipelineSchedule, pp: int, microbatches: int) -> dict[int, list[Any]] | None:
    """Return torch's passes of every rank, or None for an unsupported number of microbatches."""
    import torch
    from torch.distributed.pipelining import schedules

    logging.getLogger(schedules.__name__).setLevel(logging.ERROR)
    stages = []
    for index in stages_of(0, pp, schedule):
        stage = MagicMock(group_size=pp, group_rank=0, num_stages=2 * pp, stage_index=index)
        stage.is_first, stage.is_last, stage.submod = index == 0, index == 2 * pp - 1, torch.nn.Identity()
        stages.append(stage)
    try:
        made = getattr(schedules, TABLES[schedule])(stages, microbatches, loss_fn=lambda *_: 0)
    except ValueError:
        return None
    return {rank: list(passes(actions)) for rank, actions in made.pipeline_order.items()}


def passes(actions: list[Any]) -> list[Any]:
    """Return the (kind, stage, microbatch) of every pass. A row may contain two passes that overlap."""
    rows = [row for action in actions if action is not None for row in (action.sub_actions or [action])]
    return [
        (row.computation_type.name, row.stage_index, row.microbatch_index)
        for row in rows
        if row.computation_type.name != "REDUCE_GRAD"
    ]


def most_in_flight(actions: list[Any], last_stage: int) -> tuple[int, int]:
    """Return the largest number of activations of all stages of a rank, and of the last stage."""
    held: Counter[int] = Counter()
    both = last = 0
    for kind, stage, _ in actions:
        held[stage] += {"FORWARD": 1, "BACKWARD_INPUT": 0}.get(kind, -1)
        both, last = max(both, held.total()), max(last, held[last_stage])
    return both, last


def waiting(table: dict[int, list[Any]], num_stages: int) -> float:
    """Return the busiest rank's share of waiting time, if every pass takes the same time."""
    done: dict[tuple[str, int, int], int] = {}
    clock, at = dict.fromkeys(table, 0), dict.fromkeys(table, 0)
    while any(at[rank] < len(table[rank]) for rank in table):
        for rank, actions in table.items():
            while at[rank] < len(actions):
                kind, stage, micro = actions[at[rank]]
                needs = [] if stage == 0 else [("F", stage - 1, micro)]
                if kind != "FORWARD":
                    needs = [("F", stage, micro)]
                    needs += [] if stage == num_stages - 1 else [("B", stage + 1, micro)]
                if kind == "BACKWARD_WEIGHT":
                    needs = [("B", stage, micro)]
                if not all(need in done for need in needs):
                    break
                clock[rank] = max([clock[rank], *(done[need] for need in needs)])
                clock[rank] += 2 if kind == "FULL_BACKWARD" else 1
                name = {"FORWARD": "F", "BACKWARD_WEIGHT": "W"}.get(kind, "B")
                done[name, stage, micro] = clock[rank]
                at[rank] += 1
    busy = {
        rank: sum(2 if kind == "FULL_BACKWARD" else 1 for kind, _, _ in actions)
        for rank, actions in table.items()
    }
    return 1 - max(busy.values()) / max(clock.values())


@given(st.integers(1, 200), st.integers(1, 64))
def test_stages_share_all_layers_evenly(num_layers, stages):
    layers = stage_layers(num_layers, stages)
    assert [layer for stage in layers for layer in stage] == list(range(num_layers))
    sizes = [len(stage) for stage in layers]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes), "the head is on the last"
    # The remaining layers go to the middle stages.
    assert [len(stage) for stage in stage_layers(10, 4)] == [2, 3, 3, 2]


@given(st.integers(2, 16), st.sampled_from(sorted(step_work.STAGES_PER_RANK)))
def test_every_stage_is_on_one_rank(pp, schedule):
    found = [stage for rank in range(pp) for stage in stages_of(rank, pp, schedule)]
    assert sorted(found) == list(range(step_work.num_stages(pp, schedule)))
    # A V returns to the first rank.
    assert [stages_of(rank, 4, "zbv") for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert [stages_of(rank, 4, "interleaved_1f1b") for rank in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]


degrees = st.integers(1, 4)


@given(degrees, degrees, degrees, degrees, degrees)
def test_places_of_a_layout(pp, replicate, shard, cp, tp):
    layout = Layout(replicate, shard, tp=tp, pp=pp, cp=cp)
    places = [layout.place(rank) for rank in range(layout.world_size)]
    assert len(set(places)) == layout.world_size
    assert places[-1] == Place(pp - 1, replicate - 1, shard - 1, cp - 1, tp - 1)
    assert [layout.dp_rank(rank) for rank in range(0, layout.dp * cp * tp, cp * tp)] == list(range(layout.dp))
    if tp > 1:
        assert places[1].tp == 1, "neighbours share tensors"
