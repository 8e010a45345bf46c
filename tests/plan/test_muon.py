"""Tests how Muon's matrices are divided among ranks, and what an update costs."""

from dataclasses import replace

import pytest
from planning import llama, step_work

from tests.support.models import ALONE, nano, nano_shape
from trainkit.config.schema import RunConfig
from trainkit.config.training import OptimizerConfig
from trainkit.plan import muon
from trainkit.plan.gpus import find_gpu
from trainkit.plan.launch import Batch, Layout
from trainkit.plan.memory import checkpoint_bytes, rank_memory
from trainkit.plan.model_shape import num_params
from trainkit.plan.muon import assign_owners, block_matrices, flops, num_elements, update_cost, update_rounds
from trainkit.plan.step_cost import cost_of, traffic
from trainkit.plan.step_work import work_of
from trainkit.trainer.models.model import weights_of
from trainkit.trainer.optimizers.muon import ShardedMuon

MUON = OptimizerConfig(name="muon")
H100 = find_gpu("h100")
assert H100 is not None
EIGHT_B = block_matrices(llama("8b")) * 32


def test_the_matrices_of_a_model():
    model = nano(qk_norm=True, qkv_bias=True, tie_embeddings=True)
    weights = [weight for weight in weights_of([model]) if weight.is_projection]
    assert [tuple(weight.param.shape) for weight in weights] == block_matrices(model.shape) * 2
    assert {weight.name.split(".", 2)[2] for weight in weights} == {
        *(f"attention.{name}.weight" for name in ("wq", "wk", "wv", "wo")),
        *(f"ffn.{name}.weight" for name in ("gate", "up", "down")),
    }


@pytest.mark.parametrize("num_ranks", [1, 3, 64, 300])
def test_each_matrix_has_one_owner_and_no_rank_has_much_more_work(num_ranks):
    owned = assign_owners(EIGHT_B, num_ranks)
    assert sorted(index for rank in owned for index in rank) == [*range(7 * 32)]
    loads = [sum(flops(EIGHT_B[index]) for index in rank) for rank in owned]
    assert max(loads) - min(loads) <= max(map(flops, EIGHT_B))
    assert owned == assign_owners(EIGHT_B, num_ranks), "all ranks divide the matrices in the same way"


def test_rounds_have_matrices_of_one_shape(monkeypatch):
    shapes = [(2, 6), (6, 2), (2, 6), (4, 4), (2, 2), (2, 6)]
    monkeypatch.setattr(muon, "ROUND_ELEMENTS", 24)
    assert update_rounds(shapes, 1) == [[[3]], [[0, 1]], [[2, 5]], [[4]]]
    assert update_rounds(shapes, 2) == [[[3], [0, 1]], [[4], [2, 5]]]
    assert update_rounds(shapes[4:], 2) == [[[1], [0]]]
    monkeypatch.setattr(muon, "ROUND_ELEMENTS", 1)
    assert update_rounds(shapes[:3], 2) == [[[0], [1]], [[2], []]]


def test_the_cost_of_8b():
    """An update needs 665 TFLOP, and sends each shard to the owners and back."""
    total = sum(map(flops, EIGHT_B))
    assert total == pytest.approx(665e12, rel=0.01)
    cost = update_cost(EIGHT_B, 64, 1, "fp32")
    assert total / 64 <= cost.flops < 1.2 * total / 64
    sent = 2 * 4 * num_elements(EIGHT_B) / 64
    assert cost.exchanged_bytes == pytest.approx(sent * 63 / 64)
    assert cost.shared_bytes == 0
    replicas = update_cost(EIGHT_B, 8, 8, "fp32")
    assert replicas.flops == cost.flops, "replicas divide the matrices"
    assert replicas.exchanged_bytes == pytest.approx(sent * 7 / 8)
    assert replicas.shared_bytes == pytest.approx(4 * num_elements(EIGHT_B) / 8 * 7 / 8)
    assert update_cost(EIGHT_B, 1, 1, "fp32")[2:4] == (0, 0)
    matrix = 4 * 4096 * 14336
    assert cost.peak_bytes == 2 * matrix + 2 * 4 * 4096**2
    assert update_cost(EIGHT_B, 64, 1, "bf16").peak_bytes < cost.peak_bytes


def test_the_state_of_a_model_has_the_planned_size():
    """The plan ignores the counters of AdamW's steps."""
    model = nano(qkv_bias=True)
    states = dict(ShardedMuon(weights_of([model]), MUON, ALONE).state_tensors())
    found = sum(state.nbytes for name, state in states.items() if not name.endswith(".step"))
    config = RunConfig(name="x", optimizer=MUON)
    work = work_of(config, nano_shape(qkv_bias=True), Layout(), Batch(1, 1, 1, 16), "cpu")
    assert found == checkpoint_bytes(work) - 4 * num_params(work.shape)
    assert rank_memory(work, 0).phases["update"].optimizer == pytest.approx(found, abs=8 * 64)


def test_every_layout_keeps_half_of_the_state_of_blocks():
    layouts = (Layout(dp_shard=8), Layout(dp_shard=2, tp=4), Layout(pp=4, dp_shard=2), Layout(cp=8))
    for layout in layouts:
        work = step_work("8b", layout=layout)
        less = rank_memory(work, 0).phases["update"].optimizer
        less -= rank_memory(replace(work, muon="fp32"), 0).phases["update"].optimizer
        assert less == pytest.approx(4 * num_elements(EIGHT_B) / layout.world_size, rel=1e-6)


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
