"""Tests that linear layers add the gradients of their weights to float32 sums without rounding them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.support.models import ALONE, nano, nll_sum, sample_keys, tokens
from trainkit.trainer.build import recompute_and_compile
from trainkit.trainer.causal_lm import Microbatch
from trainkit.trainer.forward_backward import ForwardContext, SequentialForwardBackward
from trainkit.trainer.models.linear import Linear
from trainkit.trainer.parallel.data_parallel import sum_in_float32
from trainkit.trainer.precision import cast_weights
from trainkit.trainer.progress import Progress
from trainkit.trainer.split_master import split_weights
from trainkit.trainer.torch_private import DispatchMode

PASSES = 8


class Results(DispatchMode):
    """Records the shape and dtype of every matrix that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[torch.Size, torch.dtype]] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dim() == 2:
            self.found.add((out.shape, out.dtype))
        return out


def passes(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and output gradients of a layer with 24 inputs and 40 outputs."""
    torch.manual_seed(0)
    return [(torch.randn(2, 7, 24).to(dtype), torch.randn(2, 7, 40).to(dtype)) for _ in range(PASSES)]


def gradient_of(layer: nn.Linear, dtype: torch.dtype) -> tuple[Tensor, Results]:
    """Return the summed gradient of a layer's weight, and the results of the last backward pass."""
    masters = cast_weights(layer, dtype)
    sum_in_float32(layer, masters)
    [master, *_] = masters.values()
    for x, grad in passes(dtype):
        out = layer(x.requires_grad_())
        with (results := Results()):
            out.backward(grad)
        assert x.grad is not None
        assert torch.equal(x.grad, (grad.flatten(0, 1) @ layer.weight).view_as(x))
    assert master.grad is not None
    assert layer.weight.grad is None
    return master.grad, results


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_microbatch_is_rounded(dtype):
    """PyTorch rounds the gradient of each microbatch, here to 8 or 11 bits."""
    exact = sum(grad.double().flatten(0, 1).t() @ x.double().flatten(0, 1) for x, grad in passes(dtype))
    size = torch.Size((40, 24))
    errors = []
    for kind in (Linear, nn.Linear):
        gradient, results = gradient_of(kind(24, 40, bias=False), dtype)
        errors.append(((gradient - exact).norm() / exact.norm()).item())
        assert ((size, dtype) in results.found) == (kind is nn.Linear), "no gradient in 16 bits"
    assert errors[0] < 1e-6
    assert errors[1] > 1e-4


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Trace whole graphs for the forward and the backward pass, run them as they are, and count graphs."""
    compile_, options = torch.compile, {"backend": "aot_eager", "fullgraph": True}
    monkeypatch.setattr(torch, "compile", lambda function: compile_(function, **options))
    torch._dynamo.reset()
    counters.clear()
    return lambda: counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("x_has_gradient", [True, False])
def test_compiled_layer_with_bias(compiler, x_has_gradient):
    """The compiler drops an operation if only the gradient of an input that needs none depends on it."""
    layer, plain = Linear(24, 40), nn.Linear(24, 40)
    plain.load_state_dict(layer.state_dict())
    found = []
    for module in (layer, plain):
        masters = cast_weights(module, torch.bfloat16)
        sum_in_float32(module, masters)
        compiled = torch.compile(module)
        for x, grad in passes(torch.bfloat16):
            compiled(x.requires_grad_(x_has_gradient)).backward(grad)
        found.append([master.grad for master in masters.values()])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=0.01, atol=0.05)


def test_only_the_master_has_the_sum():
    layer = Linear(24, 40, dtype=torch.bfloat16)
    master = nn.Parameter(layer.weight.detach().float())
    layer.sum_in_float32(master)
    for x, grad in passes(torch.bfloat16):
        layer(x.requires_grad_()).backward(grad)
    assert (layer.weight.grad, list(layer.state_dict())) == (None, ["weight", "bias"])
    assert master.grad is not None


def decoder_gradients(
    mode: Any = "none", compiled: bool = False, chunks: int = 1, tied: bool = True, splits: bool = False
) -> dict[str, Tensor]:
    """Return the gradients of a decoder in bf16 after two microbatches.

    The float32 master weights are separate from the weights unless `splits` is set.
    """
    model = nano(num_layers=2, dropout=0.1, tie_embeddings=tied)
    recompute_and_compile(model.layers, mode, compiled=compiled)
    if splits:
        split_weights(model, rounds_gradients=False)
    masters = cast_weights(model, torch.bfloat16)
    sum_in_float32(model, masters)
    context = ForwardContext(ALONE, nll_sum, use_loss_parallel=False)
    run = SequentialForwardBackward(lambda enabled: None, Progress(), model, context, chunks)
    micros = [Microbatch(tokens(seed=seed), tokens(seed=seed + 9), sample_keys()) for seed in (0, 1)]
    run.accumulate_gradient(micros, torch.ones(()), lambda loss: None)
    assert splits or all(param.grad is None for param in model.parameters())
    return {name: masters.get(param, param).grad for name, param in model.named_parameters()}  # type: ignore[misc]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunks", [1, 4])
def test_all_gradients_of_a_decoder_stay_in_float32(monkeypatch, tied, chunks):
    found = decoder_gradients(chunks=chunks, tied=tied)
    monkeypatch.setattr("tests.trainer.test_linear.sum_in_float32", lambda *_: None)
    rounded = decoder_gradients(chunks=chunks, tied=tied)
    for name, gradient in found.items():
        assert not torch.equal(gradient, rounded[name]) or (name == "embedding.weight" and not tied), name
        assert (gradient - rounded[name]).norm() < 0.01 * rounded[name].norm(), name


@pytest.mark.parametrize("tied", [True, False])
def test_split_masters_have_the_same_sums(tied):
    separate, split = (decoder_gradients(chunks=4, tied=tied, splits=splits) for splits in (False, True))
    assert all(torch.equal(gradient, separate[name]) for name, gradient in split.items())


def test_a_frozen_weight_has_no_sum():
    layer = Linear(24, 40, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    layer.sum_in_float32()
    x = torch.ones(2, 24, dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert torch.equal(x.grad[0], layer.weight.float().sum(0).bfloat16())


@pytest.mark.parametrize("mode", ["pointwise", "selective", "full"])
def test_compiled_and_recomputed_blocks_add_to_the_same_sums(compiler, mode):
    """All blocks share a graph, and recomputation adds no gradient twice.

    The compiler rounds the gradients of norms to the dtype of their weights.
    """
    alone = decoder_gradients()
    for compiled in (False, True):
        found = decoder_gradients(mode, compiled)
        different = {name for name in found if not torch.equal(found[name], alone[name])}
        assert all(compiled and name.endswith("norm.weight") for name in different), different
    assert compiler() == 1
