"""Tests the loss scale of fp16."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import ALONE, nano, nll_sum, sample_keys, tokens
from trainkit.config.training import PrecisionConfig
from trainkit.errors import EXIT_NO_RESTART, TrainkitError
from trainkit.trainer.causal_lm import Microbatch
from trainkit.trainer.forward_backward import ForwardContext, SequentialForwardBackward
from trainkit.trainer.precision import LossScale, apply_float8, require_float8
from trainkit.trainer.progress import Progress

CPU = torch.device("cpu")


def scale_of(dtype: str = "fp16", start: float = 1024.0, growth: int = 3) -> LossScale:
    config = PrecisionConfig(dtype=dtype, init_loss_scale=start, loss_scale_growth_interval=growth)
    return LossScale(config, CPU)


def after(scale: LossScale, skips: str) -> list[float]:
    """Return the factor after each step. In `skips`, `!` is a step that overflowed, and `.` is a good one."""
    values = []
    for mark in skips:
        scale.update(torch.tensor(float(mark == "!")))
        values.append(scale.value.item())
    return values


@pytest.mark.parametrize(
    ("options", "skips", "values"),
    [
        # The scale halves on overflow, and doubles after a number of good steps, which are then counted
        # again.
        ({}, "..!...", [1024, 1024, 512, 512, 512, 1024]),
        ({}, "......", [1024, 1024, 2048, 2048, 2048, 4096]),
        ({"start": 4.0}, "!!!!", [2, 1, 1, 1]),
        ({"dtype": "fp32"}, "!...!", [1, 1, 1, 1, 1]),
        ({"dtype": "bf16"}, "!...!", [1, 1, 1, 1, 1]),
    ],
)
def test_the_scale_after_each_step(options, skips, values):
    scale = scale_of(**options)
    assert scale.enabled == ("dtype" not in options)
    assert after(scale, skips) == values


def test_never_grows_beyond_what_a_float_holds():
    scale = scale_of(growth=1)
    after(scale, "." * 300)
    assert torch.isfinite(scale.value)


def test_state_goes_round():
    scale, restored = scale_of(), scale_of()
    after(scale, "!..")
    restored.load(scale.state())
    assert restored.state() == scale.state() == {"value": 512.0, "good_steps": 2.0}
    assert after(restored, "...") == after(scale, "...") == [1024, 1024, 1024]


@pytest.mark.parametrize(
    ("dtype", "state", "value"), [("fp16", {}, 1024), ("fp32", {"value": 512.0, "good_steps": 2.0}, 1)]
)
def test_the_state_of_another_type(dtype, state, value):
    scale = scale_of(dtype)
    scale.load(state)
    assert scale.value.item() == value


def test_a_cpu_has_none():
    pytest.importorskip("torchao")
    with pytest.raises(TrainkitError, match="a CPU does not support float8") as error:
        require_float8(torch.device("cpu"))
    assert error.value.exit_code == EXIT_NO_RESTART


@pytest.mark.parametrize("rowwise", [False, True])
def test_blocks_multiply_in_float8(rowwise):
    pytest.importorskip("torchao")
    from torchao.float8.float8_linear import Float8Linear

    plain, low = nano(), nano()
    names = [name for name, _ in low.named_parameters()]
    apply_float8(low.layers, rowwise=rowwise, emulate=True)
    assert [name for name, _ in low.named_parameters()] == names, "checkpoints stay what they are"
    assert isinstance(low.blocks[0].attention.wq, Float8Linear)
    assert low.blocks[0].attention.wq.config.pad_inner_dim, "the number of tokens can be anything"
    granularity = low.blocks[0].attention.wq.config.cast_config_weight.scaling_granularity
    assert granularity.value == ("axiswise" if rowwise else "tensorwise")
    assert not isinstance(low.head, Float8Linear)
    exact, rounded = plain(tokens(), sample_keys()), low(tokens(), sample_keys())
    assert not torch.equal(exact, rounded)
    assert (exact - rounded).norm() < 0.1 * exact.norm()
    rounded.square().mean().backward()
    assert all(param.grad is not None for param in low.parameters())


class Head(nn.Module):
    """A model whose hidden states are parameters, and whose loss is computed in chunks."""

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        super().__init__()
        self.hidden, self.weight = nn.Parameter(hidden), nn.Parameter(weight)

    def forward(self, tokens: Tensor, *, sample_keys: Tensor, loss: Callable[..., Tensor]) -> Tensor:
        return loss(self.hidden, self.weight)


def test_gradients_of_a_loss_in_parts_are_scaled_before_they_underflow():
    """The labels are so likely that the gradients of the logits are below 1e-8, which is 0 in fp16."""
    labels = torch.arange(16).view(2, 8)
    hidden, weight = 19.0 * torch.eye(16, 32).view(2, 8, 32), torch.eye(16, 32)
    scale = torch.tensor(2.0**16)
    found = {}
    for dtype in (torch.float64, torch.float16):
        model = Head(hidden.to(dtype), weight.to(dtype))
        context = ForwardContext(ALONE, nll_sum, use_loss_parallel=False)
        passes = SequentialForwardBackward(lambda enabled: None, Progress(), model, context, 4)
        micro = Microbatch(labels, labels, sample_keys())
        with torch.no_grad():
            expected = passes.loss_sums(micro)
        losses: list[Tensor] = []
        passes.accumulate_gradient([micro], scale, losses.append)
        assert torch.equal(losses[0], expected), "the loss itself is not scaled"
        found[dtype] = [param.grad for param in (model.hidden, model.weight)]
    for exact, of_fp16 in zip(found[torch.float64], found[torch.float16], strict=True):
        assert (exact.abs().amax() / scale).item() < 2.0**-20
        assert (of_fp16 != 0).sum() == (exact != 0).sum() > 0
        torch.testing.assert_close(of_fp16.double(), exact, rtol=5e-3, atol=0.0)
