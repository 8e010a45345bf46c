"""First values of a model's parameters: a function of (seed, name, element), so the same on any layout."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainkit.trainer.dtensor import local
from trainkit.trainer.models.model import Model
from trainkit.trainer.stateless_random import fill_normal_


@torch.no_grad()
def init_parameters(model: Model, seed: int) -> None:
    """Fill each rank's shard of every parameter from N(0, std) as the model says, or with ones."""
    for own_name, param in model.named_parameters():
        name = model.canonical(own_name)
        shard, offset = local(param), (0,) * param.dim()
        if isinstance(param, DTensor):
            _, offset = compute_local_shape_and_global_offset(
                param.shape, param.device_mesh, param.placements
            )
        value = model.init_std(name)
        if value is None:
            shard.fill_(1.0)
        else:
            fill_normal_(shard, value, f"{seed}/{name}", param.shape, offset)
