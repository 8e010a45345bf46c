"""Pipeline parallelism: microbatches pass through stages, which are consecutive layers on different ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from trainkit.config.running import ParallelConfig, PipelineSchedule
from trainkit.plan.launch import Batch
from trainkit.plan.step_work import num_stages, stage_layers, stages_of
from trainkit.trainer.causal_lm import Microbatch
from trainkit.trainer.distributed import World, exchange
from trainkit.trainer.forward_backward import ForwardBackward, ForwardContext, OnLoss
from trainkit.trainer.models.model import Model, StageSpec, local_tensor
from trainkit.trainer.progress import Progress
from trainkit.trainer.torch_private import connect_stage, set_stage_shapes

TORCH_NAMES: dict[PipelineSchedule, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}


class PipelineForwardBackward(ForwardBackward[Microbatch]):
    """Runs the forward and backward passes of this rank's pipeline stages, in the order of a schedule."""

    def __init__(
        self,
        model_parts: Sequence[nn.Module],
        context: ForwardContext,
        progress: Progress,
        parallel: ParallelConfig,
        batch: Batch,
    ) -> None:
        world, schedule = context.world, parallel.pp_schedule
        num_microbatches = batch.pp_microbatches or parallel.pp_microbatches
        assert world.mesh is not None
        self._group = world.mesh["pp"].get_group()
        self._device = world.device
        self._context = context
        self._progress = progress
        pp, last = world.layout.pp, num_stages(world.layout.pp, schedule) - 1
        self._local_stages = list(zip(stages_of(world.place.pp, pp, schedule), model_parts, strict=True))
        self._rank_of = {stage: rank for rank in range(pp) for stage in stages_of(rank, pp, schedule)}
        self._last = last
        self._scale = torch.ones((), device=world.device)
        self._num_evaluated = num_microbatches
        self._shapes: dict[int, Tensor] = {}
        """Meta tensors with the output shapes of stages that send to this rank in validation, keyed by
        stage."""
        self._announced: set[int] = set()
        """Stages that have already sent the dtype and shape of their output to the receiving rank."""
        stages = [
            PipelineStage(part, index, last + 1, world.device, group=self._group)
            for index, part in self._local_stages
        ]
        for stage in stages:
            connect_stage(stage)
        kind: Any = get_schedule_class(TORCH_NAMES[schedule])
        self.schedule: Any = kind(
            stages if issubclass(kind, PipelineScheduleMulti) else stages[0],
            # Run the schedule once per step, not once per accumulation step, so that each step has only one
            # pipeline bubble.
            n_microbatches=num_microbatches * batch.accumulation_steps,
            loss_fn=self._scaled_loss,
            scale_grads=False,
        )

    def set_shapes(self, dtype: torch.dtype) -> None:
        """Set the shapes of the stages' inputs, so that torch need not compute a pass to determine them.

        `dtype` is the dtype of the residual stream.
        """

        def stream_of(model: nn.Module, kwargs: Mapping[str, Tensor]) -> Tensor:
            size = (len(kwargs["sample_keys"]), *cast(Model, model).stream_shape)
            return torch.empty(size, dtype=dtype, device="meta", requires_grad=True)

        set_stage_shapes(self.schedule, stream_of)

    def _scaled_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self._context.nll_sum(logits, labels) * self._scale

    def accumulate_gradient(self, microbatches: Sequence[Microbatch], scale: Tensor, on_loss: OnLoss) -> None:
        self._progress.enter("forward_backward")
        whole = self._join(microbatches)
        self._scale = scale
        losses: list[Tensor] = []
        stages = [stage for stage, _ in self._local_stages]
        inputs = (whole.tokens,) if 0 in stages else ()
        keys = {"sample_keys": whole.sample_keys}
        if self._last in stages:
            keys["target"] = whole.labels
        with self._context.loss_parallel():
            self.schedule.step(*inputs, losses=losses, return_outputs=False, **keys)
        on_loss(self._share(losses) / scale)

    def loss_sums(self, micro: Microbatch) -> Tensor:
        micro = self._context.local_batch(micro)
        tokens, labels, keys = (
            whole.chunk(self._num_evaluated) for whole in (micro.tokens, micro.labels, micro.sample_keys)
        )
        with self._context.loss_parallel():
            logits = self._run_forward(tokens, keys)
            losses = [self._context.nll_sum(*pair) for pair in zip(logits, labels, strict=False)]
        return self._share(losses)

    def _join(self, microbatches: Sequence[Microbatch]) -> Microbatch:
        """Join a step's microbatches into one batch on the device; the schedule splits the batch again."""
        # Copy the microbatches one by one from pinned memory, because a batch joined on the host would not be
        # pinned.
        local = [self._context.local_batch(micro) for micro in microbatches]
        return Microbatch(
            torch.cat([micro.tokens for micro in local]),
            torch.cat([micro.labels for micro in local]),
            torch.cat([micro.sample_keys for micro in local]),
        )

    def _share(self, losses: list[Tensor]) -> Tensor:
        """Return this rank's share of the loss; only the last stage computes the loss."""
        if not losses:
            return torch.zeros((), device=self._device)
        return torch.stack([loss.detach() for loss in losses]).sum() * self._context.loss_share

    def _run_forward(self, inputs: Sequence[Tensor], sample_keys: Sequence[Tensor]) -> list[Tensor]:
        """Return the last stage's output for each input, without gradients; [] on ranks of other stages.

        torch's schedules are not used here, because only the single-stage schedules support passes without
        gradients.
        """
        outputs, works = [], []
        for x, keys in zip(inputs, sample_keys, strict=True):
            for stage, model in self._local_stages:
                if stage > 0 and self._rank_of[stage - 1] != self._group.rank():
                    x = self._receive(stage - 1)
                x = model(x, sample_keys=keys)
                if stage == self._last:
                    outputs.append(x)
                elif self._rank_of[stage + 1] != self._group.rank():
                    works += self._send(stage, x.contiguous())
        for work in works:
            work.wait()
        return outputs

    def _send(self, stage: int, x: Tensor) -> list[dist.Work]:
        receiver = self._rank_of[stage + 1]
        sent = [x]
        if stage not in self._announced:
            self._announced.add(stage)
            sent.insert(0, torch.tensor([_DTYPES.index(x.dtype), *x.shape], device=self._device))
        return [work for item in sent for work in exchange(self._group, (dist.isend, item, receiver))]

    def _receive(self, stage: int) -> Tensor:
        sender = self._rank_of[stage]
        if stage not in self._shapes:
            header = torch.empty(4, dtype=torch.int64, device=self._device)
            self._receive_into(header, sender)
            kind, *shape = header.tolist()
            self._shapes[stage] = torch.empty(shape, dtype=_DTYPES[kind], device="meta")
        x = torch.empty_like(self._shapes[stage], device=self._device)
        self._receive_into(x, sender)
        return x

    def _receive_into(self, x: Tensor, sender: int) -> None:
        for work in exchange(self._group, (dist.irecv, x, sender)):
            work.wait()


_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def stage_specs(pp_rank: int, pp: int, schedule: PipelineSchedule, num_layers: int) -> list[StageSpec]:
    """Return the specs of a rank's pipeline stages."""
    last = num_stages(pp, schedule) - 1
    layers = stage_layers(num_layers, last + 1)
    return [StageSpec(layers[stage], stage == 0, stage == last) for stage in stages_of(pp_rank, pp, schedule)]


def sum_tied_gradients(params: Sequence[nn.Parameter], world: World) -> None:
    """Sum the gradients of a tied embedding and head that are in different stages.

    `params` are the tied parameters on this rank. The embedding and the head each have their own gradient,
    and the gradient of the shared weight is the sum. Both parameters get the sum, so that their updates are
    identical. Call this function after the last backward pass of a step.
    """
    grads = [local_tensor(cast(Tensor, param.grad)) for param in params]
    if not grads:
        return
    if len(grads) == 2:
        # Both the first and the last stage are on this rank.
        grads[0].add_(grads[1])
        grads[1].copy_(grads[0])
        return
    [grad] = grads
    received = torch.empty_like(grad)
    assert world.mesh is not None
    group, other = world.mesh["pp"].get_group(), world.layout.pp - 1 - world.place.pp
    for work in exchange(group, (dist.isend, grad, other), (dist.irecv, received, other)):
        work.wait()
    grad.add_(received)
