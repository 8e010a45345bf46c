"""Expert parallelism: each rank has some of a layer's experts, and applies them to the rows of all ranks.

A rank sends each row to the rank that has the row's expert, and gets the row's output back. The exchange is
an all-to-all whose sizes differ between ranks and passes, so the ranks exchange the sizes first. A rank
orders the received rows by expert, then by sending rank, then as the sending rank ordered them, so results do
not depend on timing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard, distribute_tensor

from trainkit.plan.launch import Layout
from trainkit.trainer.models.experts import Compute, Experts, permute
from trainkit.trainer.torch_private import exchange_rows


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh, *, balanced: bool = False) -> None:
    """Divide the experts of each layer over the mesh dimension ``ep``, and exchange rows between these ranks.

    If `balanced`, ranks are assumed to exchange equal numbers of rows, as simulated ranks must, whose tensors
    have no values.
    """
    dispatch = AllToAll(mesh["ep"].get_group(), balanced=balanced)
    for module in experts_of(model):
        for name, param in list(module.named_parameters(recurse=False)):
            divided = distribute_tensor(param.data, mesh["ep"], [Shard(0)])
            module.register_parameter(name, nn.Parameter(divided))
        module.dispatch = dispatch


def experts_of(model: nn.Module) -> list[Experts]:
    """Return the experts of each layer of a model, in order."""
    return [module for module in model.modules() if isinstance(module, Experts)]


class AllToAll:
    """Replaces `Experts.dispatch`: applies each expert on the rank that has it, with two all-to-alls of rows.

    Any callable with the same arguments can take its place, such as one that uses another library.
    """

    def __init__(self, group: dist.ProcessGroup, *, balanced: bool = False) -> None:
        self._group, self._balanced = group, balanced

    def __call__(self, rows: Tensor, counts: Tensor, compute: Compute) -> Tensor:
        group, ranks = self._group, self._group.size()
        sizes = [len(counts) // ranks] * ranks
        # Shape [rank, expert of this rank]: the number of rows that each rank sends to each expert.
        received = exchange_rows(counts, sizes, sizes, group).view(ranks, -1)
        sent_sizes, received_sizes = self._sizes(len(rows), counts.view(ranks, -1), received)
        rows = _exchange(rows, received_sizes, sent_sizes, group)
        order, inverse = order_by_expert(received, len(rows))
        out = compute(permute(rows, order, inverse), received.sum(0))
        return _exchange(permute(out, inverse, order), sent_sizes, received_sizes, group)

    def _sizes(self, num_rows: int, sent: Tensor, received: Tensor) -> tuple[list[int], list[int]]:
        """Return the numbers of rows that this rank sends to, and receives from, each rank."""
        ranks = len(sent)
        if self._balanced:
            share = [num_rows // ranks + (rank < num_rows % ranks) for rank in range(ranks)]
            return share, share
        # The host waits for the sizes only once, so both are copied together.
        sent_sizes, received_sizes = torch.stack((sent, received)).sum(-1).tolist()
        return sent_sizes, received_sizes


def order_by_expert(received: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the order that sorts received rows by expert, and the inverse order, each int64 [`num_rows`].

    `received` is the number of rows from each rank for each expert, int64 [ranks, experts]. The received rows
    are sorted by rank, then by expert.
    """
    experts = torch.arange(received.shape[1], device=received.device).repeat(len(received))
    order = experts.repeat_interleave(received.flatten(), output_size=num_rows).argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(num_rows, device=order.device)
    return order, inverse


class _Exchange(torch.autograd.Function):
    """Exchanges rows as `exchange_rows` does; the backward pass sends the gradients back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return exchange_rows(rows, received, sent, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        received, sent = ctx.sizes
        return exchange_rows(grad.contiguous(), received, sent, ctx.group), None, None, None


def _exchange(rows: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    out: Tensor = _Exchange.apply(rows, received, sent, group)  # type: ignore[no-untyped-call]
    return out


def shard_experts(
    model: nn.Module, mesh: DeviceMesh, layout: Layout, shard: Callable[..., FSDPModule]
) -> None:
    """Shard the experts of each layer with `shard`, which is `fully_shard` with all arguments but the mesh.

    Each rank's experts are sharded in their second dimension, because the first is already divided over the
    ranks.
    """
    dims = "expert_shard" if layout.dp_replicate == 1 else ("dp_replicate", "expert_shard")
    for module in experts_of(model):
        unit = shard(module, mesh=mesh[dims], shard_placement_fn=lambda param: Shard(1))
        # A rank's gradient already covers the samples of all ranks in its group ``ep``.
        unit.set_gradient_divide_factor(layout.dp * layout.cp)
        # gloo can only sum and average, so FSDP must divide by itself. FSDP divides in any case if there is
        # only one shard.
        unit.set_force_sum_reduction_for_comms(layout.expert_shards > 1)
