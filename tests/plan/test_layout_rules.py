"""Tests that degrees multiply to the number of processes and fit model and batch, or a message helps."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.support.said import said
from trainkit.config.running import ParallelConfig
from trainkit.config.training import ModelConfig, MoeConfig
from trainkit.errors import ConfigError
from trainkit.plan.launch import Layout
from trainkit.plan.layout_rules import layout_problems, make_layout
from trainkit.plan.model_shape import resolve_model_shape
from trainkit.plan.step_work import StepWork


def problems(device_batch_size=8, seq_len=64, num_layers=8, accumulation_steps=1, **parallel):
    section = ParallelConfig.model_validate(parallel)
    shape = resolve_model_shape(ModelConfig(preset="nano", num_layers=num_layers), 257)
    layout = Layout(tp=section.tp, pp=section.pp, cp=section.cp)
    work = StepWork(shape, layout, section, seq_len, device_batch_size, accumulation_steps)
    found = layout_problems(work)
    return [f"{item.key} {item.message}; {item.hint}" for item in found]


def test_what_fits():
    assert problems(tp=2) == problems(cp=4) == problems(pp=4, pp_microbatches=4) == []
    assert problems(pp=4, pp_schedule="interleaved_1f1b") == problems(pp=8, accumulation_steps=2) == []
    assert problems(pp=2, pp_schedule="dualpipe_v") == []
    assert problems(offload=True) == []  # offloading needs no other process
    assert problems(tp=2, seq_len=33, sequence_parallel=False) == []  # the sequence is not split


MISFITS = """\
tp: 4
tp: 2, seq_len: 33
cp: 4, seq_len: 36
pp: 4, num_layers: 6, pp_schedule: zbv
pp: 2, device_batch_size: 6
pp: 2, pp_schedule: zbv, activation_checkpointing: selective
pp: 2, pp_schedule: zbv, activation_checkpointing: pointwise
pp: 2, pp_schedule: dualpipe_v, compile: true
pp: 2, pp_schedule: interleaved_1f1b, pp_microbatches: 1, accumulation_steps: 5
pp: 8, num_layers: 8
""".splitlines()


def test_what_does_not():
    said("\n".join("\n".join(problems(**yaml.safe_load(f"{{{options}}}"))) for options in MISFITS))


def test_layouts_that_experts_rule_out():
    moe = MoeConfig(num_experts=12, expert_ffn_dim=24)
    with_experts, without = (
        resolve_model_shape(ModelConfig(preset="nano", dim=96, num_heads=4, moe=each), 257)
        for each in (moe, None)
    )
    split, whole = ParallelConfig(), ParallelConfig(sequence_parallel=False)
    cases = [
        (without, Layout(dp_shard=4, ep=4), split),
        (with_experts, Layout(dp_shard=8, ep=8), split),
        (with_experts, Layout(dp_shard=2, tp=2, ep=2), whole),
        (with_experts, Layout(dp_shard=32, ep=2), split),
    ]
    for shape, layout, parallel in cases:
        found = layout_problems(StepWork(shape, layout, parallel, 64, 8, 1))
        said("\n".join(f"{item.key} {item.message}; {item.hint}" for item in found))
    for degrees in ({"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2, "cp": 2}, {"tp": 2, "dp_shard": 2}):
        work = StepWork(with_experts, Layout(**degrees, ep=4), split, 64, 8, 1)
        assert list(layout_problems(work)) == []
    said(make_layout(ParallelConfig(ep=4, cp=2), 8)[1])
    with pytest.raises(ConfigError) as error:
        make_layout(ParallelConfig(ep=8, tp=2, cp=2), 12)
    said(error.value.message)


def test_degrees_that_no_number_of_copies_makes_up_for():
    said(make_layout(ParallelConfig(tp=2, pp=2), 8)[1])
    both = {"dp_replicate": 2, "dp_shard": -1, "tp": 2, "pp": 2}
    assert make_layout(ParallelConfig(**both), 16)[0] == Layout(2, 2, tp=2, pp=2)
    degrees = [({"dp_replicate": 3}, 8), ({"dp_replicate": -1, "dp_shard": 2}, 1), ({"dp_shard": 4}, 8)]
    degrees += [({"dp_replicate": -1, "dp_shard": -1}, 4), (both, 12), ({"tp": 2, "pp": 4}, 12)]
    for parallel, world_size in degrees:
        with pytest.raises(ConfigError) as error:
            make_layout(ParallelConfig(**parallel), world_size)
        said(error.value.message)


SHARDED, COPIED = (f"(derived from parallel.{key}: -1)" for key in ("dp_shard", "dp_replicate"))


@pytest.mark.parametrize(
    ("replicate", "shard", "world_size", "layout", "reason"),
    [
        (1, -1, 1, (1, 1), f"one replica on one process {SHARDED}"),
        (1, -1, 4, (1, 4), f"one replica, sharded over 4 processes {SHARDED}"),
        (2, -1, 8, (2, 4), f"2 replicas, each sharded over 4 processes {SHARDED}"),
        (-1, 1, 4, (4, 1), f"4 replicas, one per process {COPIED}"),
        (2, 2, 4, (2, 2), "2 replicas, each sharded over 2 processes"),
    ],
)
def test_layout(replicate, shard, world_size, layout, reason):
    parallel = ParallelConfig(dp_replicate=replicate, dp_shard=shard)
    assert make_layout(parallel, world_size) == (Layout(*layout), reason)


DEGREES = st.sampled_from([-1, 1, 2, 3, 4])


@given(DEGREES, DEGREES, st.integers(1, 3), st.integers(1, 64))
def test_a_layout_covers_all_processes(replicate, shard, tp, world_size):
    try:
        layout, _ = make_layout(ParallelConfig(dp_replicate=replicate, dp_shard=shard, tp=tp), world_size)
    except ConfigError:
        return
    assert layout.world_size == world_size
    assert replicate in (-1, layout.dp_replicate)
    assert shard in (-1, layout.dp_shard)
