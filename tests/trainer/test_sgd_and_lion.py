"""Compares SGD with torch's, and Lion with a reference, for all ways of storing weights and state."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import ALONE, nano, sample_keys, tokens
from tests.trainer.test_optimizer import ONE, ZERO, skip_a_step
from trainkit.config.optimizers import OPTIMIZERS
from trainkit.config.training import OptimizerConfig
from trainkit.plan.optimizer_state import bytes_per_element, state_of
from trainkit.trainer.models.model import Weight
from trainkit.trainer.optimizers import KINDS, make_optimizer
from trainkit.trainer.optimizers.by_element import PIECE_ELEMENTS, ByElement
from trainkit.trainer.split_master import split_weights

LR, DECAY = 1e-2, 0.1
CONFIGS = {
    "sgd": OptimizerConfig(name="sgd", momentum=0.0),
    "momentum": OptimizerConfig(name="sgd", momentum=0.9),
    "nesterov": OptimizerConfig(name="sgd", momentum=0.8, nesterov=True),
    "lion": OptimizerConfig(name="lion", betas=(0.9, 0.99)),
}


class Lion(torch.optim.Optimizer):
    """The pseudocode of the paper, without weight decay."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": LR})
        self.averages = [torch.zeros_like(param) for param in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> None:
        for param, average in zip(self.param_groups[0]["params"], self.averages, strict=True):
            update = (0.9 * average + 0.1 * param.grad).sign()
            param.data -= self.param_groups[0]["lr"] * update
            average.copy_(0.99 * average + 0.01 * param.grad)


def reference(name: str, params: Iterable[Tensor]) -> torch.optim.Optimizer:
    config = CONFIGS[name]
    if config.name == "lion":
        return Lion(params)
    return torch.optim.SGD(params, lr=LR, momentum=config.momentum, nesterov=config.nesterov)


def gradients(model: nn.Module, step: int) -> list[Tensor]:
    model(tokens(seed=step), sample_keys()).float().square().mean().backward()
    found = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    return found


def stored(optimizer: ByElement) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in optimizer.state_tensors()}


@pytest.mark.parametrize("pieces", [1000, 1 << 18])
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_the_reference(name, pieces, monkeypatch):
    """Weights with a transposed layout in memory and of one element are updated too."""
    monkeypatch.setitem(PIECE_ELEMENTS, "cpu", pieces)
    torch.manual_seed(0)
    theirs = nano()
    theirs.turned = nn.Parameter(torch.randn(70, 30).t() / 4)
    theirs.scalar = nn.Parameter(torch.tensor(1.0))
    names, params = zip(*theirs.named_parameters(), strict=True)
    mine = [nn.Parameter(param.detach().clone()) for param in params]
    assert mine[names.index("turned")].stride() == (1, 30)
    casts = [nn.Parameter(param.detach().bfloat16()) for param in mine]
    weights = [Weight(*item, cast=cast) for *item, cast in zip(names, mine, casts, strict=True)]
    optimizer, expected = make_optimizer(weights, CONFIGS[name], ALONE), reference(name, params)
    for step in range(5):
        grads = [torch.randn_like(param) for param in params]
        for own, param, grad in zip(mine, params, grads, strict=True):
            own.grad, param.grad = 4 * grad, grad.clone()
            param.data *= 1 - LR * DECAY * (param.dim() > 1)
        optimizer.collect_gradients()
        if step == 3:
            before = [own.clone() for own in mine]
            skip_a_step(optimizer)
            assert all(map(torch.equal, before, mine))
        optimizer.step(LR, torch.tensor(4.0), ZERO)
        expected.step()
    for key, own, param, cast in zip(names, mine, params, casts, strict=True):
        torch.testing.assert_close(own, param, rtol=0, atol=1e-6, msg=lambda text, n=key: f"{n}: {text}")
        assert torch.equal(cast, own.bfloat16()), key


@pytest.mark.parametrize("name", CONFIGS)
def test_a_skipped_step_ignores_gradients_that_are_not_finite(name):
    model = nano(num_layers=1)
    optimizer = make_optimizer([Weight(*item) for item in model.named_parameters()], CONFIGS[name], ALONE)
    for skip, value in ((ZERO, 0.5), (ONE, float("nan")), (ONE, float("inf"))):
        before = {**stored(optimizer), **{key: param.clone() for key, param in model.named_parameters()}}
        for param in model.parameters():
            param.grad = torch.full_like(param, value)
        optimizer.collect_gradients()
        optimizer.step(LR, ONE * value, skip)
    after = {**stored(optimizer), **dict(model.named_parameters())}
    assert [key for key, tensor in after.items() if not torch.equal(tensor, before[key])] == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["momentum", "lion"])
def test_split_master_weights_are_updated_like_whole_ones(name, dtype):
    config = CONFIGS[name].model_copy(update={"state_dtype": dtype})
    whole, halves = nano(num_layers=1), nano(num_layers=1)
    lowers = split_weights(halves)
    optimizers = [
        make_optimizer([Weight(*item) for item in whole.named_parameters()], config, ALONE),
        make_optimizer(
            [Weight(key, param, lower=lowers[param]) for key, param in halves.named_parameters()],
            config,
            ALONE,
        ),
    ]
    for seed in range(4):
        for model, optimizer in zip((whole, halves), optimizers, strict=True):
            torch.manual_seed(seed)
            for param in model.parameters():
                param.grad = torch.randn(param.shape)
            optimizer.collect_gradients()
            optimizer.step(LR, ONE, ZERO)
    for (key, one), other in zip(stored(optimizers[0]).items(), stored(optimizers[1]).values(), strict=True):
        assert torch.equal(one, other), key
        assert one.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    for (key, one), other in zip(whole.named_parameters(), halves.parameters(), strict=True):
        assert torch.equal(one.bfloat16(), other), key


@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_compiled_update_is_the_same(name, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr("trainkit.trainer.optimizers.by_element.COMPILED_DEVICES", ("cpu",))
    models = nano(num_layers=1), nano(num_layers=1)
    optimizers = [
        make_optimizer(
            [Weight(*item) for item in model.named_parameters()], CONFIGS[name], ALONE, compiled=compiled
        )
        for model, compiled in zip(models, (False, True), strict=True)
    ]
    for step in range(3):
        grads = gradients(nano(num_layers=1), step)
        for model, optimizer in zip(models, optimizers, strict=True):
            for param, grad in zip(model.parameters(), grads, strict=True):
                param.grad = grad.clone()
            optimizer.collect_gradients()
            optimizer.step(LR, torch.tensor(1.5), torch.tensor(float(step == 1)))
    for (key, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6, msg=lambda text, n=key: f"{n}: {text}")


@pytest.mark.parametrize("name", [*CONFIGS, "adamw", "adamw_8bit", "lion in bf16"])
def test_the_planned_state_is_allocated(name):
    """Bytes are counted for matrices, whose rows determine the number of scales of 8-bit state."""
    config = CONFIGS.get(name.partition(" ")[0]) or OptimizerConfig(name=name)
    if name.endswith("bf16"):
        config = config.model_copy(update={"state_dtype": "bf16"})
    shape = (512, 640)
    optimizer = make_optimizer([Weight("w", nn.Parameter(torch.zeros(shape)))], config, ALONE)
    allocated = sum(tensor.nbytes for key, tensor in optimizer.state_tensors() if key != "w.step")
    planned = sum(bytes_per_element(dtype, shape[1]) for dtype in state_of(config, shape).values())
    assert allocated == planned * shape[0] * shape[1]


def test_every_optimizer_of_the_config_exists() -> None:
    assert {*KINDS, "muon"} == OPTIMIZERS.keys()
