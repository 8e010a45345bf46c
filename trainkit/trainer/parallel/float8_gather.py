"""Gathers sharded weights in float8, which halves the bytes of bf16 and changes no product.

What is multiplied is bit for bit what a weight gathered in bf16 is cast to: rounding keeps the order of
numbers, so the largest one of a matrix in bf16 is the largest one of all its shards, rounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from trainkit.trainer.models.model import local_tensor
from trainkit.trainer.torch_private import norm_of_each, set_gather

DTYPE = torch.bfloat16
"""The compute type, which float8 requires."""


class Float8Gather:
    """The scales of the matrices of this rank that multiply in float8.

    The weights stay float32 shards, which is all that optimizer, checkpoints and exports see.
    """

    def __init__(self, model_parts: Iterable[nn.Module], group: dist.ProcessGroup) -> None:
        """Make FSDP gather these matrices in float8; `group` has the shards of each."""
        from torchao.float8.float8_linear import Float8Linear

        modules = [module for part in model_parts for module in part.modules()]
        linears = [module for module in modules if isinstance(module, Float8Linear)]
        self._shards = [local_tensor(linear.weight.detach()) for linear in linears]
        self._group = group
        if not linears:
            return
        self._float8 = linears[0].config.cast_config_weight.target_dtype
        # 16 bytes apart: a compiled block would copy numbers at other addresses.
        self._scales = torch.ones(len(linears), 4, device=self._shards[0].device)[:, 0]
        for linear, shard, scale in zip(linears, self._shards, self._scales, strict=True):
            num_rows = len(linear.weight)
            after = partial(_as_cast, num_rows, scale, linear.linear_mm_config)
            set_gather(linear.weight, partial(self._cast, shard, num_rows, scale), after)

    def _cast(self, shard: Tensor, num_rows: int, scale: Tensor, num_ranks: int) -> Tensor:
        """A shard in float8, with as many rows as the largest one."""
        from torchao.float8.float8_utils import to_fp8_saturated

        rounded = shard.to(DTYPE)
        if missing := -(-num_rows // num_ranks) - len(shard):
            rounded = pad(rounded, (0, 0, 0, missing))
        cast: Tensor = to_fp8_saturated(rounded.float() * scale, self._float8)
        return cast

    @torch.no_grad()
    def update(self) -> None:
        """Compute the scales, which all ranks agree on; call whenever the weights have changed."""
        if not self._shards:
            return
        from torchao.float8.float8_utils import amax_to_scale

        zero = self._scales.new_zeros(1)
        filled = [shard if shard.numel() else zero for shard in self._shards]
        largest = torch.stack(norm_of_each(filled, math.inf))
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        self._scales.copy_(amax_to_scale(largest.to(DTYPE), self._float8))


def _as_cast(num_rows: int, scale: Tensor, config: object, gathered: Tensor) -> Tensor:
    """What Float8Linear takes for a weight that it has cast itself."""
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

    weight: Tensor = Float8TrainingTensor(gathered[:num_rows], scale, DTYPE, config, GemmInputRole.WEIGHT)
    return weight
