"""Pipeline parallelism: consecutive layers on consecutive ranks, microbatches flowing through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from trainkit.config.running import PipelineSchedule
from trainkit.plan.layouts.schedules import num_stages, stages_of
from trainkit.trainer.batches import Microbatch
from trainkit.trainer.distributed import World
from trainkit.trainer.forward_backward import OnLoss, StepContext
from trainkit.trainer.parallel.stages import ForwardOnly
from trainkit.trainer.progress import Pulse
from trainkit.trainer.tasks import Task

TORCH_NAMES: dict[PipelineSchedule, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}


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
        self._name: PipelineSchedule = schedule
        pp, place = world.layout.pp, world.place
        self._stages = stages_of(place.pp, pp, schedule)
        self._num_stages = num_stages(pp, schedule)
        self._has_first = 0 in self._stages
        self._has_last = self._num_stages - 1 in self._stages
        self._scale = torch.ones((), device=world.device)
        self._num_evaluated = num_microbatches
        # A step is one run through the schedule, however much is accumulated: it has one bubble.
        self._num_microbatches = num_microbatches * accumulation_steps
        self.schedule = self._make_schedule()
        group = self._schedule_group()
        self._forward = ForwardOnly(self._stages, parts, pp, schedule, group, world.device)

    def _schedule_group(self) -> dist.ProcessGroup:
        assert self._world.mesh is not None
        return self._world.mesh["pp"].get_group()

    def _make_schedule(self) -> Any:
        group = self._schedule_group()
        stages = [
            PipelineStage(part, index, self._num_stages, self._world.device, group=group)
            for index, part in zip(self._stages, self._parts, strict=True)
        ]
        kind = get_schedule_class(TORCH_NAMES[self._name])
        return kind(
            stages if issubclass(kind, PipelineScheduleMulti) else stages[0],
            n_microbatches=self._num_microbatches,
            loss_fn=self._scaled_loss,
            scale_grads=False,
        )

    def _scaled_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self._task.nll_sum(logits, labels) * self._scale

    def add_gradient(self, microbatches: list[Microbatch], scale: Tensor, on_loss: OnLoss) -> None:
        self._pulse.enter("passes")
        whole = self._join(microbatches)
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

    def _join(self, microbatches: list[Microbatch]) -> Microbatch:
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
