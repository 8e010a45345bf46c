"""AdamW over local shards, with clipping and skipping folded into its one pass over the parameters.

The optimizer never sees a DTensor: an element-wise update does not care how a tensor is split, and plain
tensors cost a fraction of the dispatch. What does care is here and nowhere else: the global gradient norm.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from trainkit.config.training import OptimizerConfig
from trainkit.trainer.dtensor import like, local

NORM_CHUNK = 1 << 16


class ShardedAdamW:
    """AdamW (arXiv 1711.05101) on this rank's shards of a model's parameters."""

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        self._names = [name for name, _ in model.named_parameters()]
        self._params = [param for _, param in model.named_parameters()]
        self._locals = [nn.Parameter(local(param.detach())) for param in self._params]
        # Vectors are norm weights: decaying them towards zero has no use.
        decayed = [shard for shard, param in zip(self._locals, self._params, strict=True) if param.dim() > 1]
        plain = [shard for shard, param in zip(self._locals, self._params, strict=True) if param.dim() <= 1]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            groups,
            lr=0.0,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        for shard in self._locals:
            self._adamw.state[shard] = {
                "step": torch.zeros((), dtype=torch.float32, device=shard.device),
                "exp_avg": torch.zeros_like(shard),
                "exp_avg_sq": torch.zeros_like(shard),
            }
        self._norm_groups = self._group_by_mesh()

    def _group_by_mesh(self) -> dict[tuple[tuple[DeviceMesh, str], ...], list[int]]:
        """Indices of parameters by the mesh dimensions that they are sharded over."""
        groups: dict[tuple[tuple[DeviceMesh, str], ...], list[int]] = defaultdict(list)
        for index, param in enumerate(self._params):
            sharded: list[tuple[DeviceMesh, str]] = []
            if isinstance(param, DTensor):
                names = cast(tuple[str, ...], param.device_mesh.mesh_dim_names)
                sharded = [
                    (param.device_mesh, name)
                    for name, placement in zip(names, param.placements, strict=True)
                    if isinstance(placement, Shard)
                ]
            groups[tuple(sharded)].append(index)
        return dict(groups)

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Hand the gradients of the backward pass to the shards; call once a step, after the last one."""
        for shard, param in zip(self._locals, self._params, strict=True):
            shard.grad = None if param.grad is None else local(param.grad)

    def gradient_norm(self) -> Tensor:
        """The norm of the gradient over all parameters and ranks, float32 []; equal on all ranks."""
        total = torch.zeros((), device=self._locals[0].device)
        for sharded, indices in self._norm_groups.items():
            grads = [
                g for g in (self._locals[index].grad for index in indices) if g is not None and g.numel()
            ]
            square = torch.zeros((), device=total.device)
            if grads:
                square = torch.stack(torch._foreach_norm(_in_chunks(grads))).square().sum()
            for mesh, name in sharded:
                dist.all_reduce(square, group=mesh.get_group(name))
            total = total + square
        return total.sqrt()

    def step(self, lr: float, divisor: Tensor, skip: Tensor) -> None:
        """Update the parameters with the gradient / divisor, or leave everything as it is if skip is 1.

        divisor, skip: float32 [] on the device, so nothing has to wait for their values.
        """
        for group in self._adamw.param_groups:
            group["lr"] = lr
        # The hooks that GradScaler uses; the fused kernel divides and skips in the same pass.
        optimizer = cast(Any, self._adamw)
        optimizer.grad_scale = divisor
        optimizer.found_inf = skip
        self._adamw.step()

    def zero_grad(self) -> None:
        for shard, param in zip(self._locals, self._params, strict=True):
            shard.grad = None
            param.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """The optimizer's state by parameter name, split as the parameters are; loading fills it in place."""
        tensors: dict[str, Tensor] = {}
        for name, param, shard in zip(self._names, self._params, self._locals, strict=True):
            state = self._adamw.state[shard]
            tensors[f"{name}.exp_avg"] = like(state["exp_avg"], param)
            tensors[f"{name}.exp_avg_sq"] = like(state["exp_avg_sq"], param)
            tensors[f"{name}.step"] = state["step"]
        return tensors


def _in_chunks(tensors: list[Tensor]) -> list[Tensor]:
    """The same values, on the CPU in pieces of which a float32 sum of squares is still exact enough.

    Its kernel adds up one after the other: over 16 million elements the norm is 6e-4 too small, and
    how much too small depends on the layout. CUDA's adds up as a tree.
    """
    if tensors[0].device.type != "cpu":
        return tensors
    return [
        piece
        for tensor in tensors
        for piece in (torch.split(tensor.flatten(), NORM_CHUNK) if tensor.numel() > NORM_CHUNK else (tensor,))
    ]
