"""The forward and backward passes of a step, and their implementation without pipeline parallelism."""

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
from trainkit.trainer.progress import Progress

NllSum = Callable[[Tensor, Tensor], Tensor]
"""The negative log-likelihood of logits [B, T, vocab] and labels [B, T], float32 []."""
OnLoss = Callable[[Tensor], None]
"""Called with this rank's share of a step's loss as soon as it is known, before the last backward pass."""


class ForwardBackward(Protocol):
    """Computes the gradient of a step."""

    def accumulate_gradient(self, microbatches: list[Microbatch], scale: Tensor, on_loss: OnLoss) -> None:
        """Add the gradient of the summed loss x `scale`, a float32 [] on the device.

        `on_loss` gets a negative log-likelihood, float32 []; its sum over all ranks is that of the step.
        """
        ...

    def nll_sum(self, micro: Microbatch) -> Tensor:
        """The negative log-likelihood of one microbatch without its gradient, as `on_loss` gets it."""
        ...


class ForwardContext:
    """The settings of every pass: the loss, its parallelism, the positions of this rank."""

    def __init__(
        self, world: World, nll_sum: NllSum, use_loss_parallel: bool, positions: Tensor | None = None
    ) -> None:
        self.nll_sum = nll_sum
        self._device = world.device
        self._use_loss_parallel = use_loss_parallel
        self._positions = None if positions is None else positions.to(world.device)
        self.loss_share = 0.0 if world.place.tp else 1.0
        """Factor of this rank's loss: tensor-parallel ranks compute the same loss; the first one counts."""

    def local_batch(self, micro: Microbatch) -> Microbatch:
        """A microbatch on the device, restricted to the positions of this rank."""
        micro = micro.to(self._device)
        if self._positions is None:
            return micro
        at = self._positions
        return Microbatch(micro.tokens[:, at], micro.labels[:, at], micro.sample_keys)

    def loss_parallel(self) -> AbstractContextManager[object]:
        """The context of loss parallelism; must be active during the backward pass too."""
        return loss_parallel() if self._use_loss_parallel else nullcontext()


class SequentialForwardBackward:
    """ForwardBackward without pipeline stages: one microbatch after the other."""

    def __init__(
        self,
        model: nn.Module,
        sync_gradients: GradientSwitch,
        world: World,
        context: ForwardContext,
        progress: Progress,
    ) -> None:
        self._model = model
        self._sync_gradients = sync_gradients
        self._device = world.device
        self._context = context
        self._progress = progress

    def accumulate_gradient(self, microbatches: list[Microbatch], scale: Tensor, on_loss: OnLoss) -> None:
        total = torch.zeros((), device=self._device)
        last = len(microbatches) - 1
        for index, micro in enumerate(microbatches):
            if last > 0:
                self._sync_gradients(index == last)
            self._progress.enter("forward")
            with self._context.loss_parallel():
                nll_sum = self._forward(micro)
                total += nll_sum.detach() * self._context.loss_share
                self._progress.enter("backward")
                if index == last:
                    on_loss(total)
                (nll_sum * scale).backward()  # type: ignore[no-untyped-call]

    def nll_sum(self, micro: Microbatch) -> Tensor:
        with self._context.loss_parallel():
            return self._forward(micro) * self._context.loss_share

    def _forward(self, micro: Microbatch) -> Tensor:
        micro = self._context.local_batch(micro)
        logits = self._model(micro.tokens, sample_keys=micro.sample_keys)
        return self._context.nll_sum(logits, micro.labels)
