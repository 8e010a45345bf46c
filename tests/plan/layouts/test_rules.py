"""Degrees multiply to the number of processes, or the message says what would."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.config.running import ParallelConfig
from trainkit.errors import ConfigError
from trainkit.plan.launch import Layout
from trainkit.plan.layouts.rules import make_layout


@pytest.mark.parametrize(
    ("replicate", "shard", "world_size", "layout", "reason"),
    [
        (1, -1, 1, (1, 1), "one replica on one process (derived from parallel.dp_shard: -1)"),
        (
            1,
            -1,
            4,
            (1, 4),
            "one replica, sharded over 4 processes (derived from parallel.dp_shard: -1)",
        ),
        (
            2,
            -1,
            8,
            (2, 4),
            "2 replicas, each sharded over 4 processes (derived from parallel.dp_shard: -1)",
        ),
        (
            -1,
            1,
            4,
            (4, 1),
            "4 replicas, one per process (derived from parallel.dp_replicate: -1)",
        ),
        (2, 2, 4, (2, 2), "2 replicas, each sharded over 2 processes"),
    ],
)
def test_layout(replicate: int, shard: int, world_size: int, layout: tuple[int, int], reason: str) -> None:
    parallel = ParallelConfig(dp_replicate=replicate, dp_shard=shard)
    assert make_layout(parallel, world_size) == (Layout(*layout), reason)


@pytest.mark.parametrize(
    ("replicate", "shard", "world_size", "message"),
    [
        (
            3,
            -1,
            8,
            "parallel.dp_replicate: is 3, which does not divide 8 processes\n"
            "  hint: it can be 1 or 2 or 4 or 8",
        ),
        (-1, 2, 1, "parallel.dp_shard: is 2, which does not divide 1 process\n  hint: it can be 1"),
        (
            1,
            4,
            8,
            "parallel.dp_shard: is 4: parallel.dp_replicate 1 x 4 = 4, but there are 8 processes\n"
            "  hint: -1 derives it from the number of processes",
        ),
        (
            -1,
            -1,
            4,
            "parallel.dp_replicate: is -1, and so is parallel.dp_shard: only one can be derived\n"
            "  hint: dp_shard: 1 only replicates the model, dp_replicate: 1 only shards it",
        ),
    ],
)
def test_refused(replicate: int, shard: int, world_size: int, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_layout(ParallelConfig(dp_replicate=replicate, dp_shard=shard), world_size)
    assert error.value.message == message


def test_degrees_of_the_model_count() -> None:
    parallel = ParallelConfig(dp_replicate=2, dp_shard=-1, tp=2, pp=2)
    assert make_layout(parallel, 16)[0] == Layout(2, 2, tp=2, pp=2)
    with pytest.raises(ConfigError, match="does not divide 12 processes / 4 \\(tp x pp x cp\\)"):
        make_layout(parallel, 12)


@given(
    st.sampled_from([-1, 1, 2, 3, 4]),
    st.sampled_from([-1, 1, 2, 3, 4]),
    st.integers(1, 3),
    st.integers(1, 64),
)
def test_a_layout_covers_all_processes(replicate: int, shard: int, tp: int, world_size: int) -> None:
    try:
        layout, _ = make_layout(ParallelConfig(dp_replicate=replicate, dp_shard=shard, tp=tp), world_size)
    except ConfigError:
        return
    assert layout.world_size == world_size
    assert replicate in (-1, layout.dp_replicate)
    assert shard in (-1, layout.dp_shard)
