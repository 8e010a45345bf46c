"""Gradients that are averaged on the host are those of the wrapper that reduces on a device."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support.models import nano, sample_keys, tokens
from tests.support.runs import run_ranks
from trainkit.config.running import ParallelConfig
from trainkit.plan.launch import Layout
from trainkit.trainer.distributed import World
from trainkit.trainer.models.model import local_tensor
from trainkit.trainer.parallel import data_parallel
from trainkit.trainer.parallel.data_parallel import (
    HostReduction,
    apply_data_parallel,
    gradient_switch,
    make_buckets,
)


def test_buckets_hold_every_parameter_once_and_the_last_first() -> None:
    params = [nn.Parameter(torch.empty(size)) for size in (10, 20, 30, 40)]
    groups = make_buckets(params, min_bytes=200)
    assert [[param.numel() for param in group] for group in groups] == [[40, 30], [20, 10]]
    single = make_buckets(params, min_bytes=1)
    assert [[param.numel() for param in group] for group in single] == [[40], [30], [20], [10]]


class TwoWays(nn.Module):
    """The rank decides which half of the parameters takes part, and in which order."""

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
    mine, expected = TwoWays(), TwoWays()
    groups = make_buckets(list(mine.parameters()), 1)
    assert len(groups) > 1
    data_parallel.make_buckets = lambda params: make_buckets(params, 1)
    reduction = HostReduction(mine, dist.group.WORLD)
    orders = [[0, 1, 2], [2, 0, 3]] if world.rank == 0 else [[2, 1], [1, 2, 0]]
    for round_number in range(2):
        x = torch.full((2, 4), 0.1 * (world.rank + 1 + round_number))
        for index, order in enumerate(orders):
            reduction.set_enabled(index == len(orders) - 1)
            mine(x, order).backward()
            expected(x, order).backward()
        for param, other in zip(mine.parameters(), expected.parameters(), strict=True):
            if not param.requires_grad:
                assert param.grad is None
                continue
            average = torch.zeros_like(other) if other.grad is None else other.grad
            dist.all_reduce(average)
            torch.testing.assert_close(param.grad, average / world.size)
            param.grad = other.grad = None


@pytest.mark.slow
def test_whatever_a_rank_computes_and_in_which_order() -> None:
    run_ranks(check_averages, 2)


def check_against_the_wrapper(world: World) -> None:
    mesh = init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    on_host, wrapped = nano(), nano()
    apply_data_parallel(wrapped, mesh, Layout(world.size, 1), torch.float32)
    copies = replace(world, mesh=mesh, layout=Layout(world.size, 1))
    switches = [gradient_switch(model, copies, ParallelConfig()) for model in (on_host, wrapped)]
    for number in range(4):
        last = number % 2 == 1
        for model, switch in zip((on_host, wrapped), switches, strict=True):
            switch(last)
            model(tokens(seed=10 * number + world.rank), sample_keys()).logsumexp(-1).mean().backward()
    grads = [[local_tensor(param.grad) for param in model.parameters()] for model in (on_host, wrapped)]
    torch.testing.assert_close(*grads)
    reference = deepcopy(grads[0])
    for grad in reference:
        dist.broadcast(grad, 0)
    torch.testing.assert_close(grads[0], reference, rtol=0, atol=0, msg="equal on all ranks")


@pytest.mark.slow
@pytest.mark.parametrize("num_procs", [2, 4])
def test_same_gradients_as_replicate(num_procs: int) -> None:
    run_ranks(check_against_the_wrapper, num_procs)
