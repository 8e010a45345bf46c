"""Which layers a rank of a pipeline has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainkit.plan.launch import Layout, Place
from trainkit.plan.layouts.schedules import STAGES_PER_RANK, num_stages, stage_layers, stages_of


@given(st.integers(1, 200), st.integers(1, 64))
def test_stages_share_all_layers_evenly(num_layers: int, stages: int) -> None:
    layers = stage_layers(num_layers, stages)
    assert [layer for stage in layers for layer in stage] == list(range(num_layers))
    sizes = [len(stage) for stage in layers]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes), "the head is on the last"


def test_what_is_left_over_goes_to_the_middle() -> None:
    assert [len(stage) for stage in stage_layers(10, 4)] == [2, 3, 3, 2]


@given(st.integers(2, 16), st.sampled_from(sorted(STAGES_PER_RANK)))
def test_every_stage_is_on_one_rank(pp: int, schedule: str) -> None:
    found = [stage for rank in range(pp) for stage in stages_of(rank, pp, schedule)]  # type: ignore[arg-type]
    assert sorted(found) == list(range(num_stages(pp, schedule)))  # type: ignore[arg-type]


def test_a_v_comes_back_to_the_first_rank() -> None:
    assert [stages_of(rank, 4, "zbv") for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert [stages_of(rank, 4, "interleaved_1f1b") for rank in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]


degrees = st.integers(1, 4)


@given(degrees, degrees, degrees, degrees, degrees)
def test_places_of_a_layout(pp: int, replicate: int, shard: int, cp: int, tp: int) -> None:
    layout = Layout(replicate, shard, tp=tp, pp=pp, cp=cp)
    places = [layout.place(rank) for rank in range(layout.world_size)]
    assert len(set(places)) == layout.world_size
    assert places[-1] == Place(pp - 1, replicate - 1, shard - 1, cp - 1, tp - 1)
    assert [layout.dp_rank(rank) for rank in range(0, layout.dp * cp * tp, cp * tp)] == list(range(layout.dp))
    if tp > 1:
        assert places[1].tp == 1, "neighbours share tensors"
