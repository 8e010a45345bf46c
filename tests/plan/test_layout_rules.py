"""Tests that degrees multiply to the number of processes and fit model and batch, or a message helps."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.support.said import said
from tests.support.tables import messages
from trainkit.config.running import ParallelConfig
from trainkit.config.training import ModelConfig
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


PROBLEMS = """
tp: 4
    parallel.tp is 4, which does not divide model.num_kv_heads 2; set parallel.tp to 1
    or 2
tp: 2, seq_len: 33
    parallel.sequence_parallel is true, but parallel.tp 2 does not divide data.seq_len 33; use false
    to disable the sharding of the sequence
cp: 4, seq_len: 36
    parallel.cp is 4, but data.seq_len 36 is not a multiple of 2 x 4; set data.seq_len to
    a multiple: to balance the work, each rank gets a chunk from the start and one from the end
pp: 4, num_layers: 6, pp_schedule: zbv
    parallel.pp is 4, which needs 8 stages, but the model has 6 layers; with zbv, set parallel.pp to at
    most 3
pp: 2, device_batch_size: 6
    parallel.pp_microbatches is 4, which does not divide train.device_batch_size 6; set
    parallel.pp_microbatches to 1 or 2 or 3 or 6
pp: 2, pp_schedule: zbv, activation_checkpointing: selective
    parallel.activation_checkpointing is selective, which zbv does not support, because this
    schedule splits the backward pass; use full or none, or set parallel.pp_schedule to gpipe, 1f1b or
    interleaved_1f1b
pp: 2, pp_schedule: dualpipe_v, compile: true
    parallel.compile is true, which dualpipe_v does not support, because this schedule splits the
    backward pass; set parallel.pp_schedule to gpipe, 1f1b or interleaved_1f1b
pp: 2, pp_schedule: interleaved_1f1b, pp_microbatches: 1, accumulation_steps: 5
    parallel.pp_microbatches is 1 x 5 accumulated, which interleaved_1f1b cannot divide into 2 equal rounds;
    use a multiple of parallel.pp 2
pp: 8, num_layers: 8
    parallel.pp_microbatches is 4, fewer than the 8 that 1f1b needs with parallel.pp 8; use gpipe, which
    supports any number of microbatches
"""


@pytest.mark.parametrize(("options", "message"), messages(PROBLEMS))
def test_what_does_not(options, message):
    assert problems(**yaml.safe_load(f"{{{options}}}")) == [message]


def test_degrees_that_no_number_of_copies_makes_up_for():
    said(make_layout(ParallelConfig(tp=2, pp=2), 8)[1])
    with pytest.raises(ConfigError) as error:
        make_layout(ParallelConfig(tp=2, pp=4), 12)
    said(str(error.value))


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


REFUSED = """
3 -1 8
    parallel.dp_replicate: is 3, which does not divide 8 processes
    hint: the degree can be 1 or 2 or 4 or 8
-1 2 1
    parallel.dp_shard: is 2, which does not divide 1 process
    hint: the degree can be 1
1 4 8
    parallel.dp_shard: is 4: parallel.dp_replicate 1 x 4 = 4, but there are 8 processes
    hint: use -1 to derive the degree from the number of processes
-1 -1 4
    parallel.dp_replicate: is -1, and so is parallel.dp_shard: only one can be derived
    hint: set dp_shard: 1 to only replicate the model, or dp_replicate: 1 to only shard the model
"""


@pytest.mark.parametrize(("numbers", "message"), messages(REFUSED))
def test_refused(numbers, message):
    replicate, shard, world_size = map(int, numbers.split())
    with pytest.raises(ConfigError) as error:
        make_layout(ParallelConfig(dp_replicate=replicate, dp_shard=shard), world_size)
    assert error.value.message == message


def test_degrees_of_the_model_count():
    parallel = ParallelConfig(dp_replicate=2, dp_shard=-1, tp=2, pp=2)
    assert make_layout(parallel, 16)[0] == Layout(2, 2, tp=2, pp=2)
    with pytest.raises(ConfigError, match="does not divide 12 processes / 4 \\(tp x pp x cp\\)"):
        make_layout(parallel, 12)


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
