"""Tests random numbers that depend only on the place of their use."""

from collections.abc import Sequence
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from tests.support.models import nano
from trainkit.trainer.build import init_parameters
from trainkit.trainer.stateless_random import dropout, fill_normal_, hash_int32, stable_key

KEYS = torch.tensor([1, 2], dtype=torch.int32)


def normal(shape: Sequence[int], name: str = "0/w", std: float = 1.0) -> Tensor:
    values = torch.empty(tuple(shape))
    fill_normal_(values, std, name, shape, (0,) * len(shape))
    return values


class TestGoldenValues:
    """A change of these values would make every resumed run continue with other noise."""

    def test_keys(self):
        assert [stable_key("a"), stable_key("dropout", 3), stable_key(0, "sample")] == [
            310482890,
            142797943,
            1226981250,
        ]

    def test_hash(self):
        counter = torch.arange(4, dtype=torch.int32)
        assert hash_int32(counter, 7, 9).tolist() == [1082250929, 1979266635, 1271019535, -674539194]
        borders = torch.tensor([-1, 2**31 - 1], dtype=torch.int32)
        assert hash_int32(borders, -5).tolist() == [2095690390, -1602287900]

    def test_dropout(self):
        dropped = dropout(torch.ones(2, 8), 0.5, KEYS, stable_key("dropout", 3))
        assert dropped.tolist() == [[0, 2, 2, 0, 0, 2, 2, 2], [2, 2, 0, 2, 2, 2, 0, 2]]

    def test_first_weights(self):
        expected = [[0.086395, -1.042707, -0.715096, 0.251754], [-0.320085, -0.674815, -2.254371, -0.032364]]
        assert normal((2, 4)).tolist() == [pytest.approx(row, abs=2e-6) for row in expected]


class TestDropout:
    def test_probability_zero_is_the_identity(self):
        x = torch.randn(2, 5)
        assert dropout(x, 0.0, KEYS, site_key=0) is x

    @pytest.mark.parametrize("probability", [0.01, 0.1, 0.5, 0.9])
    def test_rate_and_scale(self, probability):
        x = torch.ones(4, 100_000)
        dropped = dropout(x, probability, torch.arange(4, dtype=torch.int32), site_key=1)
        assert dropped.unique().tolist() == pytest.approx([0.0, 1 / (1 - probability)])
        rates = (dropped == 0).float().mean(dim=1)
        sigma = (probability * (1 - probability) / 100_000) ** 0.5
        assert rates.tolist() == pytest.approx([probability] * 4, abs=5 * sigma)
        assert dropped.mean().item() == pytest.approx(1.0, rel=0.05)

    def test_a_probability_next_to_one_drops_all(self):
        """The threshold is then the largest int32, and must not wrap around to the smallest."""
        assert dropout(torch.ones(2, 1000), 1 - 1e-12, KEYS, site_key=0).count_nonzero() == 0

    def test_mask_belongs_to_the_sample_not_to_its_place_in_the_batch(self):
        x = torch.ones(3, 4, 50)
        keys = torch.tensor([5, -6, 7], dtype=torch.int32)
        together = dropout(x, 0.3, keys, site_key=2)
        for row in range(3):
            alone = dropout(x[row : row + 1], 0.3, keys[row : row + 1], site_key=2)
            assert torch.equal(together[row : row + 1], alone)

    def test_gradient_flows_through_what_is_kept(self):
        x = torch.randn(2, 100, requires_grad=True)
        dropped = dropout(x, 0.25, KEYS, site_key=0)
        dropped.sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert torch.equal(x.grad, dropout(torch.ones(2, 100), 0.25, KEYS, site_key=0))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_keeps_the_type_and_drops_the_same_in_each(self, dtype):
        dropped = dropout(torch.ones(2, 64, dtype=dtype), 0.5, KEYS, site_key=9)
        assert dropped.dtype == dtype
        assert torch.equal(dropped.float(), dropout(torch.ones(2, 64), 0.5, KEYS, site_key=9))

    def test_compiled_is_the_same(self):
        """`test_layouts.py` trains with dropout and the code of Inductor."""
        compiled = torch.compile(dropout, fullgraph=True, backend="aot_eager")
        x = torch.randn(2, 7, 33)
        for site_key in (KEYS[0], KEYS[1]):
            assert torch.equal(compiled(x, 0.3, KEYS, site_key), dropout(x, 0.3, KEYS, site_key))


class TestNormal:
    def test_tiles_of_two_and_three_dimensions_equal_the_whole(self):
        for shape, tile in (((7, 9), (3, 4)), ((4, 6, 5), (3, 2, 4))):
            whole = normal(shape)
            starts = [range(0, size, step) for size, step in zip(shape, tile, strict=True)]
            for offset in product(*starts):
                window = tuple(
                    slice(o, min(o + t, size)) for o, t, size in zip(offset, tile, shape, strict=True)
                )
                shard = torch.empty_like(whole[window])
                fill_normal_(shard, 1.0, "0/w", shape, offset)
                assert torch.equal(shard, whole[window])

    def test_beyond_two_to_the_32_elements(self):
        """Rows whose elements share the low 32 bits of their index differ by the high bits."""
        shape = (3, 2**32)
        rows = []
        for row in range(3):
            shard = torch.empty(1, 2000)
            fill_normal_(shard, 1.0, "0/w", shape, (row, 5))
            rows.append(shard)
        for first, second in pairwise(rows):
            assert abs(torch.corrcoef(torch.cat((first, second)))[0, 1]) < 0.1
        assert torch.cat(rows).std().item() == pytest.approx(1, abs=0.05)

    def test_a_vector_and_an_empty_shard(self):
        assert normal((12,)).std() > 0.3
        fill_normal_(torch.empty(0, 4), 1.0, "0/w", (8, 4), (8, 0))


def test_a_seed_and_a_name_decide():
    first, again, other = nano(seed=3), nano(seed=3), nano(seed=4)
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c) == ("norm" in name)
    assert not torch.equal(first.blocks[0].ffn.up.weight, first.blocks[1].ffn.up.weight)
    assert not torch.equal(first.blocks[0].ffn.up.weight, first.blocks[0].ffn.gate.weight)


def test_torch_generators_are_left_alone():
    before = torch.get_rng_state()
    model = nano()
    state = torch.get_rng_state()
    init_parameters(model, 1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(before)
