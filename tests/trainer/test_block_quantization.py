"""Tests running averages in 8 bits: their values, their error, and blocks that no layout splits."""

import pytest
import torch
from torch import Tensor

from tests.support.said import said
from trainkit.config.training import OptimizerConfig
from trainkit.errors import TrainkitError
from trainkit.plan.optimizer_state import row_blocks, state_of
from trainkit.trainer.quantization import QuantizedAverage, code_values

APPLY = torch.zeros(())


def rounded(whole: Tensor, *, is_signed: bool = True, shard: Tensor | None = None) -> QuantizedAverage:
    """Return a tensor, or a shard of it, in 8 bits."""
    shard = whole if shard is None else shard
    average = QuantizedAverage.zeros(shard, whole, "w", code_values(is_signed=is_signed))
    average.quantize(shard, APPLY)
    return average


def normal(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    size = 10 ** (-4 * torch.rand(shape, generator=generator))
    return torch.randn(shape, generator=generator) * size


def test_the_values_of_the_paper():
    """The paper has 7 decades (section 1.3, figure 2), the highest with 64 values and a sign, or with 128."""
    signed, squares = code_values(is_signed=True), code_values(is_signed=False)
    for values in (signed, squares):
        assert values.shape == (256,)
        assert values[-1] == 1
        assert bool((values.diff() > 0).all())
    torch.testing.assert_close(signed[:127], -signed[128:255].flip(0))
    assert signed[127] == 0
    assert [int(((v > 0.1) & (v < 1)).sum()) for v in (signed, squares)] == [64, 128]
    torch.testing.assert_close(signed[128], torch.tensor(0.55e-6))
    torch.testing.assert_close(squares[1:3], torch.tensor([0.325e-6, 0.775e-6]))
    assert squares[0] == torch.tensor(1e-7), "no square is rounded to 0"


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("row", [64, 147, 2048, 8 * 509])
def test_rounds_to_the_nearest_value(row, is_signed):
    whole = normal(6, row) if is_signed else normal(6, row).square()
    found = rounded(whole, is_signed=is_signed).dequantize()
    part, num_blocks = row_blocks(row)
    size = -(-part // num_blocks)
    values = code_values(is_signed=is_signed)
    for elements, results in zip(whole.split(part, dim=1), found.split(part, dim=1), strict=True):
        for block, result in zip(elements.split(size, 1), results.split(size, 1), strict=True):
            largest = block.gather(1, block.abs().argmax(1, keepdim=True))
            assert torch.equal(result.gather(1, block.abs().argmax(1, keepdim=True)), largest), "exact"
            nearest = (block / largest)[..., None].sub(values).abs().argmin(-1)
            torch.testing.assert_close(result, values[nearest] * largest, rtol=1e-6, atol=0)


def test_squares_are_never_0():
    squares = torch.full((1, 4096), 1e-30)
    squares[0, 0] = 1.0
    assert bool((rounded(squares, is_signed=False).dequantize() > 0).all())


def test_0_stays_0():
    for is_signed in (True, False):
        average = rounded(torch.zeros(4, 1024), is_signed=is_signed)
        assert not average.dequantize().any()
        fresh = QuantizedAverage.zeros(torch.empty(4, 1024), torch.empty(4, 1024), "w", average.values)
        assert not fresh.dequantize().any()


@pytest.mark.parametrize("row", [64, 192, 768, 2048, 11008, 8 * 509])
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("shards", [1, 3])
def test_shards_are_those_of_the_whole(row, tp, shards):
    """Codes and scales are equal for shards by rows, for uneven shards, and for shards by columns."""
    whole = normal(8, row)
    expected = rounded(whole)
    parts = [[rounded(whole, shard=s) for s in rows.chunk(tp, 1)] for rows in whole.chunk(shards)]
    for kind in ("codes", "scales"):
        found = torch.cat([torch.cat([getattr(part, kind) for part in rows], 1) for rows in parts])
        assert torch.equal(found, getattr(expected, kind)), kind


def test_a_shard_that_cuts_a_block_is_refused():
    whole = torch.empty(8, 4096)
    with pytest.raises(TrainkitError) as error:
        rounded(whole, shard=whole[:, :768])
    said(error.value.message)
    said(error.value.hint)


def test_keeps_the_strides_of_the_parameter():
    weight = normal(32, 16, 3, 3).to(memory_format=torch.channels_last)
    found = rounded(weight)
    assert found.dequantize().stride() == weight.stride()
    assert torch.equal(found.dequantize(), rounded(weight.contiguous()).dequantize())


@pytest.mark.parametrize(
    ("row", "expected"), [(64, 3.0), (768, 2 + 8 / 96), (2048, 2.03125), (5120, 2.0375), (14336, 2.03125)]
)
def test_bytes_per_element(row, expected):
    """Two averages of long rows take about 2.03 bytes, and averages of short rows take more."""
    whole = torch.empty(4, row)
    averages = [rounded(whole, is_signed=is_signed) for is_signed in (True, False)]
    total = sum(average.codes.nbytes + average.scales.nbytes for average in averages) / whole.numel()
    assert total == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4096,), False),
        ((100_000,), False),
        ((63, 64), False),
        ((64, 64), True),
        ((2, 2048), True),
        ((100_000, 1), False),
        ((64, 3, 7, 7), True),
        ((512, 3, 3, 3), False),
        ((), False),
    ],
)
def test_small_parameters_and_vectors_stay_in_float32(shape, expected):
    dtypes = state_of(OptimizerConfig(name="adamw_8bit"), shape).values()
    assert set(dtypes) == {"8bit" if expected else "fp32"}


def test_an_average_of_squares_does_not_drift():
    """Although a slow average is rounded after every step, it still follows the gradients."""
    beta = 0.999
    generator = torch.Generator().manual_seed(0)
    size = 10 ** (-2 * torch.rand(4, 2048, generator=generator))
    expected, average = torch.zeros(4, 2048), rounded(torch.zeros(4, 2048), is_signed=False)
    for _ in range(600):
        squares = (size * torch.randn(4, 2048, generator=generator)).square()
        expected = beta * expected + (1 - beta) * squares
        average.quantize(beta * average.dequantize() + (1 - beta) * squares, APPLY)
    ratio = (average.dequantize() / expected).sqrt()
    assert abs(float(ratio.median()) - 1) < 0.03
    assert float(ratio.quantile(0.05)) > 0.75
    assert float(ratio.quantile(0.95)) < 1.25
