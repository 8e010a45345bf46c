"""Compares Muon with a reference computed by hand, and on every layout with one process."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support import parity
from tests.support.models import ALONE, nano, sample_keys, tokens
from tests.support.parity import (
    Case,
    assert_same_curves,
    run_cases,
)
from trainkit.config import load_config
from trainkit.config.training import OptimizerConfig, ParameterGroup
from trainkit.errors import FatalError
from trainkit.plan import muon as division
from trainkit.run.rundir import AttemptDir
from trainkit.trainer.models.model import Weight, weights_of
from trainkit.trainer.optimizers import newton_schulz
from trainkit.trainer.optimizers.muon import ShardedMuon
from trainkit.trainer.optimizers.newton_schulz import orthogonalize_, split_for_tf32
from trainkit.trainer.precision import cast_weights
from trainkit.trainer.split_master import split_weights
from trainkit.trainer.task_check import definite_problem

CONFIG = OptimizerConfig(name="muon", weight_decay=0.1, momentum=0.9)
EXPERTS = {"num_experts": 20, "top_k": 2, "expert_ffn_dim": 72, "num_shared": 1, "first_dense": 1}
ONE, ZERO = torch.ones(()), torch.zeros(())
LR, SLOW = 0.01, 0.5
"""The learning rate, and the factor for one of the matrices."""
MUON = "optimizer.name=muon"


def by_hand(direction: np.ndarray) -> np.ndarray:
    """Return the update of a matrix, or of each of several, before the learning rate, in float64."""
    if direction.ndim == 3:
        return np.stack([by_hand(matrix) for matrix in direction])
    rows, columns = direction.shape
    x = direction / (np.sqrt((direction**2).sum()) + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return 0.2 * np.sqrt(max(rows, columns)) * x


def backward(model: nn.Module, step: int) -> None:
    model(tokens(seed=step), sample_keys()).float().square().mean().backward()


@pytest.mark.parametrize(
    ("moe", "slow"), [(None, "blocks.1.ffn.down.weight"), (EXPERTS, "blocks.1.moe.experts.down")]
)
def test_twenty_steps_by_hand(monkeypatch, moe, slow):
    """Matrices of one shape are multiplied together, here up to two at a time, or five experts."""
    monkeypatch.setattr(division, "ROUND_ELEMENTS", 2 * 64 * 192)
    model, group = nano(qkv_bias=True, moe=moe), ParameterGroup(match=slow, lr_scale=SLOW)
    weights = weights_of([model])
    optimizer = ShardedMuon(weights, CONFIG.model_copy(update={"groups": (group,)}), ALONE)
    mine = {weight.name: weight.param for weight in weights}
    start = {name: param.detach().clone() for name, param in mine.items()}
    matrices = {
        name: param.detach().double().numpy().copy()
        for name, param in mine.items()
        if name.startswith("blocks") and param.dim() > 1 and "router" not in name
    }
    assert len(matrices) == 2 * 7 + (3 if moe else 0)
    momentum = {name: np.zeros_like(value) for name, value in matrices.items()}
    others = {name: nn.Parameter(value.clone()) for name, value in start.items() if name not in matrices}
    groups = [
        {"params": [param for param in others.values() if (param.dim() > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, 0.1), (False, 0.0))
    ]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=CONFIG.betas, eps=CONFIG.eps)
    for step in range(20):
        backward(model, step)
        divisor = 1.0 + step % 3
        for name, param in mine.items():
            assert param.grad is not None
            if name in others:
                others[name].grad = param.grad / divisor
                continue
            grad, lr = param.grad.double().numpy() / divisor, LR * (SLOW if name == slow else 1)
            momentum[name] = 0.9 * momentum[name] + 0.1 * grad
            direction = 0.1 * grad + 0.9 * momentum[name]
            matrices[name] = matrices[name] * (1 - lr * 0.1) - lr * by_hand(direction)
        adamw.step()
        optimizer.collect_gradients()
        optimizer.step(LR, ONE * divisor, ZERO)
        optimizer.zero_grad()
    shapes = {name: tuple(tensor.shape) for name, tensor in optimizer.state_tensors()}
    assert {name: shapes.pop(f"{name}.momentum") for name in matrices} == {
        name: value.shape for name, value in matrices.items()
    }
    assert {name.rpartition(".")[0] for name in shapes} == others.keys(), "AdamW has no state of a matrix"
    for name, param in mine.items():
        expected = torch.from_numpy(matrices[name]).float() if name in matrices else others[name].detach()
        assert (param - start[name]).abs().max() > 1e-2, f"{name} was trained"
        torch.testing.assert_close(param.detach(), expected, rtol=1e-5, atol=1e-5, msg=name)


def muon_of(kind: str) -> tuple[nn.Module, ShardedMuon]:
    """Return a model and its optimizer, with weights in float32, as bf16 halves or with casts to fp16."""
    model = nano(moe=EXPERTS)
    lowers = split_weights(model, rounds_gradients=False) if kind == "split" else {}
    masters = cast_weights(model, torch.float16) if kind == "cast" else {}
    return model, ShardedMuon(weights_of([model], masters, lowers), CONFIG, ALONE)


def every_tensor(model: nn.Module, optimizer: ShardedMuon) -> dict[str, Tensor]:
    lowers = {
        f"{weight.name}.lower": weight.lower for weight in optimizer._weights if weight.lower is not None
    }
    masters = {f"{weight.name}.master": weight.param.detach() for weight in optimizer._weights}
    return {**dict(model.named_parameters()), **dict(optimizer.state_tensors()), **lowers, **masters}


def update(optimizer: ShardedMuon, value: float | None = None, skip: Tensor = ZERO) -> None:
    for number, weight in enumerate(optimizer._weights):
        generator = torch.Generator().manual_seed(number)
        grad = torch.randn(weight.param.shape, generator=generator)
        if weight.param.dtype != torch.float32:
            weight.param.grad_dtype = torch.float32
        weight.param.grad = grad if value is None else torch.full_like(grad, value)
    optimizer.collect_gradients()
    optimizer.step(LR, ONE if value is None else ONE * value, skip)
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["fp32", "split", "cast"])
def test_a_skipped_step_changes_no_bit(kind):
    model, optimizer = muon_of(kind)
    update(optimizer)
    before = copy.deepcopy(every_tensor(model, optimizer))
    for value in (float("nan"), float("inf"), 1.0):
        update(optimizer, value, ONE)
    after = every_tensor(model, optimizer)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


def test_halves_and_casts_follow_the_float32_weight():
    values = {}
    for kind in ("fp32", "split", "cast"):
        model, optimizer = muon_of(kind)
        for _ in range(3):
            update(optimizer)
        values[kind] = {weight.name: weight for weight in optimizer._weights}
        if kind == "cast":
            for name, param in model.named_parameters():
                assert torch.equal(param, values[kind][name].param.half()), name
    for name, weight in values["fp32"].items():
        halves = values["split"][name]
        assert torch.equal(halves.param, weight.param.bfloat16()), name
        assert torch.equal(values["cast"][name].param, weight.param), name


def test_singular_values_near_one():
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(3, 48, 200, generator=generator)
    found = orthogonalize_(matrices.clone())
    values = torch.linalg.svdvals(found)
    assert 0.65 < values.min() < values.max() < 1.25
    high, low = split_for_tf32(matrices)
    assert not (high.view(torch.int32) & 0x1FFF).any(), "TF32 keeps ten bits of the mantissa"
    assert torch.equal(high + low, matrices)
    assert low.abs().max() <= matrices.abs().max() * 2**-11
    for precision, least, most in (("tf32x3", 0.0, 1e-5), ("bf16", 1e-3, 0.1)):
        difference = (orthogonalize_(matrices.clone(), precision) - found).abs().max() / found.abs().max()
        assert least <= difference < most, precision
    assert not orthogonalize_(torch.zeros(1, 4, 8)).any()


def test_only_bf16_depends_strongly_on_rounding_errors_of_the_gradient():
    """The bounds are those that docs/optimizers.md states, for matrices of full and of low rank."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = 128, 512
    full = torch.randn(1, rows, columns, generator=generator)
    low = torch.randn(rows, 16, generator=generator) @ full[:, :16] + 1e-3 * full
    changed: dict[str, list[float]] = {"fp32": [], "bf16": []}
    for matrices in (full, low):
        other = matrices * (1 + 1e-7 * torch.randn(matrices.shape, generator=generator))
        for precision, found in changed.items():
            first, second = (orthogonalize_(item.clone(), precision) for item in (matrices, other))  # type: ignore[arg-type]
            found.append(((first - second).norm() / first.norm()).item())
    assert max(changed["fp32"]) <= 2.2e-5
    assert max(changed["bf16"]) > 1e-3


def test_products_use_the_precision_of_muon_and_not_of_the_model(monkeypatch):
    """`precision.tf32` lets the model multiply in TF32."""
    used: list[str] = []
    original = torch.bmm

    def spy(*args: Tensor) -> Tensor:
        used.append(torch.get_float32_matmul_precision())
        return original(*args)

    monkeypatch.setattr(newton_schulz.torch, "bmm", spy)
    for outside, precision, inside in (("high", "fp32", "highest"), ("highest", "tf32x3", "high")):
        torch.set_float32_matmul_precision(outside)
        try:
            orthogonalize_(torch.ones(1, 2, 3), precision)  # type: ignore[arg-type]
            assert torch.get_float32_matmul_precision() == outside
        finally:
            torch.set_float32_matmul_precision("highest")
        assert {*used} == {inside}
        used.clear()


def test_what_muon_refuses():
    model = nano()
    with pytest.raises(FatalError, match=r"tf32x3.*the device cpu"):
        ShardedMuon(weights_of([model]), CONFIG.model_copy(update={"ns_precision": "tf32x3"}), ALONE)
    with pytest.raises(FatalError, match="role column, row or experts"):
        ShardedMuon([Weight(name, param) for name, param in model.named_parameters()], CONFIG, ALONE)


def test_a_model_without_matrices_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from tests.support.gpt import Gpt\nclass Mine(Gpt):\n    TENSOR_PLAN = {'head': 'head'}\n"
    )
    for name, is_refused in (("Mine", True), ("Gpt", False)):
        overrides = [MUON, f"model.architecture={tmp_path}/mine.py:{name}"]
        problem = definite_problem(load_config("quickstart", overrides=overrides, environ={}).config)
        assert (problem is not None and "no matrix" in problem.message) == is_refused


UNEVEN = ("model.num_heads=2", "model.num_kv_heads=2", "model.head_dim=2", "model.ffn_dim=9")
"""Options for matrices with 4 and 9 rows: of four ranks, the last has none of the 9."""
CASES = [
    Case("replicate", 2, {"dp_replicate": 2}),
    Case("shard", 2, {"dp_shard": 2}),
    Case("tp", 2, {"tp": 2}),
    Case("pp", 2, {"pp": 2}),
    Case("shard-4", 4, {"dp_shard": 4}),
    Case("shard-tp", 4, {"dp_shard": 2, "tp": 2}),
    Case("replicate-shard", 4, {"dp_replicate": 2, "dp_shard": 2}),
]
STEPS = ("train.steps=8", MUON, "optimizer.lr=0.003")


def train_in_rounds(rank: int, attempt: AttemptDir) -> None:
    """Train as one rank that orthogonalizes two matrices of a feed-forward layer at a time."""
    division.ROUND_ELEMENTS = 2 * 64 * 192
    parity.train(rank, attempt)


@pytest.mark.slow
@pytest.mark.xdist_group("parity")
def test_one_curve(tmp_path):
    run_cases(tmp_path, [Case("alone", 1, {})], STEPS)
    run_cases(tmp_path, CASES, STEPS, function=train_in_rounds)
    assert_same_curves(tmp_path, CASES)
    uneven = [Case("uneven", 1, {}, UNEVEN), Case("uneven-4", 4, {"dp_shard": 4}, UNEVEN)]
    run_cases(tmp_path, uneven, STEPS)
    assert_same_curves(tmp_path, uneven[1:], alone="uneven")


MOE = "model.moe={num_experts: 6, top_k: 2, expert_ffn_dim: 32, num_shared: 1, first_dense: 1}"
EXPERT_CASES = [
    Case("shard", 2, {"dp_shard": 2}),
    Case("replicate", 2, {"dp_replicate": 2}),
    Case("tp", 2, {"tp": 2}),
    Case("ep", 2, {"dp_shard": 2, "ep": 2}),
    Case("cp-ep", 2, {"cp": 2, "ep": 2}),
    Case("tp-ep", 2, {"tp": 2, "ep": 2}),
    Case("shard-tp-ep", 4, {"dp_shard": 2, "tp": 2, "ep": 2}),
    Case("shard-4", 4, {"dp_shard": 4}),
    Case("shard-ep", 4, {"dp_shard": 4, "ep": 2}),
    Case("shard-tp", 4, {"dp_shard": 2, "tp": 2}),
    Case("replicate-ep", 4, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}),
    Case("pp-ep", 4, {"pp": 2, "dp_shard": 2, "ep": 2}),
]
"""Of four shards of the 6 experts, three have two experts each, and one has none."""


@pytest.mark.slow
@pytest.mark.xdist_group("parity")
def test_one_curve_with_experts(tmp_path):
    steps = (*STEPS, MOE)
    run_cases(tmp_path, [Case("alone", 1, {})], steps)
    run_cases(tmp_path, EXPERT_CASES, steps, function=train_in_rounds)
    assert_same_curves(tmp_path, EXPERT_CASES)
