"""Compares the memory estimate with counts by hand, published formulas, and torch's memory tracker."""

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import llama, step_work

from trainkit.config.running import Recomputation
from trainkit.config.training import MoeConfig, OptimizerConfig
from trainkit.formats import GIB
from trainkit.plan.launch import Layout
from trainkit.plan.memory import block_bytes, kept_bytes, loss_bytes, memory_of, rank_memory, rank_params
from trainkit.plan.model_shape import (
    ModelShape,
    num_params,
    num_params_between_embeddings,
    num_params_of_block,
)
from trainkit.plan.optimizer_state import optimizer_bytes

SMALL = ModelShape(64, 8, 2, 2, 1, 4, 12, 1e-5, 1e4, False, 0.0)
"""Width 8, 2 layers, one key-value head of width 4, 12 hidden units: a shape to count by hand."""


@pytest.mark.parametrize("shards", [1, 8, 64])
def test_sixteen_bytes_a_parameter(shards):
    """ZeRO (arXiv 1910.02054), section 3, has 16 bytes per parameter with Adam, over N ranks."""
    work = step_work(layout=Layout(dp_replicate=8 // min(shards, 8), dp_shard=shards))
    update = memory_of(work).phases["update"]
    params = num_params(work.shape)
    assert update.total == pytest.approx(16 * params / shards, rel=1e-3)
    assert (update.params, update.gradients) == (update.params, update.params)
    assert update.optimizer == 2 * update.params
    assert (update.activations, update.loss, update.buffers) == (0, 0, 0)


@pytest.mark.parametrize(
    ("preset", "options", "expected"),
    [
        ("8b", {}, 8),
        ("8b", {"state_dtype": "bf16"}, 4),
        ("8b", {"name": "adamw_8bit"}, 2 + 8 / 256),
        ("7b", {"name": "adamw_8bit"}, 2 + 8 * 6 / 1376),  # a row of 11,008 has 8 shards of 6 blocks
        ("nano", {"name": "adamw_8bit"}, 2 + 8 / 8),
        ("8b", {"name": "lion"}, 4),
        ("8b", {"name": "lion", "state_dtype": "bf16"}, 2),
        ("8b", {"name": "sgd"}, 4),
        ("8b", {"name": "sgd", "momentum": 0.0}, 0),
        ("8b", {"name": "mine.py:Mine"}, 8),
    ],
)
def test_bytes_of_the_state(preset, options, expected):
    shape = llama(preset)
    assert optimizer_bytes(OptimizerConfig(**options), shape) == pytest.approx(expected)
    work = replace(step_work(shape), optimizer_bytes=expected)
    update, in_float32 = (memory_of(each).phases["update"] for each in (work, step_work(shape)))
    assert in_float32.optimizer * expected == pytest.approx(8 * update.optimizer)
    assert (update.params, update.gradients) == (in_float32.params, in_float32.gradients)


def test_experts_are_sharded_over_all_shards_but_gathered_by_their_own_ranks():
    shape = llama("7b", moe=MoeConfig(num_experts=64, top_k=4, expert_ffn_dim=1024, first_dense=2))
    layouts = [Layout(dp_shard=64, ep=ep) for ep in (1, 8)]
    whole, divided = (rank_params(shape, layout, "1f1b", 0) for layout in layouts)
    experts = 30 * 64 * 3 * 4096 * 1024
    assert whole.gathered - divided.gathered == experts * 7 // 8
    assert divided.whole == whole.whole == whole.gathered
    works = [step_work(shape, layout=layout, activation_checkpointing="full", zero=2) for layout in layouts]
    before, after = (memory_of(work).phases for work in works)
    assert before["update"] == after["update"]
    fewer = before["loss"].buffers - after["loss"].buffers
    assert fewer == 2 * experts * 7 // 8, "ZeRO-2 keeps all gathered parameters"
    split = rank_params(shape, Layout(dp_shard=16, tp=4, ep=8), "1f1b", 0)
    assert split.experts == divided.experts
    assert split.whole - (split.gathered - split.experts) == experts // 4, "16 ranks have a quarter"


@pytest.mark.parametrize("ep", [1, 32, 64])
def test_a_dense_block_may_be_larger_or_smaller_than_the_others(ep):
    moe = MoeConfig(num_experts=64, top_k=4, expert_ffn_dim=1408, num_shared=2, first_dense=1)
    shape = llama("7b", moe=moe)
    params = rank_params(shape, Layout(dp_shard=64, ep=ep), "1f1b", 0)
    assert params.of_first(1) == num_params_of_block(shape, 0) + shape.dim // shape.num_layers
    assert params.of_first(shape.num_layers) == params.blocks
    assert params.block == max(params.of_first(1), params.of_first(2) - params.of_first(1))


def test_a_block_by_hand():
    """arXiv 2205.05198, table 2, has 34 s b h, here without dropout and scores, for SwiGLU and shared keys.

    The numbers per token of SMALL are: two norms keep their inputs (8 + 8). wq wk wv and gate up keep theirs
    (8 + 8). Attention keeps its queries and output (8 + 8), keys and values (4 + 4). The feed-forward network
    keeps gate, up, silu(gate) and their product (4 x 12).
    """
    work = step_work(SMALL, layout=Layout(dp_shard=2), seq_len=10, device_batch_size=3)
    eager = work.with_parallel(compile=False)
    assert block_bytes(eager) == 30 * 2 * (16 + 16 + 16 + 8 + 48)
    # A compiled block computes silu(gate) again, and keeps a float32 number of each norm and head.
    assert block_bytes(work) == block_bytes(eager) + 30 * (4 * (2 + 2) - 2 * 12)
    assert kept_bytes(work) == block_bytes(work)
    # A float8 block also recomputes the outputs of the norms and the input of down.
    assert block_bytes(replace(work, float8=True)) == block_bytes(work) - 30 * 2 * (16 + 12)
    # GPUs have no flash attention for float32, so the keys and values are repeated for both heads.
    in_float32 = replace(eager, dtype="fp32")
    assert block_bytes(in_float32) == 2 * block_bytes(eager) + 30 * 4 * (4 + 4)


def test_what_a_block_keeps_by_hand():
    """Every mode keeps the block's input, 8 numbers per token of SMALL.

    The mode `selective` also keeps queries, values, the output of attention, gate and down, and `pointwise`
    keeps keys, wo and up as well. A compiled block does not keep down, but two float32 numbers of attention.
    """
    for mode, numbers, compiled in (
        ("full", 8, 8),
        ("selective", 8 + (8 + 4) + 8 + 12 + 8, 8 + (8 + 4) + 8 + 12 + 4),
        ("pointwise", 8 + (8 + 4 + 4) + 8 + 8 + (12 + 12) + 8, 8 + (8 + 4 + 4) + 8 + 8 + (12 + 12) + 4),
    ):
        work = step_work(SMALL, layout=Layout(dp_shard=2), seq_len=10, activation_checkpointing=mode)
        assert kept_bytes(work.with_parallel(compile=False)) == 10 * 2 * numbers
        assert kept_bytes(work) == 10 * 2 * compiled


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_what_a_tensor_parallel_block_keeps(sequence_parallel):
    """The block keeps its input and two reduced outputs. Ranks split the rest, except partial products."""
    for mode, split in (("selective", 8 + 4 + 8 + 12), ("pointwise", 8 + 4 + 4 + 8 + 12 + 12)):
        more = {"seq_len": 10, "sequence_parallel": sequence_parallel, "activation_checkpointing": mode}
        work = step_work(SMALL, layout=Layout(tp=2, dp_shard=1), **more)
        assert kept_bytes(work) == 10 * 2 * (3 * 8 / (2 if sequence_parallel else 1) + split / 2)


def test_a_block_under_tensor_parallelism():
    """Sequence parallelism (section 4.2) splits the inputs of the norms. Gathered inputs stay whole here."""
    kept = {"attention": 16 + 8, "feed-forward": 48}
    for sequence_parallel, ranks in ((True, 2), (False, 1)):
        more = {"seq_len": 10, "sequence_parallel": sequence_parallel}
        work = step_work(SMALL, layout=Layout(tp=2, dp_shard=1), **more)
        numbers = 16 / ranks + 16 + sum(kept.values()) / 2
        assert block_bytes(work) == 10 * 2 * numbers


def test_a_single_process_splits_its_master_weights():
    """The bf16 weights are a part of the float32 ones; fp16 weights are not, so the process keeps both.

    The activations equal those under sharding.
    """
    work = step_work(SMALL, layout=Layout(), seq_len=10)
    assert block_bytes(work) == block_bytes(step_work(SMALL, layout=Layout(dp_shard=2), seq_len=10))
    params = num_params(SMALL)
    assert memory_of(work).phases["update"].params == 4 * params
    assert memory_of(replace(work, dtype="fp16")).phases["update"].params == 6 * params
    in_float32 = step_work(SMALL, layout=Layout(), seq_len=10, dtype="fp32")
    assert memory_of(in_float32).phases["update"].params == 4 * params
    on_a_mesh = step_work(SMALL, layout=Layout(), seq_len=10, mesh_of_one=True)
    assert memory_of(on_a_mesh).phases["update"].params == 4 * params


def test_blocks_that_are_gathered_in_float8_take_one_byte_a_parameter():
    """ZeRO-2 keeps all blocks gathered. ZeRO-3 gathers two blocks at a time."""
    for zero, num_blocks, phase in ((2, 32, "loss"), (3, 2, "backward")):
        work = replace(step_work(zero=zero), float8=True)
        found = (memory_of(replace(work, float8_gather=gathers)) for gathers in (False, True))
        bf16, float8 = (each.phases[phase].buffers for each in found)
        assert bf16 - float8 == num_blocks * (num_params_between_embeddings(work.shape) // 32)


def test_the_loss_by_hand():
    """The loss keeps log probabilities and two gradients in float32, and a fourth number if it is split."""
    work = step_work(SMALL, seq_len=10)
    assert loss_bytes(work.with_parallel(compile=False)) == 10 * 64 * 12
    assert loss_bytes(work) == 10 * 64 * 4, "compiled: the logits and their gradients"
    assert loss_bytes(replace(work, dtype="fp32")) == 10 * 64 * 8
    split = step_work(SMALL, layout=Layout(tp=2), seq_len=10)
    assert loss_bytes(split) == 10 * 32 * 16
    assert loss_bytes(split.with_parallel(loss_parallel=False)) == 10 * 64 * 12


@pytest.mark.parametrize(
    ("is_summed", "what"),
    [
        (True, {}),
        (True, {"layout": Layout(), "dtype": "fp16"}),
        (True, {"layout": Layout(pp=2)}),
        (False, {"dtype": "fp32"}),
        (False, {"layout": Layout(tp=2)}),
        (False, {"layout": Layout(pp=2), "pp_schedule": "zbv"}),
        (True, {"pp_schedule": "zbv"}),
    ],
)
def test_layers_that_sum_in_float32(is_summed, what):
    work = step_work(**what)
    assert work.sums_in_float32 == is_summed
    assert not replace(work, float8=True).sums_in_float32


def test_sums_in_float32_need_no_rounded_gradients():
    """The gradient of the head stays in float32, and products add to the sums of earlier passes."""
    work = step_work(
        "8b", layout=Layout(), accumulation_steps=2, activation_checkpointing="full", seq_len=16_384
    )
    eager = work.with_parallel(compile=False)
    rounding = replace(eager, float8=True)
    head, block = (getattr(rank_params(work.shape, Layout(), "1f1b", 0), name) for name in ("head", "block"))
    assert loss_bytes(rounding) - loss_bytes(eager) == 2 * head
    buffers = [memory_of(each).phases["backward"].buffers for each in (rounding, eager)]
    assert buffers[0] - buffers[1] == 2 * (block // 4)


@pytest.mark.parametrize(
    ("layout", "shards"),
    [(Layout(dp_replicate=8), 1), (Layout(dp_shard=8), 8), (Layout(2, 4), 4), (Layout(dp_shard=2, cp=2), 4)],
)
def test_gradients_of_earlier_passes_wait_whole_only_in_copies(layout, shards):
    once, twice = (memory_of(step_work(layout=layout, accumulation_steps=steps)) for steps in (1, 2))
    assert once.phases["loss"].gradients == 0
    assert twice.phases["loss"].gradients == 4 * num_params(llama("7b")) / shards
    assert twice.phases["update"] == once.phases["update"]


def test_offload_leaves_only_what_is_computed_with():
    """torch keeps scattered gradients on the device until they are summed over the replicas."""
    found = memory_of(step_work(offload=True, activation_checkpointing="full"))
    assert (found.largest.params, found.largest.optimizer, found.phases["update"].total) == (0, 0, 0)
    waiting = {}
    for layout in (Layout(), Layout(dp_shard=8), Layout(2, 4)):
        found = memory_of(step_work(layout=layout, offload=True, accumulation_steps=2))
        assert (found.largest.params, found.largest.optimizer) == (0, 0)
        waiting[layout.world_size, layout.dp_replicate] = found.phases["loss"].gradients
    params = num_params(llama("7b"))
    assert waiting == {(1, 1): 0, (8, 1): 0, (8, 2): params}
    alone = memory_of(step_work(layout=Layout(), accumulation_steps=2))
    assert alone.phases["loss"].gradients == 4 * params


# Each row is (GiB, case). The values are from torch.distributed._tools.mem_tracker.MemTracker of torch 2.13
# on the CPU, with a fake process group, in the second step of the trainer's model with fused AdamW (`trainkit
# check --simulate-world`). Some models have fewer layers, where more would only take longer.
FULL, SELECTIVE, POINTWISE = (
    {"activation_checkpointing": mode} for mode in ("full", "selective", "pointwise")
)
TRACKED: list[tuple[float, dict[str, Any]]] = [
    (36.243, {"num_layers": 32}),
    (15.193, {"num_layers": 32, **FULL}),
    (19.650, {"num_layers": 32, **SELECTIVE}),
    (23.842, {"num_layers": 32, **POINTWISE}),
    (4.301, {"layout": Layout(dp_shard=2, cp=4), **POINTWISE, "seq_len": 8192}),
    (7.155, {"accumulation_steps": 2}),
    (5.244, {"zero": 2, **FULL}),
    (5.422, {"zero": 2, **FULL, "accumulation_steps": 2, "seq_len": 512}),
    (5.563, {"zero": 2, **FULL, "accumulation_steps": 4, "seq_len": 512}),
    (6.926, {"dtype": "fp32", **SELECTIVE}),
    (9.866, {"layout": Layout(dp_shard=64), "device_batch_size": 4, "seq_len": 2048}),
    (6.317, {"layout": Layout(2, 4), **FULL, "accumulation_steps": 2, "seq_len": 512}),
    (3.616, {"layout": Layout(dp_shard=8, tp=2)}),
    (2.715, {"layout": Layout(dp_shard=2, tp=8), "sequence_parallel": False}),
    (2.899, {"layout": Layout(dp_shard=2, tp=8), "loss_parallel": False}),
    (4.296, {"layout": Layout(tp=4), **FULL}),
    (5.374, {"layout": Layout(dp_shard=2, cp=4), "seq_len": 8192}),
    (10.158, {"preset": "70b", "layout": Layout(dp_shard=512), **FULL, "seq_len": 2048}),
    (2.148, {"preset": "70b", "layout": Layout(dp_shard=8, tp=8), **FULL}),
    (7.221, {"model": {"qk_norm": True, "head_dim": 160, "num_kv_heads": 8}}),
    (4.953, {"model": {"qk_norm": True, "head_dim": 160, "num_kv_heads": 8}, **SELECTIVE}),
]


@pytest.mark.parametrize(("tracked_gib", "what"), TRACKED)
def test_as_torch_tracked_it(tracked_gib, what):
    rest = dict(what)
    shape = llama(rest.pop("preset", "7b"), num_layers=rest.pop("num_layers", 4), **rest.pop("model", {}))
    peak = memory_of(step_work(shape, device="cpu", **rest)).peak
    assert peak / GIB == pytest.approx(tracked_gib, rel=0.05)


# Each row is (GB, preset, case): the peak of trainkit with compiled blocks on one GPU, as recorded in
# benchmarks/gpu. These runs had a bf16 cast besides each float32 master weight. In some records, weights of
# earlier loops of the process were still in memory, in float32 and in bf16; `earlier` is the number of these
# loops.
ONE_GPU: dict[str, Any] = {"layout": Layout(), "activation_checkpointing": "none"}
TWO_SAMPLES, FOUR_SAMPLES = ({**ONE_GPU, "device_batch_size": size} for size in (2, 4))
SUMMED = {**ONE_GPU, "accumulation_steps": 8, "optimizer_bytes": 4}
RECORDED: list[tuple[float, str, dict[str, Any]]] = [
    (33.7, "1b", TWO_SAMPLES),
    (43.8, "1b", FOUR_SAMPLES),
    (63.1, "3b", SUMMED),
    (122.0, "8b", {**SUMMED, **SELECTIVE}),
    (48.5, "1b", {**TWO_SAMPLES, "float8": True, "earlier": 2}),
    (57.5, "1b", {**TWO_SAMPLES, "float8": True, "earlier": 3}),
    (55.3, "1b", {**FOUR_SAMPLES, "float8": True, "earlier": 2}),
    (64.3, "1b", {**FOUR_SAMPLES, "float8": True, "earlier": 3}),
    (24.0, "350m", {**FOUR_SAMPLES, "seq_len": 2048, "dtype": "fp32", "vocab_size": 32_000, "earlier": 2}),
]


@pytest.mark.parametrize(("recorded_gb", "preset", "what"), RECORDED)
def test_as_recorded_on_a_gpu(recorded_gb, preset, what):
    rest = dict(what)
    shape, earlier = llama(preset, vocab_size=rest.pop("vocab_size", 128_256)), rest.pop("earlier", 0)
    changes = {key: rest.pop(key) for key in ("optimizer_bytes", "float8") if key in rest}
    work = replace(step_work(shape, **rest), **changes)
    more = (2 if work.splits_masters else 0) + earlier * (4 + 2)
    assert (memory_of(work).peak + more * num_params(shape)) / 1e9 == pytest.approx(recorded_gb, rel=0.02)


# Each row is (GiB, rank of the pipeline, case), from `trainkit check --simulate-world` with torch's
# schedules.
TWO_RANKS: dict[str, Any] = {"num_layers": 8, "layout": Layout(dp_shard=4, pp=2)}
LONG = {"seq_len": 4096, "device_batch_size": 8, "pp_microbatches": 8}
LARGE = {"preset": "70b", "num_layers": 80, **LONG}
PIPELINES: list[tuple[float, int, dict[str, Any]]] = [
    (8.704, 0, {"num_layers": 8, "layout": Layout(dp_shard=2, pp=4)}),
    (8.704, 0, {"num_layers": 8, "layout": Layout(dp_shard=2, pp=4), "pp_schedule": "gpipe"}),
    (9.556, 0, {"num_layers": 8, "layout": Layout(dp_shard=2, pp=4), "accumulation_steps": 2}),
    (12.305, 0, {**TWO_RANKS, "pp_schedule": "interleaved_1f1b"}),
    (11.513, 1, {**TWO_RANKS, "pp_schedule": "interleaved_1f1b"}),
    (12.733, 1, {**TWO_RANKS, "pp_schedule": "interleaved_zero_bubble"}),
    (14.710, 1, {**TWO_RANKS, "pp_schedule": "interleaved_zero_bubble", "accumulation_steps": 2}),
    (14.214, 0, {**TWO_RANKS, "pp_schedule": "zbv"}),
    (12.069, 1, {**TWO_RANKS, "pp_schedule": "zbv"}),
    (14.030, 1, {**TWO_RANKS, "pp_schedule": "zbv", **FULL}),
    (47.059, 1, {**TWO_RANKS, "preset": "70b", "pp_schedule": "zbv", **FULL}),
    (11.132, 1, {**TWO_RANKS, "pp_schedule": "dualpipe_v"}),
    (4.941, 0, {**TWO_RANKS, "layout": Layout(dp_shard=4, pp=2, tp=2), "accumulation_steps": 2, **SELECTIVE}),
    (22.109, 0, {"num_layers": 32, "layout": Layout(dp_shard=2, pp=4), **LONG, **FULL}),
    (
        13.179,
        0,
        {"preset": "13b", "num_layers": 40, **LONG, "layout": Layout(dp_shard=2, pp=4, tp=4), **SELECTIVE},
    ),
    (30.048, 0, {**LARGE, "layout": Layout(dp_shard=8, pp=8, tp=8), "loss_parallel": False}),
    (19.058, 2, {**LARGE, "layout": Layout(pp=8, tp=8), **FULL}),
]


@pytest.mark.parametrize(("tracked_gib", "pp_rank", "what"), PIPELINES)
def test_pipelines_as_torch_tracked_them(tracked_gib, pp_rank, what):
    rest = {"device_batch_size": 4, "seq_len": 2048, "pp_microbatches": 4, **what}
    shape = llama(rest.pop("preset", "7b"), num_layers=rest.pop("num_layers"))
    peak = rank_memory(step_work(shape, device="cpu", **rest), pp_rank).peak
    assert peak / GIB == pytest.approx(tracked_gib, rel=0.03)


def test_stages_receive_into_buffers_of_their_own():
    """A step has one buffer per microbatch for activations and gradients that a stage receives.

    The first stage receives no activations, and the last one no gradients.
    """
    work = step_work("7b", layout=Layout(pp=4), device_batch_size=4, pp_microbatches=4, accumulation_steps=2)
    received = [rank_memory(work, rank).phases["update"].buffers for rank in range(4)]
    stream = 4096 * 4096 * 2
    assert received == [8 * stream * ends for ends in (1, 2, 2, 1)]
    v = work.with_parallel(pp_schedule="zbv")
    # The first rank has both end stages. It receives two inputs, and each stays with the gradient that was
    # sent on.
    received = [rank_memory(v, rank).phases["update"].buffers for rank in (0, 3)]
    assert received == [24 * stream, 48 * stream]
    assert memory_of(step_work()).phases["update"].buffers == 0


LAYOUTS = st.builds(
    Layout,
    **{name: st.sampled_from([1, 2, 4]) for name in ("dp_replicate", "tp", "pp")},
    dp_shard=st.sampled_from([1, 2, 8, 64]),
    cp=st.sampled_from([1, 2]),
)
WORKLOADS = st.builds(
    lambda layout, **others: step_work("7b", layout=layout, device_batch_size=8, pp_microbatches=8, **others),
    LAYOUTS,
    activation_checkpointing=st.sampled_from(["none", "pointwise", "selective", "full"]),
    pp_schedule=st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zbv"]),
    zero=st.sampled_from([2, 3]),
    accumulation_steps=st.sampled_from([1, 4]),
    dtype=st.sampled_from(["fp32", "bf16"]),
    device=st.sampled_from(["cpu", "cuda"]),
)


@settings(deadline=None)
@given(WORKLOADS, st.sampled_from(["dp_shard", "tp", "pp"]))
def test_splitting_further_never_takes_more(work, degree):
    """The degree is at least 2, because the first split of a kind also costs memory.

    For example, the gathered inputs need memory.
    """
    if degree == "pp":
        # With other schedules, a stage with fewer layers has more microbatches in flight.
        work = work.with_parallel(pp_schedule="gpipe")
    ranks = getattr(work.layout, degree)
    layouts = (replace(work.layout, **{degree: times * ranks}) for times in (2, 4))
    half, more = (memory_of(replace(work, layout=layout)).peak for layout in layouts)
    assert more <= half


@settings(deadline=None)
@given(WORKLOADS)
def test_checkpointing_keeps_less_and_less(work):
    modes = [work.with_parallel(activation_checkpointing=mode) for mode in get_args(Recomputation)]
    kept = [kept_bytes(mode) for mode in modes]
    assert kept == sorted(kept, reverse=True)
    none, *_, full = (memory_of(mode) for mode in modes)
    assert full.peak <= none.peak or modes[-1].recomputes_for_weights
