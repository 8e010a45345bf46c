"""Compares the optimizer with torch's AdamW and clip_grad_norm_."""

import copy
from functools import partial
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import nano, sample_keys, tokens
from trainkit.config.training import OptimizerConfig, ScheduleConfig
from trainkit.plan.batch import learning_rate
from trainkit.plan.optimizer_state import state_of
from trainkit.trainer.models.model import Weight
from trainkit.trainer.optimizers.adamw import ShardedAdamW
from trainkit.trainer.optimizers.by_element import PIECE_ELEMENTS, _compiled_update
from trainkit.trainer.quantization import QuantizedAverage, code_values

CONFIG = OptimizerConfig(weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
EIGHT_BIT = CONFIG.model_copy(update={"name": "adamw_8bit"})
ONE, ZERO = torch.ones(()), torch.zeros(())


def reference(model: nn.Module, lr: float = 1e-2) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, foreach=False, fused=False)


def weights(model: nn.Module) -> list[Weight]:
    return [Weight(name, param) for name, param in model.named_parameters()]


def gradient_norm(optimizer: ShardedAdamW) -> Tensor:
    return optimizer.square_sum().sqrt().float()


def backward(model: nn.Module, step: int, scale: float = 1.0) -> None:
    (model(tokens(seed=step), sample_keys()).float().square().mean() * scale).backward()


def update(optimizer: ShardedAdamW, divisor: Tensor = ONE, skip: Tensor = ZERO) -> None:
    optimizer.collect_gradients()
    optimizer.step(1e-2, divisor, skip)
    optimizer.zero_grad()


@pytest.mark.parametrize("limit", [0.01, 1e6])
def test_equals_torch(limit):
    mine, theirs = nano(), nano()
    optimizer, expected = ShardedAdamW(weights(mine), CONFIG), reference(theirs)
    for step in range(5):
        backward(mine, step, scale=50.0)
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            b.grad = a.grad.clone()
        expected_norm = nn.utils.clip_grad_norm_(theirs.parameters(), limit)
        expected.step()
        expected.zero_grad()
        optimizer.collect_gradients()
        norm = gradient_norm(optimizer)
        assert norm.item() == pytest.approx(expected_norm.item(), rel=3e-6)
        assert (norm > limit) == (limit < 1)
        optimizer.step(1e-2, (norm / limit).clamp(min=1.0), ZERO)
        optimizer.zero_grad()
    start = nano()
    for (name, a), b, first in zip(
        mine.named_parameters(), theirs.parameters(), start.parameters(), strict=True
    ):
        assert (a - first).abs().max() > 1e-3, f"{name} was trained"
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("config", [CONFIG, EIGHT_BIT], ids=["fp32", "8bit"])
def test_skip_leaves_every_bit(config):
    model = nano()
    optimizer = ShardedAdamW(weights(model), config)
    backward(model, 0)
    update(optimizer)
    before = copy.deepcopy({**dict(model.named_parameters()), **dict(optimizer.state_tensors())})
    for value in (float("nan"), float("inf"), 1.0):
        backward(model, 1)
        for param in model.parameters():
            param.grad.fill_(value)
        update(optimizer, divisor=ONE * float("nan"), skip=ONE)
    after = {**dict(model.named_parameters()), **dict(optimizer.state_tensors())}
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    assert before["head.weight.step"].item() == 1


def test_parameters_without_gradient_are_left_alone():
    model = nano()
    optimizer = ShardedAdamW(weights(model), CONFIG)
    backward(model, 0)
    frozen = model.embedding.weight
    frozen.grad = None
    before = frozen.detach().clone()
    optimizer.collect_gradients()
    others = [p.grad for p in model.parameters() if p.grad is not None]
    expected = torch.cat([grad.flatten().double() for grad in others]).norm()
    assert gradient_norm(optimizer).item() == pytest.approx(expected.item(), rel=1e-6)
    optimizer.step(1e-2, ONE, ZERO)
    assert torch.equal(frozen, before)
    assert dict(optimizer.state_tensors())["embedding.weight.step"].item() == 0


def test_the_norm_of_large_tensors_is_exact():
    """If they were added up in float32 in sequence, the norm of these tensors would be 1e-4 too small."""
    model = nn.Linear(2048, 4096)
    optimizer = ShardedAdamW(weights(model), CONFIG)
    model.weight.grad = torch.randn(4096, 2048).t().contiguous().t()
    model.bias.grad = torch.randn(4096)
    optimizer.collect_gradients()
    expected = torch.cat([model.weight.grad.double().flatten(), model.bias.grad.double()]).norm()
    assert gradient_norm(optimizer).item() == pytest.approx(expected.item(), rel=1e-6)


def skip_a_step(optimizer: ShardedAdamW) -> None:
    before = [tensor.clone() for _, tensor in optimizer.state_tensors()]
    optimizer.step(1e-2, ONE, ONE)
    for old, (name, new) in zip(before, optimizer.state_tensors(), strict=True):
        assert torch.equal(old, new), name


def test_running_averages_in_bf16_are_rounded_once_a_step(monkeypatch):
    """The result equals torch's AdamW with rounded averages, and a skipped step changes nothing."""
    monkeypatch.setitem(PIECE_ELEMENTS, "cpu", 1000)
    mine, theirs = nano(), nano()
    optimizer = ShardedAdamW(weights(mine), CONFIG.model_copy(update={"state_dtype": "bf16"}))
    expected = reference(theirs)
    for step in range(6):
        backward(mine, step)
        backward(theirs, step)
        optimizer.collect_gradients()
        if step == 3:
            skip_a_step(optimizer)
        optimizer.step(1e-2, ONE, ZERO)
        optimizer.zero_grad()
        expected.step()
        expected.zero_grad()
        for state in expected.state.values():
            for kind in ("exp_avg", "exp_avg_sq"):
                state[kind] = state[kind].bfloat16().float()
    assert {tensor.dtype for name, tensor in optimizer.state_tensors() if not name.endswith("step")} == {
        torch.bfloat16
    }
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-4, msg=lambda text, n=name: f"{n}: {text}")


def test_running_averages_in_8_bits_are_rounded_once_a_step(monkeypatch):
    """The result equals torch's AdamW with averages rounded after each step, whatever the chunk size is."""
    mine, in_pieces, theirs = (nano(num_layers=1) for _ in range(3))
    optimizer, expected = ShardedAdamW(weights(mine), EIGHT_BIT), reference(theirs)
    pieces = ShardedAdamW(weights(in_pieces), EIGHT_BIT)
    for step in range(3):
        # All optimizers get the gradients of one model, because a single rounding would change all later
        # ones.
        backward(theirs, step)
        for model in (mine, in_pieces):
            for param, source in zip(model.parameters(), theirs.parameters(), strict=True):
                param.grad = None if source.grad is None else source.grad.clone()
        update(optimizer)
        with monkeypatch.context() as patch:
            patch.setitem(PIECE_ELEMENTS, "cpu", 1000)
            update(pieces)
        expected.step()
        expected.zero_grad()
        for param, state in expected.state.items():
            for kind, dtype in state_of(EIGHT_BIT, param.shape).items():
                if dtype != "8bit":
                    continue
                values = code_values(is_signed=kind == "exp_avg")
                average = QuantizedAverage.zeros(param, param, "", values)
                average.quantize(state[kind], ZERO)
                state[kind].copy_(average.dequantize())
    for (name, a), b in zip(optimizer.state_tensors(), dict(pieces.state_tensors()).values(), strict=True):
        assert torch.equal(a, b), name
    for (name, a), b, c in zip(
        mine.named_parameters(), in_pieces.parameters(), theirs.parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        # Between two values of a code, the last bit of torch's average decides.
        differs = (a - c).abs() > 1e-5 + 1e-3 * c.abs()
        assert differs.float().mean() < 2e-3, name


@pytest.mark.parametrize("config", [EIGHT_BIT, CONFIG.model_copy(update={"state_dtype": "bf16"})])
def test_scalars_and_empty_shards_are_updated_too(config):
    """A rank without a row of a parameter counts the steps too, because the checkpoint may use its count."""
    model = nn.Module()
    model.scalar = nn.Parameter(torch.tensor(1.0))
    model.empty = nn.Parameter(torch.empty(0, 4096))
    optimizer = ShardedAdamW(weights(model), config)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.collect_gradients()
    optimizer.step(0.5, ONE, ZERO)
    assert model.scalar.item() == pytest.approx(0.5)
    assert {t.item() for name, t in optimizer.state_tensors() if name.endswith("step")} == {1.0}


@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize("config", [CONFIG, EIGHT_BIT, CONFIG.model_copy(update={"state_dtype": "bf16"})])
def test_a_compiled_update_is_the_same(config, monkeypatch):
    """The results are equal except for the last bit, also with a skipped step and after a resume."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr("trainkit.trainer.optimizers.by_element.COMPILED_DEVICES", ("cpu",))
    monkeypatch.setattr(
        "trainkit.trainer.optimizers.by_element.WHOLE_ELEMENTS", 5000
    )  # some weights have more elements
    models = [nano(num_layers=1) for _ in range(3)]
    cast = [
        [
            Weight(name, param, cast=nn.Parameter(param.detach().bfloat16()))
            for name, param in model.named_parameters()
        ]
        for model in models
    ]
    eager, compiled, resumed = (
        ShardedAdamW(weights, config, compiled=weights is not cast[0]) for weights in cast
    )
    for step in range(6):
        for model, optimizer in zip(models, (eager, compiled, resumed), strict=True):
            backward(model, step)
            optimizer.collect_gradients()
            if step == 3:
                skip_a_step(optimizer)
            optimizer.step(1e-2, torch.tensor(1.5), ZERO)
            optimizer.zero_grad()
        if step == 2:
            models[2].load_state_dict(models[1].state_dict())
            for (_, old), (_, new) in zip(compiled.state_tensors(), resumed.state_tensors(), strict=True):
                new.copy_(old)
    for (name, a), b, c in zip(
        models[0].named_parameters(), models[1].parameters(), models[2].parameters(), strict=True
    ):
        assert torch.equal(b, c), name
        # Between two values of a code, or of bf16, the last bit decides.
        assert ((a - b).abs() > 2e-4 + 1e-3 * a.abs()).float().mean() < 2e-3, name
    for weight in chain(*cast):
        assert torch.equal(weight.cast, weight.param.bfloat16()), weight.name


def test_every_row_width_is_compiled(monkeypatch):
    """torch.compile runs a function eagerly once it has compiled it for a limited number of arguments."""
    calls: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        number = len(set(calls)) + 1
        return lambda *args: calls.append(number) or graph.forward(*args)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr("trainkit.trainer.optimizers.by_element.COMPILED_DEVICES", ("cpu",))
    monkeypatch.setattr("torch._dynamo.config.recompile_limit", 2)
    _compiled_update.cache_clear()
    torch._dynamo.reset()
    model = nn.ParameterList(nn.Parameter(torch.randn(64, 64 * width)) for width in range(8, 12))
    model.append(nn.Parameter(torch.randn(96)))
    optimizer = ShardedAdamW(weights(model), EIGHT_BIT, compiled=True)
    for _ in range(2):
        for param in model:
            param.grad = torch.ones_like(param)
        update(optimizer)
    _compiled_update.cache_clear()
    assert sorted(calls) == sorted([*range(1, 6)] * 2)


SHAPES = ["cosine", "linear", "wsd", "constant"]


def rates(total: int, peak: float = 1.0, **config: Any) -> list[float]:
    schedule = ScheduleConfig(**config)
    return [learning_rate(step, total, peak, schedule) for step in range(1, total + 1)]


HALF_A_TURN = [0.2 + 0.8 * (1 + cosine) / 2 for cosine in (0.5**0.5, 0.0, -(0.5**0.5), -1.0)]


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        *((name, {"warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0]) for name in SHAPES),
        # the warm-up is longer than the run
        *((name, {"warmup_steps": 8}, [0.125, 0.25, 0.375]) for name in SHAPES),
        ("cosine", {"min_lr_ratio": 0.2}, HALF_A_TURN),
        ("linear", {"min_lr_ratio": 0.2}, [0.8, 0.6, 0.4, 0.2]),
        ("constant", {"warmup_steps": 1, "min_lr_ratio": 0.2}, [1.0] * 4),
        ("wsd", {"warmup_steps": 2, "decay_steps": 4}, [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]),
        # By default, wsd decays over the last fifth, also in a short run, but only after the warm-up.
        ("wsd", {"min_lr_ratio": 0.5}, [*[1.0] * 16, 0.875, 0.75, 0.625, 0.5]),
        ("wsd", {"min_lr_ratio": 0.5}, [1.0, 0.5]),
        ("wsd", {"warmup_steps": 2, "decay_steps": 100}, [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]),
    ],
)
def test_the_rate_of_each_step(name, config, expected):
    given = {"warmup_steps": 0, "min_lr_ratio": 0.0, **config}
    assert rates(len(expected), name=name, **given) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("total", [1, 2, 7, 1000])
def test_the_last_step_has_the_lowest_rate_and_none_beyond_falls_further(name, total):
    config = ScheduleConfig(name=name, warmup_steps=0, min_lr_ratio=0.1)
    assert learning_rate(total, total, 3.0, config) == pytest.approx(0.3)
    assert learning_rate(total + 5, total, 3.0, config) == pytest.approx(0.3)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("warmup_steps", [0, 1, 100])
def test_no_jumps(name, warmup_steps):
    found = rates(1000, name=name, warmup_steps=warmup_steps, min_lr_ratio=0.0)
    steepest = 1 / warmup_steps if warmup_steps > 1 else 0.0051
    assert all(abs(after - before) <= steepest + 1e-12 for before, after in pairwise(found))
    assert all(0 <= rate <= 1 for rate in found)
