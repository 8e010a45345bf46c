"""Which layouts a bench runs, and what is adapted to them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.models import nano_shape
from trainkit.config.running import ParallelConfig
from trainkit.errors import ConfigError, UsageError
from trainkit.plan.launch import Layout
from trainkit.plan.layouts.axis import (
    BenchLayout,
    LayoutConstraints,
    all_layouts,
    enumerate_layouts,
    fill_degrees,
    parse_layout,
    refuse_duplicates,
    requested_layout,
)
from trainkit.plan.layouts.choices import LONG_SEQUENCE


def site(world_size: int = 4, **changes: Any) -> LayoutConstraints:
    """Processes on one node, and the nano model with enough layers and heads to be split."""
    values = {
        "world_size": world_size,
        "node_size": world_size,
        "shape": nano_shape(num_layers=8, num_kv_heads=4),
        "seq_len": 64,
        "device_batch_size": 4,
        "global_batch_size": 16,
        **changes,
    }
    return LayoutConstraints(**values)


def names(world_size: int = 4, parallel: dict[str, Any] | None = None, **changes: Any) -> list[str]:
    found, _ = all_layouts(ParallelConfig(**(parallel or {})), site(world_size, **changes))
    return [item.name for item in found]


def asked(
    text: str, world_size: int = 4, parallel: dict[str, Any] | None = None, **changes: Any
) -> BenchLayout:
    values = {**(parallel or {}), **fill_degrees(parse_layout(text))}
    return requested_layout(text, ParallelConfig(**values), site(world_size, **changes))


def test_every_way_to_split_four_processes() -> None:
    assert names() == [
        *("dp_shard=4", "dp_replicate=4", "tp=4", "pp=4"),
        *("dp_replicate=2,dp_shard=2", "dp_shard=2,tp=2", "dp_shard=2,pp=2"),
        *("dp_replicate=2,tp=2", "dp_replicate=2,pp=2", "tp=2,pp=2"),
    ]
    assert names(1) == ["dp_shard=1"]


def test_each_layout_is_there_once_and_has_all_processes() -> None:
    for world_size in (1, 6, 8, 12):
        found = list(enumerate_layouts(world_size, world_size, splits_sequence=True))
        assert len(found) == len(set(found))
        assert {layout.world_size for layout in found} == {world_size}
    assert len(list(enumerate_layouts(8, 8, splits_sequence=True))) == 35


def test_tensor_parallelism_stays_within_a_node() -> None:
    assert {layout.tp for layout in enumerate_layouts(8, 2, splits_sequence=False)} == {1, 2}


def test_sequences_are_split_when_they_are_long_or_the_config_does_it() -> None:
    assert not any("cp=" in name for name in names())
    assert "cp=4" in names(parallel={"cp": 2})
    assert "cp=4" in names(seq_len=LONG_SEQUENCE)


def test_what_is_not_possible_has_a_reason() -> None:
    small = nano_shape(num_layers=2, num_kv_heads=2)
    found, impossible = all_layouts(ParallelConfig(), site(shape=small))
    assert "tp=4" not in [item.name for item in found]
    assert impossible == {
        "tp=4": "parallel.tp is 4, which does not divide model.num_kv_heads 2",
        "pp=4": "parallel.pp is 4, which needs 4 stages, but the model has 2 layers",
    }


def test_the_samples_of_a_step_are_the_same_on_every_layout() -> None:
    for world_size in (2, 4, 8):
        found, _ = all_layouts(ParallelConfig(), site(world_size))
        for item in found:
            share, left = divmod(16, item.layout.dp)
            assert left == 0
            assert item.values["train.global_batch_size"] == 16
            assert share % item.values["train.device_batch_size"] == 0


def test_the_batch_is_that_of_the_config_where_it_can_be() -> None:
    for item in all_layouts(ParallelConfig(), site(4))[0]:
        assert (item.values["train.device_batch_size"], item.notes) == (4, ())


def test_a_smaller_share_makes_a_smaller_batch() -> None:
    (item,) = (item for item in all_layouts(ParallelConfig(), site(8))[0] if item.name == "dp_shard=8")
    assert item.values["train.device_batch_size"] == 2
    assert item.notes == (
        "train.device_batch_size: 2 instead of 4: each of 8 data-parallel processes gets 2 of 16 samples",
    )


def test_a_batch_that_does_not_fit_becomes_smaller_not_larger() -> None:
    assert asked("tp=2", 2, device_batch_size=7).values["train.device_batch_size"] == 4


def test_processes_that_cannot_share_a_step() -> None:
    found, impossible = all_layouts(ParallelConfig(), site(3))
    assert [item.name for item in found] == ["pp=3"]
    why = "train.global_batch_size is 16, which is not a multiple of 3 data-parallel processes"
    assert impossible["dp_shard=3"] == why


def test_a_pipeline_gets_the_microbatches_that_it_needs() -> None:
    item = asked("pp=2", 2, {"pp_microbatches": 3})
    assert item.values["parallel.pp_microbatches"] == 2
    assert item.values["train.device_batch_size"] == 4
    why = "a batch of 4 allows 1 or 2 or 4"
    assert item.notes == (f"parallel.pp_microbatches: 2 instead of 3: {why}",)


def test_microbatches_of_a_whole_step_fill_a_long_pipeline() -> None:
    item = asked("pp=8", 8, {"pp_microbatches": 2})
    assert (item.values["train.device_batch_size"], item.values["parallel.pp_microbatches"]) == (4, 2)
    assert item.notes == ()


def test_a_step_that_is_too_small_for_a_pipeline() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.pp_microbatches: .* needs with parallel\.pp 8"):
        asked("pp=8", 8, global_batch_size=4)


def test_microbatches_that_were_asked_for_stay() -> None:
    item = asked("pp=2,pp_microbatches=8", 2)
    assert item.name == "pp=2,pp_microbatches=8"
    assert item.values["parallel.pp_microbatches"] == 8
    assert item.values["train.device_batch_size"] == 8
    assert item.notes[0] == "train.device_batch_size: 8 instead of 4: it is split into 8 microbatches"


def test_what_is_left_out_is_what_a_config_would_take() -> None:
    assert asked("tp=2").layout == Layout(1, 2, tp=2)
    assert asked("dp_replicate=2,tp=2").layout == Layout(2, 1, tp=2)
    assert asked("dp_replicate=-1").layout == Layout(4, 1)
    assert asked("zero=2").name == "dp_shard=4,zero=2"
    assert asked("tp=2,sequence_parallel=false").values["parallel.sequence_parallel"] is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp", "--layout tp: 'tp' is not KEY=VALUE"),
        ("tp=2,,pp=2", "--layout tp=2,,pp=2: '' is not KEY=VALUE"),
        ("tq=2", "--layout tq=2: the section parallel has no key tq"),
        ("tp=2,tp=4", "--layout tp=2,tp=4: tp appears twice"),
        ("tp=[", "--layout tp=[: tp: "),
    ],
)
def test_what_was_typed_wrong(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_layout(text)
    assert caught.value.message.startswith(message)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tp=3", "--layout tp=3: parallel.tp: is 3: parallel.tp 3 does not divide 4 processes"),
        ("dp_shard=2", "--layout dp_shard=2: parallel.dp_shard: is 2: parallel.dp_replicate 1 x 2 = 2, but"),
        ("pp=4,pp_schedule=zbv,pp_microbatches=3", "parallel.pp_microbatches: is 3, which does not divide"),
    ],
)
def test_an_impossible_layout_that_was_asked_for(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        asked(text)
    assert problem in caught.value.problems[0].render()


def test_two_that_mean_the_same() -> None:
    with pytest.raises(UsageError, match=r"two --layout are the same: dp_shard=2,tp=2"):
        refuse_duplicates([asked("tp=2"), asked("dp_shard=2,tp=2")])
