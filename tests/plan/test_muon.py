"""Tests how Muon's matrices are divided among ranks, and what an update costs."""

from dataclasses import replace

import pytest
from planning import llama, step_work

from tests.support.models import ALONE, nano, nano_shape
from trainkit.config.schema import RunConfig
from trainkit.config.training import MoeConfig, OptimizerConfig
from trainkit.plan import muon
from trainkit.plan.feed_forward import Matrices, moe_shape
from trainkit.plan.gpus import find_gpu
from trainkit.plan.launch import Batch, Layout
from trainkit.plan.memory import checkpoint_bytes, rank_memory
from trainkit.plan.model_shape import num_params
from trainkit.plan.muon import (
    assign_owners,
    flops,
    num_elements,
    num_ranks,
    stage_matrices,
    units_of,
    update_cost,
    update_rounds,
)
from trainkit.plan.step_cost import cost_of, traffic
from trainkit.plan.step_work import work_of
from trainkit.trainer.models.model import weights_of
from trainkit.trainer.optimizers.muon import ShardedMuon

MUON = OptimizerConfig(name="muon")
H100 = find_gpu("h100")
assert H100 is not None
EIGHT_B = stage_matrices(llama("8b"), 32, 32)
TOTAL_FLOPS = sum(flops((weight.rows, weight.columns)) for weight in EIGHT_B)


def test_the_matrices_of_a_model():
    model = nano(qk_norm=True, qkv_bias=True, tie_embeddings=True)
    weights = [weight for weight in weights_of([model]) if weight.is_projection]
    assert [Matrices(*weight.param.shape) for weight in weights] == stage_matrices(model.shape, 2, 0)
    assert {weight.name.split(".", 2)[2] for weight in weights} == {
        *(f"attention.{name}.weight" for name in ("wq", "wk", "wv", "wo")),
        *(f"ffn.{name}.weight" for name in ("gate", "up", "down")),
    }


MOE = {"num_experts": 6, "top_k": 2, "expert_ffn_dim": 32, "num_shared": 2, "first_dense": 1}
"""In a model of two blocks, the first one is dense."""


@pytest.mark.parametrize("num_shared", [0, 2])
def test_the_matrices_of_experts(num_shared):
    """The router is not one of the matrices that Muon updates."""
    model = nano(moe={**MOE, "num_shared": num_shared})
    weights = [weight for weight in weights_of([model]) if weight.is_projection]
    found = [Matrices(*weight.param.shape[-2:], *weight.param.shape[:-2]) for weight in weights]
    assert found == stage_matrices(model.shape, 2, 1)
    assert sum(weight.num_experts for weight in found) == 3 * 6
    others = {weight.name for weight in weights_of([model]) if not weight.is_projection}
    assert "blocks.1.moe.router.weight" in others
    assert num_elements(found) + sum(model.get_parameter(name).numel() for name in others) == num_params(
        model.shape
    )


@pytest.mark.parametrize("num_ranks", [1, 3, 64, 300])
def test_each_matrix_has_one_owner_and_no_rank_has_much_more_work(num_ranks):
    layout = Layout(dp_shard=num_ranks)
    units = units_of(EIGHT_B, layout)
    owned = assign_owners(units, layout)
    assert sorted(index for rank in owned for index in rank) == [*range(7 * 32)]
    loads = [sum(units[index].flops for index in rank) for rank in owned]
    assert max(loads) - min(loads) <= max(unit.flops for unit in units)
    assert owned == assign_owners(units, layout), "all ranks divide the matrices in the same way"


EXPERTS = [Matrices(64, 64), Matrices(128, 64, 48), Matrices(64, 128, 48), *[Matrices(64, 64)] * 7]
EXPERT_LAYOUTS = [
    (Layout(), 1),
    (Layout(dp_shard=8, ep=8), 8),
    (Layout(dp_shard=8, ep=2), 2),
    (Layout(dp_replicate=2, dp_shard=2, cp=2, ep=2), 2),
    (Layout(dp_shard=2, tp=4, ep=4), 4),
    (Layout(dp_shard=8), 8),
    (Layout(dp_replicate=3, dp_shard=4, tp=2), 4),
    (Layout(dp_shard=5), 1),
]
"""Layouts with the number of groups of ranks that have different experts: 5 does not divide 48."""


@pytest.mark.parametrize(("layout", "num_groups"), EXPERT_LAYOUTS)
def test_experts_stay_on_the_ranks_that_have_them(layout, num_groups):
    units = units_of(EXPERTS, layout)
    of_each = [(unit.weight, unit.first + index) for unit in units for index in range(unit.num_matrices)]
    assert of_each == [(number, i) for number, w in enumerate(EXPERTS) for i in range(w.num_matrices)]
    loads = []
    for rank, owned in enumerate(assign_owners(units, layout)):
        number = rank if layout.ep > 1 else rank // layout.tp
        for unit in (units[index] for index in owned):
            if EXPERTS[unit.weight].num_experts:
                in_group = 48 // num_groups
                own = range(number % num_groups * in_group, (number % num_groups + 1) * in_group)
                assert {unit.first, unit.first + unit.num_matrices - 1} <= {*own}
        loads.append(sum(units[index].flops for index in owned))
    assert max(loads) - min(loads) <= max(unit.flops for unit in units)


def test_rounds_have_matrices_of_one_shape(monkeypatch):
    def rounds_of(shapes, ranks):
        layout = Layout(dp_shard=ranks)
        return update_rounds(units_of([Matrices(*shape) for shape in shapes], layout), layout)

    shapes = [(2, 6), (6, 2), (2, 6), (4, 4), (2, 2), (2, 6)]
    monkeypatch.setattr(muon, "ROUND_ELEMENTS", 24)
    assert rounds_of(shapes, 1) == [[[3]], [[0, 1]], [[2, 5]], [[4]]]
    assert rounds_of(shapes, 2) == [[[3], [0, 1]], [[4], [2, 5]]]
    assert rounds_of(shapes[4:], 2) == [[[1], [0]]]
    # Eight experts are four units of two experts, and a round takes one unit.
    assert rounds_of([(2, 6, 8), (2, 2)], 1) == [[[0]], [[1]], [[2]], [[3]], [[4]]]
    monkeypatch.setattr(muon, "ROUND_ELEMENTS", 1)
    assert rounds_of(shapes[:3], 2) == [[[0], [1]], [[2], []]]


def test_the_cost_of_8b():
    """An update needs 665 TFLOP, and sends each shard to the owners and back."""
    total = TOTAL_FLOPS
    assert total == pytest.approx(665e12, rel=0.01)
    cost = update_cost(EIGHT_B, Layout(dp_shard=64), "fp32")
    assert total / 64 <= cost.flops < 1.2 * total / 64
    sent = 2 * 4 * num_elements(EIGHT_B) / 64
    assert cost.exchanged_bytes == pytest.approx(sent * 63 / 64)
    assert cost.shared_bytes == 0
    replicas = update_cost(EIGHT_B, Layout(8, 2, 4), "fp32")
    assert replicas.flops == cost.flops, "replicas divide the matrices"
    assert replicas.exchanged_bytes == pytest.approx(sent * 7 / 8)
    assert replicas.shared_bytes == pytest.approx(4 * num_elements(EIGHT_B) / 8 * 7 / 8)
    assert update_cost(EIGHT_B, Layout(), "fp32")[2:4] == (0, 0)
    matrix = 4 * 4096 * 14336
    assert cost.peak_bytes == 2 * matrix + 2 * 4 * 4096**2
    assert update_cost(EIGHT_B, Layout(dp_shard=64), "bf16").peak_bytes < cost.peak_bytes


def test_the_traffic_of_experts():
    """Ranks with whole experts send none of them, and ranks that share experts send only their shards."""
    experts = [weight for weight in EXPERTS if weight.num_experts]
    size = 4 * num_elements(experts)
    for layout, exchanged, shared in (
        (Layout(), 0, 0),
        (Layout(dp_shard=8, ep=8), 0, 0),
        (Layout(dp_shard=8), 0, 0),
        (Layout(dp_shard=8, ep=2), 2 * size * 3 / 4 / 8, 0),
        (Layout(dp_shard=5), 2 * size * 4 / 5 / 5, 0),
        (Layout(dp_replicate=4, dp_shard=2, ep=2), 0, size / 2 * 3 / 4),
        # One tensor-parallel rank sends the direction of an expert, and both receive the update.
        (Layout(dp_replicate=3, tp=2), 3 * size / 2 / 6, size * 2 / 3),
    ):
        cost = update_cost(experts, layout, "fp32")
        assert cost.exchanged_bytes == pytest.approx(exchanged, rel=1e-4), layout
        assert cost.shared_bytes == pytest.approx(shared, rel=1e-4), layout
        assert cost.num_exchanges == (cost.num_rounds if exchanged else 0), layout
        assert cost.flops == pytest.approx(96 * flops((64, 128)) / num_ranks(layout), rel=0.2), layout


@pytest.mark.parametrize("moe", [None, MOE])
def test_the_state_of_a_model_has_the_planned_size(moe):
    """The plan ignores the counters of AdamW's steps."""
    model = nano(qkv_bias=True, moe=moe)
    states = dict(ShardedMuon(weights_of([model]), MUON, ALONE).state_tensors())
    found = sum(state.nbytes for name, state in states.items() if not name.endswith(".step"))
    config = RunConfig(name="x", optimizer=MUON)
    work = work_of(config, nano_shape(qkv_bias=True, moe=moe), Layout(), Batch(1, 1, 1, 16), "cpu")
    assert found == checkpoint_bytes(work) - 4 * num_params(work.shape)
    assert rank_memory(work, 0).phases["update"].optimizer == pytest.approx(found, abs=8 * 64)


def test_every_layout_keeps_half_of_the_state_of_blocks():
    layouts = (Layout(dp_shard=8), Layout(dp_shard=2, tp=4), Layout(pp=4, dp_shard=2), Layout(cp=8))
    for layout in layouts:
        work = step_work("8b", layout=layout)
        less = rank_memory(work, 0).phases["update"].optimizer
        less -= rank_memory(replace(work, muon="fp32"), 0).phases["update"].optimizer
        assert less == pytest.approx(4 * num_elements(EIGHT_B) / layout.world_size, rel=1e-6)


@pytest.mark.parametrize(
    "layout",
    [
        *(Layout(dp_shard=8), Layout(dp_shard=8, ep=4), Layout(pp=2, dp_shard=4, ep=2), Layout(tp=2, cp=2)),
        *(Layout(dp_shard=4, tp=2, ep=4), Layout(tp=4, ep=2)),
    ],
)
def test_every_layout_keeps_half_of_the_state_of_experts(layout):
    """Tensor parallelism alone does not split experts, and the blocks of a pipeline rank may be dense."""
    moe = moe_shape(MoeConfig(**{**MOE, "num_experts": 16, "expert_ffn_dim": 1024}), 0)
    work = step_work("8b", layout=layout)
    work = replace(work, shape=replace(work.shape, num_layers=4, moe=moe))
    less = 0
    for rank in range(layout.pp):
        adamw, muon_ = (replace(work, muon=precision) for precision in (None, "fp32"))
        less += rank_memory(adamw, rank).phases["update"].optimizer
        less -= rank_memory(muon_, rank).phases["update"].optimizer
    weights = stage_matrices(work.shape, 4, 1)
    assert less == pytest.approx(4 * num_elements(weights, layout) / layout.shards, rel=1e-6)


def test_the_time_of_an_update():
    layout = Layout(dp_replicate=2, dp_shard=4)
    plain = step_work("8b", layout=layout)
    adamw = cost_of(plain, H100, 8)
    fp32, bf16 = (cost_of(replace(plain, muon=precision), H100, 8) for precision in ("fp32", "bf16"))
    assert fp32.update_s == pytest.approx(16 * bf16.update_s)
    exchanged = sum(flow.num_bytes for flow in fp32.flows if flow.kind in ("exchange", "share"))
    assert fp32.sent["dp"] - adamw.sent["dp"] == exchanged > 0
    more = fp32.step_s - adamw.step_s - fp32.update_s
    assert more == pytest.approx(fp32.exposed_s["dp"] - adamw.exposed_s["dp"])
    assert more >= exchanged / H100.node_bandwidth
    assert {flow.kind for flow in traffic(plain)} == {"gather", "scatter", "reduce"}
