"""Update the matrices of decoder blocks with Muon, and all other parameters with AdamW, on any layout.

Muon replaces the momentum of a matrix by the nearest matrix whose singular values are all 1, so Muon needs
whole matrices. Each matrix has an owner among the ranks of its pipeline stage. In each round of an update,
the ranks of a replica send their shards of some matrices to the owners, the owners orthogonalize the
matrices, and the results return to the shards. Replicas divide the matrices among themselves: sending a
result to the other replicas takes less time than computing the result again on each of them.

A weight of experts consists of one matrix for each expert. Several of these matrices have the same owner,
which is one of the ranks that have the experts, so experts never move to the ranks of other experts.

All communication consists of plain collectives on local shards, in an order that depends only on the layout.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainkit.config.training import OptimizerConfig
from trainkit.errors import FatalError
from trainkit.plan.feed_forward import Matrices
from trainkit.plan.launch import Layout
from trainkit.plan.muon import Shape, exchanges, units_of, update_rounds, wide
from trainkit.trainer.distributed import World, copy_group
from trainkit.trainer.models.model import Weight, as_shard_of, shard_index
from trainkit.trainer.optimizers.adamw import ShardedAdamW
from trainkit.trainer.optimizers.interface import ShardedOptimizer, settings_of
from trainkit.trainer.optimizers.newton_schulz import orthogonalize_
from trainkit.trainer.split_master import SplitMaster, in_float32
from trainkit.trainer.torch_private import copy_each
from trainkit.trainer.user_code import TaskError

UPDATE_RMS = 0.2
"""Root mean square of the elements of an update, as AdamW's typical updates (Moonlight, arXiv 2502.16982).

Therefore, learning rates and weight decay that were tuned for AdamW are also suitable for Muon.
"""
T = TypeVar("T", bound=Tensor | SplitMaster)
Box = tuple[slice, slice, slice]
"""The matrices, and their rows and columns, that are on one rank."""
NOTHING: Box = (slice(0, 0), slice(0, 0), slice(0, 0))


@dataclass(frozen=True)
class _Stack:
    """A weight that Muon updates, with this rank's shard: a matrix, or one matrix for each expert.

    Tensors have the dimensions [matrices, rows, columns], also if the weight is a single matrix.
    """

    name: str
    weight: Tensor | SplitMaster
    cast: Tensor | None
    shard: nn.Parameter
    """Has this rank's gradient as ``grad``, with the dimensions of `param`."""
    param: nn.Parameter
    momentum: Tensor
    matrices: Matrices
    boxes: list[Box]
    """The part of the weight that each rank of a copy holds."""
    num_holders: int
    """Number of neighbouring ranks that hold the same part, as tensor-parallel ranks with all experts do."""
    settings: tuple[float, float]
    """The factor of the learning rate, and the weight decay."""


@dataclass(frozen=True)
class _Matrices:
    """The matrices of one weight that have the same owner."""

    stack: _Stack
    first: int
    """The index of the first matrix in the weight."""
    count: int
    rank: int
    """This rank among the ranks of a copy."""

    @property
    def shape(self) -> Shape:
        """Return the numbers of rows and columns of each matrix."""
        return self.stack.matrices.rows, self.stack.matrices.columns

    @cached_property
    def parts(self) -> list[Box]:
        """Return the part of the matrices that each rank of a copy holds."""
        return [self._part(box) for box in self.stack.boxes]

    @cached_property
    def sent(self) -> list[Box]:
        """Return the part of the matrices that each rank of a copy sends to the owner."""
        holders = self.stack.num_holders
        return [part if rank % holders == 0 else NOTHING for rank, part in enumerate(self.parts)]

    @cached_property
    def own(self) -> slice:
        """Return the matrices of which this rank has a part, as a slice of the shard of `stack`."""
        box = self.stack.boxes[self.rank]
        part, offset = self._part(box)[0], self.first - box[0].start
        return slice(part.start + offset, part.stop + offset) if part.start < part.stop else slice(0, 0)

    @cached_property
    def num_local(self) -> int:
        """Return the number of elements on this rank."""
        return self.momentum.numel()

    @property
    def num_sent(self) -> int:
        """Return the number of elements that this rank sends to the owner."""
        return 0 if self.rank % self.stack.num_holders else self.num_local

    @property
    def weight(self) -> Tensor | SplitMaster:
        return self.stack.weight[self.own]

    @property
    def momentum(self) -> Tensor:
        return self.stack.momentum[self.own]

    def _part(self, box: Box) -> Box:
        """Return the part of a box that is in the matrices, whose first index becomes 0."""
        start, stop = (min(max(index - self.first, 0), self.count) for index in (box[0].start, box[0].stop))
        return slice(start, stop), *box[1:]


class _Round(NamedTuple):
    owned: list[list[list[int]]]
    """For each copy and rank of the copy, the indices of the `_Matrices` to orthogonalize."""
    exchanges: bool
    """True if the ranks of a copy exchange shards; False if each owner has whole matrices."""


class ShardedMuon(ShardedOptimizer):
    """Muon for the projections of decoder blocks, and AdamW for all other parameters."""

    def __init__(
        self, weights: Sequence[Weight], config: OptimizerConfig, world: World, *, compiled: bool = False
    ) -> None:
        """If `compiled`, AdamW uses compiled kernels on GPUs for large shards.

        This is a collective, so every rank must call it.
        """
        super().__init__(weights, world.layout)
        layout = world.layout
        _refuse(self._weights, config, world)
        others = [weight for weight in self._weights if not weight.is_projection]
        self._adamw = ShardedAdamW(others, config, layout, compiled=compiled)
        self._momentum, self._precision = config.momentum, config.ns_precision
        self._stacks = [
            _Stack(
                name=weight.name,
                weight=_stacked(self._split.get(shard, shard.detach())),
                cast=None if (cast := self._casts.get(shard)) is None else _stacked(cast),
                shard=shard,
                param=weight.param,
                momentum=_stacked(torch.zeros_like(shard, dtype=torch.float32, requires_grad=False)),
                matrices=Matrices(*weight.param.shape[-2:], *weight.param.shape[:-2]),
                boxes=_boxes(weight, layout),
                num_holders=1 if {"tp", "ep"} & _split_dims(weight).keys() else layout.tp,
                settings=settings_of(weight, config),
            )
            for shard, weight in zip(self._locals, self._weights, strict=True)
            if weight.is_projection
        ]
        self._copy_group = copy_group(world)
        num_shards, num_copies = layout.dp_shard * layout.cp * layout.tp, layout.dp_replicate
        self._copy, self._rank = divmod(world.rank, num_shards)  # The rank among the ranks of a copy.
        self._copy %= num_copies
        self._across_copies = (
            world.mesh["dp_replicate"].get_group() if num_copies > 1 and world.mesh is not None else None
        )
        # torch computes no positions in a simulation, and states no position for an empty shard.
        for stack in () if world.is_simulated else self._stacks:
            box, index = stack.boxes[self._rank], shard_index(stack.param)
            equal = [*box][-len(index) :] == index if stack.shard.numel() else not _num_elements(box)
            assert equal, f"{stack.name}: {box} is not {index}"
        units = units_of([stack.matrices for stack in self._stacks], layout)
        self._matrices = [
            _Matrices(self._stacks[unit.weight], unit.first, unit.num_matrices, self._rank) for unit in units
        ]
        self._rounds = [
            _Round(
                [members[first : first + num_shards] for first in range(0, len(members), num_shards)],
                exchanges(units, members, layout),
            )
            for members in update_rounds(units, layout)
        ]

    @torch.no_grad()
    def collect_gradients(self, turn: str = "") -> None:
        super().collect_gradients(turn)
        self._adamw.collect_gradients(turn)

    def zero_grad(self) -> None:
        self._adamw.zero_grad()
        super().zero_grad()

    @torch.no_grad()
    def step(self, lr: float, divisor: Tensor, skip: Tensor) -> None:
        self._adamw.step(lr, divisor, skip)
        for members in self._rounds:
            self._update_round(members, lr, divisor, skip)

    def _update_round(self, members: _Round, lr: float, divisor: Tensor, skip: Tensor) -> None:
        own = self._update_of_own_copy(members, divisor, skip)
        for copy, owners in enumerate(members.owned):
            indices = [index for owned in owners for index in owned]
            update = self._share(own if copy == self._copy else None, copy, indices)
            parts = torch.split(update, [self._matrices[index].num_local for index in indices])
            for index, part in zip(indices, parts, strict=True):
                self._apply(self._matrices[index], part, lr, skip)

    def _update_of_own_copy(self, members: _Round, divisor: Tensor, skip: Tensor) -> Tensor:
        """Return this rank's shards of the updates of all matrices that the ranks of its copy own, flat."""
        for copy, owners in enumerate(members.owned):
            if copy != self._copy:
                for index in (index for owned in owners for index in owned):
                    self._advance(self._matrices[index], None, divisor, skip)
        owners = members.owned[self._copy]
        own = [self._matrices[index] for index in owners[self._rank]]
        sizes = [[self._matrices[index].num_sent for index in owned] for owned in owners]
        to_owners = [sum(owned) for owned in sizes]
        from_ranks = _sizes([matrices.sent for matrices in own], len(owners))
        sent = torch.empty(sum(to_owners), device=skip.device)
        parts = iter(torch.split(sent, [size for owned in sizes for size in owned]))
        for index in (index for owned in owners for index in owned):
            self._advance(self._matrices[index], next(parts), divisor, skip)
        received = self._exchange(sent, to_owners, from_ranks) if members.exchanges else sent
        del sent, parts
        to_ranks = _sizes([matrices.parts for matrices in own], len(owners))
        from_owners = [sum(self._matrices[index].num_local for index in owned) for owned in owners]
        if own:
            whole = _assemble(own, received, from_ranks)
            del received
            orthogonalize_(whole, self._precision)
            whole *= UPDATE_RMS * math.sqrt(max(own[0].shape))
            received = _take_apart(own, whole, to_ranks)
            del whole
        return self._exchange(received, to_ranks, from_owners) if members.exchanges else received

    def _advance(self, matrices: _Matrices, out: Tensor | None, divisor: Tensor, skip: Tensor) -> None:
        """Update the momentum of a shard, and write the direction of the update to `out` if it has elements.

        `divisor` and `skip` are as in `step`.
        """
        if not matrices.num_local:
            return
        grad, momentum = matrices.stack.shard.grad, matrices.momentum
        if grad is None:
            hint = "use the parameter in every step, or set optimizer.name to adamw"
            raise FatalError(f"{matrices.stack.name} has no gradient, but muon updates all matrices", hint)
        grad = _stacked(grad)[matrices.own] / divisor
        torch.where(skip > 0, momentum, momentum.lerp(grad, 1 - self._momentum), out=momentum)
        if out is not None and out.numel():
            out.copy_(grad.lerp_(momentum, self._momentum).reshape(-1))  # Nesterov's momentum

    def _exchange(self, sent: Tensor, sizes: list[int], received_sizes: list[int]) -> Tensor:
        """Send consecutive parts of a flat tensor to the ranks of this copy, and return what they sent."""
        received = torch.empty(sum(received_sizes), device=sent.device)
        dist.all_to_all_single(received, sent, received_sizes, sizes, group=self._copy_group)
        return received

    def _share(self, update: Tensor | None, copy: int, indices: list[int]) -> Tensor:
        """Return this rank's shards of the updates that the ranks of a copy have computed, flat.

        `update` is the result if this rank belongs to the copy, otherwise None.
        """
        if update is None:
            size = sum(self._matrices[index].num_local for index in indices)
            update = torch.empty(size, device=self._stacks[0].shard.device)
        if self._across_copies is not None and update.numel():
            dist.broadcast(update, group=self._across_copies, group_src=copy)
        return update

    def _apply(self, matrices: _Matrices, update: Tensor, lr: float, skip: Tensor) -> None:
        if not update.numel():
            return
        lr_scale, weight_decay = matrices.stack.settings
        lr *= lr_scale
        with in_float32([matrices.weight]) as [weight]:
            updated = weight * (1 - lr * weight_decay)
            updated.sub_(update.view(weight.shape), alpha=lr)
            torch.where(skip > 0, weight, updated, out=weight)
            del updated
            if matrices.stack.cast is not None:
                matrices.stack.cast[matrices.own].copy_(weight)

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._adamw.state_tensors()
        for stack in self._stacks:
            yield f"{stack.name}.momentum", as_shard_of(stack.momentum.view_as(stack.shard), stack.param)


def refuse_without_matrices(names: Collection[str]) -> None:
    """Raise TaskError if a model has no matrices for Muon; `names` are the `projections` of the model."""
    if not names:
        hint = "name them in the TENSOR_PLAN of the model, or set optimizer.name to adamw"
        message = "is muon, but no matrix of the model has the role column, row or experts"
        raise TaskError("optimizer.name", message, hint)


def _refuse(weights: Sequence[Weight], config: OptimizerConfig, world: World) -> None:
    refuse_without_matrices([weight.name for weight in weights if weight.is_projection])
    if config.ns_precision == "tf32x3" and world.device.type != "cuda":
        message = f"optimizer.ns_precision is tf32x3, but the run uses the device {world.device.type}"
        raise FatalError(message, "use fp32: only GPUs have TF32")


def _stacked(tensor: T) -> T:
    """Return a view with three dimensions, of which the first is the number of matrices."""
    return tensor if len(tensor.shape) == 3 else cast(T, tensor[None])


def _split_dims(weight: Weight) -> dict[str, int]:
    """Return a mapping from the mesh dimensions that split a weight to the dimensions that they split.

    The dimensions of the weight are counted as in `_Stack`.
    """
    if not isinstance(weight.param, DTensor):
        return {}
    mesh = weight.param.device_mesh
    placed = zip(mesh.mesh_dim_names or (), weight.param.placements, strict=True)
    added = 3 - weight.param.dim()
    return {name: at.dim + added for name, at in placed if not at.is_replicate()}  # type: ignore[attr-defined]


def _boxes(weight: Weight, layout: Layout) -> list[Box]:
    """Return the part of a weight that each rank of a copy holds, in the order of the ranks.

    Tensor or expert parallelism splits a weight first, and `fully_shard` splits the rows of each part. As in
    `torch.chunk`, the last part may be smaller, and parts may be empty.
    """
    split_dims, shape = _split_dims(weight), weight.param.shape
    found: list[Box] = []
    for shard in range(layout.shards):
        for tp in range(layout.tp):
            box = [slice(0, size) for size in (*(1,) * (3 - len(shape)), *shape)]
            expert_shard, ep = divmod(shard * layout.tp + tp, layout.ep)
            for name, number, count in (
                ("tp", tp, layout.tp),
                ("ep", ep, layout.ep),
                ("dp_shard", shard, layout.shards),
                ("expert_shard", expert_shard, layout.expert_shards),
            ):
                if name in split_dims:
                    dim = split_dims[name]
                    box[dim] = _chunk(box[dim], number, count)
            found.append((box[0], box[1], box[2]))
    return found


def _assemble(own: Sequence[_Matrices], flat: Tensor, sizes: list[int]) -> Tensor:
    """Return whole matrices [batch, m, n], with m <= n, from the parts that the ranks of a copy have sent."""
    count = sum(matrices.count for matrices in own)
    whole = torch.empty(count, *wide(own[0].shape), device=flat.device)
    copy_each(*_shard_views(own, [matrices.sent for matrices in own], whole, flat, sizes))
    return whole


def _take_apart(own: Sequence[_Matrices], whole: Tensor, sizes: list[int]) -> Tensor:
    """Return the shards of whole matrices as a flat tensor, ordered by rank, then as in `own`."""
    flat = torch.empty(sum(sizes), device=whole.device)
    in_whole, in_flat = _shard_views(own, [matrices.parts for matrices in own], whole, flat, sizes)
    copy_each(in_flat, in_whole)
    return flat


def _shard_views(
    own: Sequence[_Matrices], boxes: Sequence[list[Box]], whole: Tensor, flat: Tensor, sizes: list[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return each shard as a view of `whole` and as a view of `flat`.

    `boxes` has the parts of each of the matrices on each rank. `flat` contains the parts on the first rank,
    then on the second, and so on; `sizes` are the numbers of elements on each rank.
    """
    in_whole: list[Tensor] = []
    in_flat: list[Tensor] = []
    wholes = torch.split(whole, [matrices.count for matrices in own])
    for rank, part in enumerate(torch.split(flat, sizes)):
        shards = torch.split(part, [_num_elements(box[rank]) for box in boxes])
        for matrices, box, found, shard in zip(own, boxes, wholes, shards, strict=True):
            if not shard.numel():
                continue
            view = (found if matrices.shape == found.shape[1:] else found.mT)[box[rank]]
            in_whole.append(view)
            in_flat.append(shard.view(view.shape))
    return in_whole, in_flat


def _chunk(whole: slice, number: int, count: int) -> slice:
    size = -(-(whole.stop - whole.start) // count)
    return slice(*(min(whole.start + index * size, whole.stop) for index in (number, number + 1)))


def _sizes(boxes: Sequence[list[Box]], num_ranks: int) -> list[int]:
    """Return the number of elements that each rank has of several weights; `boxes` has its part of each."""
    return [sum(_num_elements(box[rank]) for box in boxes) for rank in range(num_ranks)]


def _num_elements(box: Box) -> int:
    return math.prod(part.stop - part.start for part in box)
