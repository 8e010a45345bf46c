"""One weight at both ends of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.trainer.distributed import World
from trainkit.trainer.dtensor import local


class TiedEnds:
    """Keeps embedding and head the same weight although the two ends of a pipeline both hold it.

    Each has a gradient of its own. Their sum is that of the weight, and equal updates follow from it.
    """

    def __init__(self, ends: Sequence[nn.Parameter], world: World) -> None:
        self._ends = ends
        self._world = world

    def add_up(self) -> None:
        """Give both ends the gradient of the weight; call after the last backward pass of a step."""
        grads = [local(cast(Tensor, end.grad)) for end in self._ends]
        if not grads:
            return
        if len(grads) == 2:
            # The first and the last stage are on one rank.
            grads[0].add_(grads[1])
            grads[1].copy_(grads[0])
            return
        [mine] = grads
        theirs = torch.empty_like(mine)
        assert self._world.mesh is not None
        group = self._world.mesh["pp"].get_group()
        other = dist.get_global_rank(group, self._world.layout.pp - 1 - self._world.place.pp)
        both = [
            dist.P2POp(dist.isend, mine, other, group),
            dist.P2POp(dist.irecv, theirs, other, group),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        mine.add_(theirs)
