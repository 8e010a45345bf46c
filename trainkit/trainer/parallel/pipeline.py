"""Pipeline parallelism: consecutive layers on consecutive ranks, microbatches flowing through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from trainkit.config.running import PipelineSchedule
from trainkit.plan.pipeline import num_stages, stage_layers, stages_of
from trainkit.trainer.data.batches import Microbatch
from trainkit.trainer.distributed import World
from trainkit.trainer.dtensor import local
from trainkit.trainer.models.model import Part
from trainkit.trainer.passes import OnLoss, StepContext
from trainkit.trainer.pulse import Pulse
from trainkit.trainer.tasks import Task

TORCH_NAMES: dict[PipelineSchedule, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}


def parts_of(pp_rank: int, pp: int, schedule: PipelineSchedule, num_layers: int) -> list[Part]:
    """What of the model a rank of the pipeline holds, a part a stage."""
    last = num_stages(pp, schedule) - 1
    layers = stage_layers(num_layers, last + 1)
    return [Part(layers[stage], stage == 0, stage == last) for stage in stages_of(pp_rank, pp, schedule)]


class PipelinePasses:
    """Passes through the stages that this rank has, in the order of a schedule."""

    def __init__(
        self,
        task: Task,
        parts: Sequence[nn.Module],
        world: World,
        context: StepContext,
        pulse: Pulse,
        schedule: PipelineSchedule,
        num_microbatches: int,
        accumulation_steps: int,
    ) -> None:
        self._task = task
        self._parts = parts
        self._world = world
        self._context = context
        self._pulse = pulse
        self.name: PipelineSchedule = schedule
        pp, place = world.layout.pp, world.place
        self.stages = stages_of(place.pp, pp, schedule)
        self.num_stages = num_stages(pp, schedule)
        self._has_first = 0 in self.stages
        self._has_last = self.num_stages - 1 in self.stages
        self._scale = torch.ones((), device=world.device)
        self._num_evaluated = num_microbatches
        # A step is one run through the schedule, however much is accumulated: it has one bubble.
        self.num_microbatches = num_microbatches * accumulation_steps
        self.schedule = self._make_schedule()
        group = self._schedule_group()
        self._forward = ForwardOnly(self.stages, parts, pp, schedule, group, world.device)

    def _schedule_group(self) -> dist.ProcessGroup:
        assert self._world.mesh is not None
        return self._world.mesh["pp"].get_group()

    def _make_schedule(self) -> Any:
        group = self._schedule_group()
        stages = [
            PipelineStage(part, index, self.num_stages, self._world.device, group=group)
            for index, part in zip(self.stages, self._parts, strict=True)
        ]
        kind = get_schedule_class(TORCH_NAMES[self.name])
        return kind(
            stages if issubclass(kind, PipelineScheduleMulti) else stages[0],
            n_microbatches=self.num_microbatches,
            loss_fn=self._scaled_loss,
            scale_grads=False,
        )

    def _scaled_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self._task.nll_sum(logits, labels) * self._scale

    def add_gradient(self, microbatches: list[Microbatch], scale: Tensor, on_loss: OnLoss) -> None:
        self._pulse.enter("forward")
        whole = self.join(microbatches)
        self._scale = scale
        losses: list[Tensor] = []
        with self._context.split():
            self.schedule.step(*self._inputs(whole), losses=losses, return_outputs=False, **self._keys(whole))
        on_loss(self._share(losses) / scale)

    def nll_sum(self, micro: Microbatch) -> Tensor:
        micro = self._context.take(micro)
        tokens, labels, keys = (
            whole.chunk(self._num_evaluated) for whole in (micro.tokens, micro.labels, micro.sample_keys)
        )
        with self._context.split():
            logits = self._forward.run(tokens, keys)
            losses = [self._task.nll_sum(*pair) for pair in zip(logits, labels, strict=False)]
        return self._share(losses)

    def join(self, microbatches: list[Microbatch]) -> Microbatch:
        """All of a step at once: the schedule cuts it up again."""
        whole = Microbatch(
            torch.cat([micro.tokens for micro in microbatches]),
            torch.cat([micro.labels for micro in microbatches]),
            torch.cat([micro.sample_keys for micro in microbatches]),
        )
        return self._context.take(whole)

    def _inputs(self, batch: Microbatch) -> tuple[Tensor, ...]:
        return (batch.tokens,) if self._has_first else ()

    def _keys(self, batch: Microbatch) -> dict[str, Tensor]:
        keys = {"sample_keys": batch.sample_keys}
        return {**keys, "target": batch.labels} if self._has_last else keys

    def _share(self, losses: list[Tensor]) -> Tensor:
        """What this rank tells of the loss: only the last stage knows it."""
        if not losses:
            return torch.zeros((), device=self._world.device)
        return torch.stack([loss.detach() for loss in losses]).sum() * self._context.share


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


_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


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
