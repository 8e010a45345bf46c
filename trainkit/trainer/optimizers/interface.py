"""Defines what the trainer calls on an optimizer, and computes the gradient norm.

Optimizers work on plain tensors, never on DTensors: element-wise updates do not depend on the sharding, and
plain tensors have much less dispatch overhead than DTensors. Only the global gradient norm depends on the
sharding.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainkit.config.training import OptimizerConfig, ParameterGroup
from trainkit.plan.launch import Layout
from trainkit.trainer.models.model import Weight, local_tensor
from trainkit.trainer.split_master import SplitMaster
from trainkit.trainer.torch_private import norm_of_each
from trainkit.trainer.user_code import TaskError, listed

NORM_CHUNK = 1 << 16


class ShardedOptimizer(ABC):
    """Updates this rank's shards of the trained parameters and computes the gradient norm."""

    def __init__(self, weights: Sequence[Weight], layout: Layout) -> None:
        weights = [weight for weight in weights if weight.param.requires_grad]
        self._weights = weights
        self._params = [weight.param for weight in weights]
        self._locals = [nn.Parameter(local_tensor(param.detach())) for param in self._params]
        self._casts = {
            shard: local_tensor(weight.cast.detach())
            for shard, weight in zip(self._locals, weights, strict=True)
            if weight.cast is not None
        }
        self._split: dict[nn.Parameter, SplitMaster] = {}
        """Maps the shards that are upper halves of split master weights to these master weights."""
        for shard, weight in zip(self._locals, weights, strict=True):
            if weight.lower is not None:
                shard.grad_dtype = torch.float32
                self._split[shard] = SplitMaster(shard.detach(), weight.lower)
        self._by_share = self._group_by_share(layout.world_size // layout.pp)
        self.has_whole_gradient = set(self._by_share) == {1.0 / layout.world_size}
        """True if this rank has the full gradient and can compute its norm without communication."""
        if self.has_whole_gradient:
            self._by_share = {1.0: list(range(len(weights)))}

    def _group_by_share(self, stage_size: int) -> dict[float, list[int]]:
        """Group parameters by the factor applied to this rank's squares in the global sum of squares.

        Returns a mapping from factors to parameter indices. If a shard is replicated on n ranks of a pipeline
        stage, the factor is 1 / n on each of these ranks.
        """
        groups: dict[float, list[int]] = defaultdict(list)
        for index, weight in enumerate(self._weights):
            num_shards = 1
            if isinstance(weight.param, DTensor):
                mesh = weight.param.device_mesh
                split = [dim for dim, at in enumerate(weight.param.placements) if not at.is_replicate()]
                num_shards = math.prod(mesh.size(dim) for dim in split)
            groups[0.0 if weight.is_copy else num_shards / stage_size].append(index)
        return dict(groups)

    def begin_step(self, lr: float) -> float:
        """Begin a step; `lr` is from the config's schedule, and the result is the learning rate to log."""
        return lr

    def turns(self) -> Sequence[str]:
        """Return the optimizers that take turns in this step, or ("",) if the task has only one loss."""
        return ("",)

    @torch.no_grad()
    def collect_gradients(self, turn: str = "") -> None:
        """Pass the gradients to the optimizer; called after the last backward pass of an optimizer turn."""
        for shard, param in zip(self._locals, self._params, strict=True):
            shard.grad = None if param.grad is None else local_tensor(param.grad)

    def square_sum(self) -> Tensor:
        """Return the gradient's sum of squares, or only this rank's share unless `has_whole_gradient`."""
        total = torch.zeros((), dtype=torch.float64, device=self._locals[0].device)
        for share, indices in self._by_share.items():
            grads = [
                g for g in (self._locals[index].grad for index in indices) if g is not None and g.numel()
            ]
            if share and grads:
                norms = torch.stack(norm_of_each(_in_chunks(grads)))
                total += norms.double().square().sum() * share
        return total

    @abstractmethod
    def step(self, lr: float, divisor: Tensor, skip: Tensor) -> None:
        """Update the parameters with gradient / `divisor`, or do nothing if `skip` is 1.

        `divisor` and `skip` are 0-dim float32 tensors on the device, so that the host does not have to wait
        for their values.
        """

    def end_step(self) -> None:
        """Finish a step, after the last optimizer turn has updated its parameters."""
        return None

    def zero_grad(self) -> None:
        for shard, param in zip(self._locals, self._params, strict=True):
            shard.grad = None
            param.grad = None

    @abstractmethod
    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and tensor of each state; checkpoints are loaded into these tensors in place."""


@dataclass(frozen=True)
class Group:
    """The shards of parameters that share their settings."""

    shards: list[nn.Parameter]
    lr_scale: float
    weight_decay: float


def groups_of(
    weights: Sequence[Weight], shards: Sequence[nn.Parameter], config: OptimizerConfig
) -> list[Group]:
    """Group the shards of weights by learning rate and weight decay."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    for shard, weight in zip(shards, weights, strict=True):
        groups[settings_of(weight, config)].append(shard)
    return [Group(found, *settings) for settings, found in groups.items()]


def settings_of(weight: Weight, config: OptimizerConfig) -> tuple[float, float]:
    """Return the factor of the learning rate and the weight decay of a parameter.

    The first entry of `optimizer.groups` that matches the parameter replaces the task's `ParameterOptions`.
    """
    options = matching_group(weight.name, config) or weight.options
    decay = options.weight_decay
    if decay is None:
        # One-dimensional parameters are norm weights and biases, which are exempt from weight decay.
        decay = config.weight_decay if weight.param.dim() > 1 else 0.0
    return options.lr_scale, decay


def matching_group(name: str, config: OptimizerConfig) -> ParameterGroup | None:
    """Return the first entry of `optimizer.groups` whose pattern matches a parameter, or None."""
    return next((group for group in config.groups if fnmatchcase(name, group.match)), None)


def refuse_unused_groups(names: Collection[str], config: OptimizerConfig) -> None:
    """Raise TaskError if a pattern of `optimizer.groups` matches no trained parameter; `names` has all."""
    for group in config.groups:
        if not any(fnmatchcase(name, group.match) for name in names):
            message = f"has the pattern {group.match!r}, which matches no trained parameter"
            raise TaskError("optimizer.groups", message, f"the parameters are {listed(sorted(names), 8)}")


def _in_chunks(tensors: list[Tensor]) -> list[Tensor]:
    """Split CPU tensors into chunks, so that a float32 sum of squares over each chunk is accurate.

    torch's CPU kernel adds elements sequentially. Over 16 million elements, the CPU kernel's norm is too
    small by a relative error of 6e-4, and the error depends on the layout. The CUDA kernel adds elements
    pairwise (as a tree), which is accurate.
    """
    if tensors[0].device.type != "cpu":
        return tensors
    return [
        piece
        for tensor in tensors
        for piece in (torch.split(tensor.flatten(), NORM_CHUNK) if tensor.numel() > NORM_CHUNK else (tensor,))
    ]
