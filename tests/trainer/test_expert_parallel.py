"""Tests that experts on several ranks compute what they compute on one, with their gradients and shards."""

import signal
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

from tests.support.parity import curve, run_chain, saved_tensors, worst_difference
from tests.support.runs import events, fork_workers, make_attempt, run_ranks, train, wait_for, wait_until
from trainkit.config.training import OptimizerConfig
from trainkit.plan.launch import Layout
from trainkit.run.manifest import published
from trainkit.run.rundir import RunDir
from trainkit.trainer.build import recompute_and_compile
from trainkit.trainer.distributed import World, build_expert_mesh, build_mesh
from trainkit.trainer.models.experts import Experts
from trainkit.trainer.models.model import Weight, local_tensor, shard_index
from trainkit.trainer.optimizers.adamw import ShardedAdamW
from trainkit.trainer.parallel.data_parallel import mixed_precision
from trainkit.trainer.parallel.expert import apply_expert_parallel, order_by_expert, shard_experts
from trainkit.trainer.torch_private import DispatchMode

pytestmark = [pytest.mark.slow(seconds=4), pytest.mark.xdist_group("experts")]

TOKENS, DIM, EXPERTS, WIDTH = 6, 16, 4, 8
HOST = torch.device("cpu")
LAYOUTS = (
    Layout(dp_shard=4, ep=4),
    Layout(dp_shard=4, ep=2),
    Layout(dp_replicate=2, dp_shard=2, ep=2),
    Layout(dp_shard=2, cp=2, ep=4),
    Layout(dp_shard=2, tp=2, ep=2),
    Layout(dp_replicate=2, tp=2, ep=2),
    Layout(tp=4, ep=2),
)
ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default


def test_received_rows_are_ordered_by_expert_then_by_rank():
    received = torch.tensor([[1, 0, 2], [0, 0, 1], [2, 0, 0]])  # three ranks send to three experts
    order, inverse = order_by_expert(received, 6)
    assert order.tolist() == [0, 4, 5, 1, 2, 3]
    assert order[inverse].tolist() == [*range(6)]


def tokens_of(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, chosen experts and weights. No token of any rank chooses the last rank's expert."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, DIM, generator=generator, requires_grad=True)
    chosen = [torch.randperm(EXPERTS - 1, generator=generator)[:2] for _ in range(TOKENS)]
    return x, torch.stack(chosen), torch.rand(TOKENS, 2, generator=generator)


def fill(experts: nn.Module) -> None:
    """Give each shard the values that it has in the whole parameter."""
    generator = torch.Generator().manual_seed(99)
    for param in experts.parameters():
        whole = torch.randn(param.shape, generator=generator) / 4
        local_tensor(param).data.copy_(whole[tuple(shard_index(param))])


def on_one(num_ranks: int) -> tuple[Experts, list[Tensor], list[Tensor]]:
    """Return experts with the gradient of all ranks' tokens, the outputs, and the gradients of the tokens."""
    experts, outputs, grads = Experts(DIM, EXPERTS, WIDTH), [], []
    fill(experts)
    for rank in range(num_ranks):
        x, *routes = tokens_of(rank)
        outputs.append(experts(x, *routes))
        outputs[-1].square().sum().backward()
        grads.append(x.grad)
    return experts, outputs, grads


def divided(layout: Layout) -> nn.Sequential:
    """Return a model of one layer of experts, divided and sharded for a layout."""
    mesh = build_expert_mesh(HOST, layout)
    with torch.device("meta"):
        model = nn.Sequential(Experts(DIM, EXPERTS, WIDTH))
    apply_expert_parallel(model, mesh)
    shard = partial(fully_shard, mp_policy=mixed_precision(torch.float32))
    shard_experts(model, mesh, layout, shard)
    shard(model, mesh=build_mesh(HOST, layout)["dp_shard"])
    model.to_empty(device="cpu")
    fill(model)
    return model


def check_layouts(world: World) -> None:
    """Check outputs, gradients, the gradient norm and the shards of each layout."""
    whole, outputs, x_grads = on_one(world.size)
    norm = torch.cat([param.grad.flatten() for param in whole.parameters()]).norm().item()
    for layout in LAYOUTS:
        model = divided(layout)
        placements = (Replicate(),) * (layout.dp_replicate > 1) + (Shard(1), Shard(0))
        assert {param.placements for param in model.parameters()} == {placements}
        held = (EXPERTS // layout.ep, WIDTH // layout.expert_shards, DIM)
        assert local_tensor(model[0].gate).shape == held
        x, *routes = tokens_of(world.rank)
        out = model[0](x, *routes)
        torch.testing.assert_close(out, outputs[world.rank], rtol=1e-5, atol=1e-6)
        out.square().sum().backward()
        torch.testing.assert_close(x.grad, x_grads[world.rank], rtol=1e-5, atol=1e-6)
        for own, param in zip(model.parameters(), whole.parameters(), strict=True):
            # FSDP averages over data-parallel ranks, like the loss of a step, which is scaled to match.
            mean = param.grad[tuple(shard_index(own))] / (layout.dp * layout.cp)
            torch.testing.assert_close(local_tensor(own.grad), mean, rtol=1e-5, atol=1e-6)
        weights = [Weight(name, param) for name, param in model.named_parameters()]
        optimizer = ShardedAdamW(weights, OptimizerConfig(), layout)
        optimizer.collect_gradients()
        total = optimizer.square_sum()
        dist.all_reduce(total)
        assert total.sqrt().item() * layout.dp * layout.cp == pytest.approx(norm, rel=1e-6)


def test_every_layout_computes_what_one_process_does():
    run_ranks(check_layouts, 4)


MOE = "model.moe={num_experts: 4, top_k: 2, expert_ffn_dim: 64, num_shared: 1, first_dense: 1}"
CHAIN: list[tuple[int, dict[str, object]]] = [
    (4, {"dp_shard": 4, "ep": 4}),
    (1, {}),
    (2, {"dp_shard": 2, "ep": 2}),
    (4, {"dp_shard": 4, "ep": 2}),
]


def test_a_chain_of_degrees(tmp_path: Path) -> None:
    run_chain(tmp_path, CHAIN, [MOE, "model.dropout=0.1"])
    assert worst_difference(tmp_path / "chain", tmp_path / "alone") < 1e-5


def test_killed_after_a_save(tmp_path: Path) -> None:
    """A run that resumes on the same layout has the weights and the metrics of an uninterrupted run."""
    layout = ("parallel.dp_shard=2", "parallel.ep=2", "parallel.activation_checkpointing=selective")
    options = [MOE, *layout, "train.steps=7", "checkpoint.every_steps=1", "data.num_workers=0"]
    train(tmp_path / "whole", options, 2)
    run = RunDir(tmp_path / "killed")
    train_and_kill(run, options, 2, step=3)
    train(run.path, options, 2)
    assert curve(run.path) == curve(tmp_path / "whole")
    found, expected = saved_tensors(run.path), saved_tensors(tmp_path / "whole")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def train_and_kill(run: RunDir, options: list[str], num_procs: int, step: int) -> None:
    """Train until a checkpoint of the step exists, and kill the ranks, which must not have finished."""
    workers = fork_workers(make_attempt(run.path, options, num_procs), num_procs)
    wait_until(lambda: any(item.step >= step for item in published(run.checkpoints_dir)))
    for worker in workers:
        worker.kill()
    assert {*wait_for(workers)} == {-signal.SIGKILL}


def test_a_chain_of_degrees_with_kills(tmp_path: Path) -> None:
    """A run resumes with fewer ranks per layer of experts, each time after all ranks were killed."""
    moe = MOE.replace("num_experts: 4", "num_experts: 8")
    options = [moe, "model.dropout=0.1", "train.steps=12", "checkpoint.every_steps=1", "data.num_workers=0"]
    train(tmp_path / "alone", options)
    run = RunDir(tmp_path / "chain")
    train_and_kill(run, [*options, "parallel.tp=2", "parallel.ep=8"], 8, step=2)
    train_and_kill(run, [*options, "parallel.ep=2"], 2, step=5)
    train(run.path, options)
    first, second = (event["step"] for event in events(run.path, "resumed"))
    assert first >= 2
    assert second >= 5
    assert worst_difference(run.path, tmp_path / "alone") < 1e-5


class Counts(DispatchMode):
    """Counts the operations."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def check_recomputation(world: World) -> None:
    """Check that only ``full`` exchanges rows again, and that no mode changes a gradient."""
    found = {}
    for mode in ("none", "selective", "pointwise", "full"):
        model = divided(Layout(dp_shard=2, ep=2))
        recompute_and_compile([model[0]], mode, compiled=False)
        x, *routes = tokens_of(world.rank)
        with Counts() as count:
            model[0](x, *routes).square().sum().backward()
        grads = [x.grad, *(local_tensor(param.grad) for param in model.parameters())]
        found[mode] = count.counts[ALL_TO_ALL], grads
    # The sizes, the rows and their outputs in the forward pass; gradients of both in the backward pass.
    assert [calls for calls, _ in found.values()] == [5, 5, 5, 8]
    for _, grads in found.values():
        assert all(map(torch.equal, grads, found["none"][1]))


def test_recomputation_does_not_exchange_rows_again():
    run_ranks(check_recomputation, 2)
