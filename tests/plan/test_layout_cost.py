"""Compares the communication and waiting time of a layout with published formulas."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import llama, step_work

from trainkit.config.training import MoeConfig
from trainkit.plan.gpus import find_gpu
from trainkit.plan.launch import Layout
from trainkit.plan.model_shape import flops_per_token, num_params
from trainkit.plan.step_cost import Cost, Flow, cost_of, rank_flops, recompute_share, traffic
from trainkit.plan.step_work import IMBALANCE

H100 = find_gpu("h100")
assert H100 is not None
PARAMS = num_params(llama("7b"))
ROOT = 2 * 32_000 * 4096 + 4096
"""The parameters of 7B's embedding, head and last norm, which are gathered once for both passes."""


def sent(flows: list[Flow]) -> dict[str, int]:
    return Cost(0, 0, {}, 0, tuple(flows)).sent


def test_zero_3_sends_half_as_much_again_as_copies():
    """ZeRO (arXiv 1910.02054), section 7, has 2 P for replicas and stage 2, and 3 P for stage 3.

    With gradients reduced in float32 and parameters gathered in bfloat16, the bytes are 2 x 4, 4 + 2, and 4 +
    2 x 2.
    """
    copies = sent(traffic(step_work(layout=Layout(dp_replicate=64))))
    assert copies == {"dp": pytest.approx(8 * PARAMS, rel=0.02), "tp": 0, "cp": 0, "ep": 0, "pp": 0}
    zero_2 = sent(traffic(step_work(layout=Layout(dp_shard=64), zero=2)))
    assert zero_2["dp"] == pytest.approx(6 * PARAMS, rel=0.02)
    zero_3 = sent(traffic(step_work(layout=Layout(dp_shard=64))))
    assert zero_3["dp"] == pytest.approx(8 * PARAMS - 2 * ROOT, rel=0.02)


def test_matrices_of_blocks_are_gathered_in_float8():
    """Numbers in blocks take one byte. Numbers of embedding and head take two."""
    bf16 = step_work(layout=Layout(dp_shard=64), zero=2)
    before, after = (traffic(work)[0] for work in (bf16, replace(bf16, float8_gather=True)))
    assert (before.kind, before.num_bytes) == ("gather", 2 * PARAMS * 63 // 64)
    assert after == replace(before, num_bytes=(PARAMS + 2 * 32_000 * 4096) * 63 // 64)


def test_shards_are_sent_with_every_pass_and_gradients_to_copies_once_a_step():
    works = [step_work(layout=Layout(2, 8), accumulation_steps=steps) for steps in (1, 4)]
    one, four = ({flow.kind: (flow.num_bytes, flow.calls) for flow in traffic(work)} for work in works)
    for kind in ("gather", "scatter"):
        assert four[kind] == tuple(4 * number for number in one[kind])
    assert four["reduce"] == one["reduce"]
    pipeline = [step_work(layout=Layout(dp_shard=2, pp=2), accumulation_steps=steps) for steps in (1, 4)]
    once, again = ([flow for flow in traffic(work) if flow.kind == "scatter"] for work in pipeline)
    assert once == again


def test_what_is_sent_with_every_pass_is_hidden_by_every_pass():
    """Four times as much communication is hidden by four times as much computation."""

    def cost(layout, steps):
        return cost_of(step_work(layout=layout, seq_len=512, accumulation_steps=steps), H100, 8)

    one, four = (cost(Layout(dp_shard=16), steps) for steps in (1, 4))
    assert one.exposed_s["dp"] > 0.1 * one.compute_s
    assert four.exposed_s["dp"] == pytest.approx(4 * one.exposed_s["dp"])
    copies_once, copies = (cost(Layout(dp_replicate=64), steps) for steps in (1, 4))
    assert copies.exposed_s["dp"] == pytest.approx(copies_once.exposed_s["dp"])


def test_hybrid_sharding_sends_little_between_its_copies():
    gather, scatter, reduce = traffic(step_work(layout=Layout(dp_replicate=4, dp_shard=8)))
    assert [flow.crosses_nodes(8) for flow in (gather, scatter, reduce)] == [False, False, True]
    assert reduce.num_bytes == pytest.approx(2 * 4 * PARAMS / 8 * 3 / 4, rel=0.01)


@pytest.mark.parametrize(
    ("mode", "reductions"), [("none", 4), ("pointwise", 5), ("selective", 5), ("full", 5.5)]
)
def test_tensor_parallelism_reduces_four_times_a_block(mode, reductions):
    """Megatron (arXiv 1909.08053) has two all-reduces forward and two backward.

    Recomputation repeats gathers.
    """
    work = step_work(layout=Layout(tp=8), activation_checkpointing=mode)
    [tp] = [flow for flow in traffic(work) if flow.kind == "tp"]
    all_reduce = 2 * 7 / 8 * 4096 * 4096 * 2
    assert tp.num_bytes == reductions * 32 * all_reduce
    assert (tp.ranks, tp.stride) == (8, 1)


def test_a_pipeline_sends_one_activation_a_microbatch_each_way():
    more = {"device_batch_size": 8, "pp_microbatches": 4, "accumulation_steps": 2}
    [pp] = traffic(step_work(layout=Layout(pp=4), **more))
    assert pp.num_bytes == 2 * 8 * (2 * 4096 * 4096 * 2)
    assert sent(traffic(step_work(layout=Layout(pp=4, tp=2), **more)))["pp"] == pp.num_bytes / 2


def test_context_parallelism_sends_keys_and_values():
    """Llama 3 (arXiv 2407.21783) gathers before attention, and scatters the gradients after it."""
    [cp] = [flow for flow in traffic(step_work(layout=Layout(cp=4), seq_len=16_384)) if flow.kind == "cp"]
    assert cp.num_bytes == 2 * 32 * 3 * (4096 * 2 * 4096 * 2)


EXPERTS = llama("7b", moe=MoeConfig(num_experts=64, top_k=4, expert_ffn_dim=1024, first_dense=2))


@pytest.mark.parametrize(("mode", "exchanges"), [("none", 4), ("selective", 4), ("full", 6)])
def test_expert_parallelism_exchanges_the_rows_of_tokens(mode, exchanges):
    """Seven of eight rows belong to another rank, as do their outputs and gradients."""
    work = step_work(EXPERTS, layout=Layout(dp_shard=64, ep=8), activation_checkpointing=mode)
    [ep] = [flow for flow in traffic(work) if flow.kind == "ep"]
    assert ep.num_bytes == 30 * exchanges * (4096 * 4 * 4096 * 2) * 7 // 8
    assert (ep.ranks, ep.stride) == (8, 1)
    # Tensor-parallel ranks divide the rows, and the experts.
    [split] = [
        flow for flow in traffic(replace(work, layout=Layout(dp_shard=16, tp=4, ep=8))) if flow.kind == "ep"
    ]
    assert split == replace(ep, num_bytes=ep.num_bytes // 4)


def test_experts_of_other_ranks_are_not_gathered():
    one, eight, all_of_them = (
        sent(traffic(step_work(EXPERTS, layout=Layout(dp_shard=64, ep=ep))))["dp"] for ep in (1, 8, 64)
    )
    experts = 30 * 64 * 3 * 4096 * 1024
    assert one - all_of_them == pytest.approx(8 * experts * 63 / 64, rel=1e-6)
    assert eight - all_of_them == pytest.approx(8 * experts / 8 * 7 / 8, rel=1e-6)
    work = step_work(EXPERTS, layout=Layout(dp_replicate=2, dp_shard=32, ep=8))
    copies, undivided = (
        [flow.num_bytes for flow in traffic(each) if flow.kind == "reduce"]
        for each in (work, replace(work, layout=Layout(2, 32)))
    )
    assert copies == undivided


def test_rows_for_other_nodes_take_the_network():
    """On nodes of 4 GPUs, 4 of the 7 other ranks are on another node."""
    work = step_work(EXPERTS, layout=Layout(dp_shard=64, ep=8))
    [ep] = [flow for flow in traffic(work) if flow.kind == "ep"]
    near, far = cost_of(work, H100, 8), cost_of(work, H100, 4)
    assert near.exposed_s["ep"] == pytest.approx(IMBALANCE * ep.num_bytes / H100.node_bandwidth, rel=0.01)
    assert far.exposed_s["ep"] == pytest.approx(
        IMBALANCE * ep.num_bytes * 4 / 7 / H100.network_bandwidth, rel=0.01
    )
    without = rank_flops(replace(work, layout=Layout(dp_shard=64)), 0)
    assert 1.05 < rank_flops(work, 0) / without < IMBALANCE


@pytest.mark.parametrize(
    ("ranks", "stride", "crosses", "neighbours"),
    [(8, 1, False, 8), (16, 1, True, 8), (4, 4, True, 2), (2, 8, True, 1), (2, 4, False, 2)],
)
def test_who_is_on_one_node(ranks, stride, crosses, neighbours):
    flow = Flow("reduce", 1, 1, ranks, stride)
    assert (flow.crosses_nodes(8), flow.ranks_of_a_node(8)) == (crosses, neighbours)


def test_flops_are_those_of_the_whole_model():
    work = step_work(layout=Layout(pp=4, tp=2), device_batch_size=4)
    ranks = 2 * sum(rank_flops(work, rank) for rank in range(4))
    tokens = 4 * 4096
    # The shape counts norms too.
    assert ranks == pytest.approx(tokens * flops_per_token(work.shape, 4096), rel=1e-3)


def test_what_is_computed_again():
    assert recompute_share(step_work()) == 0
    assert recompute_share(step_work(activation_checkpointing="full")) == pytest.approx(1 / 3)
    selective = recompute_share(step_work(activation_checkpointing="selective"))
    products = 4 * 4096 + 3 * 11_008
    assert selective == pytest.approx((2 * 4096 + 11_008) / products / 3)
    # Tensor-parallel ranks keep the reduced output of wo. Without compilation, they repeat the product.
    pointwise = step_work(activation_checkpointing="pointwise")
    split = replace(pointwise, layout=Layout(tp=2))
    shares = map(recompute_share, (pointwise, split, split.with_parallel(compile=False)))
    assert [*shares] == [0, 0, pytest.approx(4096 / products / 3)]
    zbv = step_work(layout=Layout(pp=2), activation_checkpointing="full", pp_schedule="zbv")
    # The trainer computes the attention of a block 11 times forward. Only one of them is not a recomputation.
    assert recompute_share(zbv) == pytest.approx(10 / 3)


def test_a_bubble_lengthens_the_step():
    work = step_work(layout=Layout(pp=4), device_batch_size=4, pp_microbatches=4)
    cost = cost_of(work, H100, 8)
    assert cost.bubble == 3 / 7
    pipeline_s = (cost.compute_s + cost.exposed_s["pp"]) * 7 / 4
    assert cost.step_s == pytest.approx(pipeline_s + cost.exposed_s["dp"])


def test_the_network_is_slower_than_a_node():
    work = step_work(layout=Layout(tp=8))
    near, far = cost_of(work, H100, 8), cost_of(work, H100, 4)
    assert near.crossing(8) == ()
    assert far.crossing(4) == ("tp",)
    assert far.exposed_s["tp"] > near.exposed_s["tp"]


LAYOUTS = st.builds(
    Layout,
    dp_replicate=st.sampled_from([1, 2, 8]),
    dp_shard=st.sampled_from([1, 8]),
    tp=st.sampled_from([1, 2, 8]),
    pp=st.sampled_from([1, 4]),
    cp=st.sampled_from([1, 2]),
)


@given(LAYOUTS, st.sampled_from(["none", "pointwise", "selective", "full"]), st.sampled_from([2, 3]))
def test_every_step_takes_time(layout, mode, zero):
    work = step_work(layout=layout, device_batch_size=4, activation_checkpointing=mode, zero=zero)
    cost = cost_of(work, H100, 8)
    assert cost.step_s >= cost.compute_s + cost.recompute_s > 0
    assert all(seconds >= 0 for seconds in cost.exposed_s.values())
    degrees = {"dp": layout.dp * layout.cp, "tp": layout.tp, "cp": layout.cp, "pp": layout.pp}
    sending = {kind for kind, sent in cost.sent.items() if sent}
    assert sending == {kind for kind, degree in degrees.items() if degree > 1}
