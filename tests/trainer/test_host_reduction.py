"""Tests gradients that are averaged on the host. `test_parity.py` compares the curves of replicas."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.runs import run_ranks
from trainkit.trainer.distributed import World
from trainkit.trainer.parallel import data_parallel
from trainkit.trainer.parallel.data_parallel import HostReduction, make_buckets
from trainkit.trainer.split_master import split_weights


def test_buckets_hold_every_parameter_once_and_the_last_first():
    params = [nn.Parameter(torch.empty(size)) for size in (10, 20, 30, 40)]
    groups = make_buckets(params, min_bytes=200)
    assert [[param.numel() for param in group] for group in groups] == [[40, 30], [20, 10]]
    single = make_buckets(params, min_bytes=1)
    assert [[param.numel() for param in group] for group in single] == [[40], [30], [20], [10]]


class TwoWays(nn.Module):
    """The rank decides which half of the parameters is used, and their order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return (x * self.frozen).sum()


def check_averages(world: World) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check_averages_in(dtype, world)


def check_averages_in(dtype: torch.dtype, world: World) -> None:
    """Compare with averages computed here; the gradients of split master weights are in float32 too."""
    mine, expected = TwoWays(), TwoWays()
    if dtype == torch.bfloat16:
        split_weights(mine)
        split_weights(expected)
    groups = make_buckets(list(mine.parameters()), 1)
    assert len(groups) > 1
    data_parallel.make_buckets = lambda params: make_buckets(params, 1)
    reduction = HostReduction(mine, dist.group.WORLD)
    orders = [[0, 1, 2], [2, 0, 3]] if world.rank == 0 else [[2, 1], [1, 2, 0]]
    for round_number in range(2):
        x = torch.full((2, 4), 0.1 * (world.rank + 1 + round_number), dtype=dtype)
        for index, order in enumerate(orders):
            reduction.set_enabled(index == len(orders) - 1)
            mine(x, order).backward()
            expected(x, order).backward()
        for param, other in zip(mine.parameters(), expected.parameters(), strict=True):
            if not param.requires_grad:
                assert param.grad is None
                continue
            average = torch.zeros_like(other, dtype=torch.float32) if other.grad is None else other.grad
            dist.all_reduce(average)
            torch.testing.assert_close(param.grad, average / world.size)
            first = param.grad.clone()
            dist.broadcast(first, 0)
            assert torch.equal(param.grad, first), "equal on all ranks, bit for bit"
            param.grad = other.grad = None


@pytest.mark.slow(seconds=3)
def test_whatever_a_rank_computes_and_in_which_order():
    run_ranks(check_averages, 2)
