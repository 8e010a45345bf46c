"""The stages of a pipeline: what each holds of the model, and a pass forward through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.config.running import PipelineSchedule
from trainkit.plan.layouts.schedules import num_stages, stage_layers, stages_of
from trainkit.trainer.distributed import World
from trainkit.trainer.models.model import Part
from trainkit.trainer.weights import local

_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def parts_of(pp_rank: int, pp: int, schedule: PipelineSchedule, num_layers: int) -> list[Part]:
    """What of the model a rank of the pipeline holds, a part a stage."""
    last = num_stages(pp, schedule) - 1
    layers = stage_layers(num_layers, last + 1)
    return [Part(layers[stage], stage == 0, stage == last) for stage in stages_of(pp_rank, pp, schedule)]


class ForwardOnly:
    """Sends microbatches through the stages without a backward pass, whatever order the stages are in.

    torch's schedules can leave the backward pass out only where a rank has one stage.
    """

    def __init__(
        self,
        stages: Sequence[int],
        parts: Sequence[nn.Module],
        pp: int,
        schedule: PipelineSchedule,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._mine = list(zip(stages, parts, strict=True))
        self._rank_of = {stage: rank for rank in range(pp) for stage in stages_of(rank, pp, schedule)}
        self._last = max(self._rank_of)
        self._group = group
        self._device = device
        self._shapes: dict[int, Tensor] = {}
        """What comes out of a stage that this rank receives from, as an empty tensor."""
        self._told: set[int] = set()
        """Stages whose receiver knows what comes out of them."""

    def run(self, inputs: Sequence[Tensor], sample_keys: Sequence[Tensor]) -> list[Tensor]:
        """What the last stage makes of each input; nothing where this rank does not have that."""
        outputs, works = [], []
        for x, keys in zip(inputs, sample_keys, strict=True):
            for stage, part in self._mine:
                if stage > 0 and self._rank_of[stage - 1] != self._group.rank():
                    x = self._receive(stage - 1)
                x = part(x, sample_keys=keys)
                if stage == self._last:
                    outputs.append(x)
                elif self._rank_of[stage + 1] != self._group.rank():
                    works += self._send(stage, x.contiguous())
        for work in works:
            work.wait()
        return outputs

    def _send(self, stage: int, x: Tensor) -> list[dist.Work]:
        receiver = self._rank_of[stage + 1]
        works = []
        if stage not in self._told:
            self._told.add(stage)
            header = torch.tensor([_DTYPES.index(x.dtype), *x.shape], device=self._device)
            works.append(dist.isend(header, group=self._group, group_dst=receiver))
        works.append(dist.isend(x, group=self._group, group_dst=receiver))
        return [work for work in works if work is not None]

    def _receive(self, stage: int) -> Tensor:
        sender = self._rank_of[stage]
        if stage not in self._shapes:
            header = torch.empty(4, dtype=torch.int64, device=self._device)
            dist.recv(header, group=self._group, group_src=sender)
            kind, *shape = header.tolist()
            self._shapes[stage] = torch.empty(shape, dtype=_DTYPES[kind], device="meta")
        x = torch.empty_like(self._shapes[stage], device=self._device)
        dist.recv(x, group=self._group, group_src=sender)
        return x


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
