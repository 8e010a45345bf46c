"""The forward and backward passes of a step, on a model that each rank has from end to end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from trainkit.trainer.batches import Microbatch
from trainkit.trainer.distributed import World
from trainkit.trainer.parallel.data_parallel import GradientSwitch
from trainkit.trainer.precision import autocast
from trainkit.trainer.progress import Pulse
from trainkit.trainer.tasks import Task

OnLoss = Callable[[Tensor], None]
"""Called with this rank's share of a step's loss as soon as it is known, while the last pass goes on."""


class Passes(Protocol):
    """How a step's gradient comes about."""

    def add_gradient(self, microbatches: list[Microbatch], scale: Tensor, on_loss: OnLoss) -> None:
        """Add the gradient of the summed loss x `scale`, a float32 [] on the device.

        `on_loss` gets the negative log-likelihood, float32 [], of which the sum over all ranks is the step's.
        """
        ...

    def nll_sum(self, micro: Microbatch) -> Tensor:
        """The negative log-likelihood of one microbatch without its gradient, as `on_loss` gets it."""
        ...


class StepContext:
    """What holds for every pass: number formats, the split over the vocabulary, this rank's positions."""

    def __init__(
        self, world: World, dtype: torch.dtype, splits_loss: bool, positions: Tensor | None = None
    ) -> None:
        self._device = world.device
        self._dtype = dtype
        self._splits_loss = splits_loss
        self._positions = None if positions is None else positions.to(world.device)
        self.share = 0.0 if world.place.tp else 1.0
        """Tensor-parallel ranks have the same loss; one of them tells it."""

    def take(self, micro: Microbatch) -> Microbatch:
        """A microbatch on the device, and of its sequences what this rank works on."""
        micro = micro.to(self._device)
        if self._positions is None:
            return micro
        at = self._positions
        return Microbatch(micro.tokens[:, at], micro.labels[:, at], micro.sample_keys)

    def autocast(self, model: nn.Module) -> AbstractContextManager[object]:
        return autocast(model, self._device, self._dtype)

    def split(self) -> AbstractContextManager[object]:
        """Must hold for the backward pass too."""
        return loss_parallel() if self._splits_loss else nullcontext()


class WholePasses:
    """Passes through a model that is whole, or of which each layer is split."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        sync_gradients: GradientSwitch,
        world: World,
        context: StepContext,
        pulse: Pulse,
    ) -> None:
        self._task = task
        self._model = model
        self._sync_gradients = sync_gradients
        self._device = world.device
        self._context = context
        self._pulse = pulse

    def add_gradient(self, microbatches: list[Microbatch], scale: Tensor, on_loss: OnLoss) -> None:
        total = torch.zeros((), device=self._device)
        last = len(microbatches) - 1
        for index, micro in enumerate(microbatches):
            if last > 0:
                self._sync_gradients(index == last)
            self._pulse.enter("forward")
            with self._context.split():
                nll_sum = self._forward(micro)
                total += nll_sum.detach() * self._context.share
                self._pulse.enter("backward")
                if index == last:
                    on_loss(total)
                (nll_sum * scale).backward()  # type: ignore[no-untyped-call]

    def nll_sum(self, micro: Microbatch) -> Tensor:
        with self._context.split():
            return self._forward(micro) * self._context.share

    def _forward(self, micro: Microbatch) -> Tensor:
        micro = self._context.take(micro)
        with self._context.autocast(self._model):
            logits = self._model(micro.tokens, sample_keys=micro.sample_keys)
            return self._task.nll_sum(logits, micro.labels)
