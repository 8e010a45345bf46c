"""The forward and backward passes of a step, and their implementation without pipeline parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from trainkit.trainer.batches import Microbatch
from trainkit.trainer.distributed import World
from trainkit.trainer.progress import Progress

NllSum = Callable[[Tensor, Tensor], Tensor]
"""The negative log-likelihood of logits [B, T, vocab] and labels [B, T], float32 []."""
OnLoss = Callable[[Tensor], None]
"""Called with this rank's share of a step's loss as soon as it is known, before the last backward pass."""
GradientSwitch = Callable[[bool], None]
"""Enables or disables gradient reduction; disabled for all but the last microbatch of a step."""

M = TypeVar("M", contravariant=True)
"""The type of a microbatch."""


class ForwardBackward(Protocol[M]):
    """Computes the gradient of a step."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of the metrics in the sums of the last pass."""
        ...

    def accumulate_gradient(self, microbatches: Sequence[M], scale: Tensor, on_loss: OnLoss) -> None:
        """Add the gradient of the summed loss x `scale`, a float32 [] on the device.

        `on_loss` gets the sums of this rank: the negative log-likelihood, float32 []; or of a user's task the
        loss, what it is divided by, and such a pair per metric, float64 [2 + 2 x metrics].
        """
        ...

    def loss_sums(self, micro: M) -> Tensor:
        """The sums of one microbatch, as `on_loss` gets them, without a gradient."""
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


class _ChunkedLoss(torch.autograd.Function):
    """The loss of hidden states [N, D], a chunk of tokens after the other, and with it its gradients.

    Only the logits of one chunk exist at a time, and none are computed twice. The weight's gradient is summed
    over the chunks in float32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, nll_sum: NllSum, chunks: int) -> Tensor:
        has_gradient = any(ctx.needs_input_grad)
        total = torch.zeros((), device=x.device)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if has_gradient else None
        x_grads = []
        for part, of_part in zip(x.chunk(chunks), labels.chunk(chunks), strict=True):
            inputs = [tensor.detach().requires_grad_(has_gradient) for tensor in (part, weight)]
            with torch.set_grad_enabled(has_gradient):
                loss = nll_sum(F.linear(*inputs)[None], of_part[None])
            total += loss.detach()
            if weight_grad is not None:
                x_grad, of_weight = torch.autograd.grad(loss, inputs)
                x_grads.append(x_grad)
                weight_grad += of_weight
        ctx.gradients = x_grads, weight_grad
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        # The context lives as long as the loss, which is longer than these may take memory.
        (x_grads, weight_grad), ctx.gradients = ctx.gradients, None
        x_grad = torch.cat(x_grads).mul_(scale)
        return x_grad, weight_grad.mul_(scale).to(x_grad.dtype), None, None, None


class SequentialForwardBackward:
    """ForwardBackward without pipeline stages: one microbatch after the other."""

    metric_names = ()

    def __init__(
        self,
        model: nn.Module,
        sync_gradients: GradientSwitch,
        world: World,
        context: ForwardContext,
        progress: Progress,
        loss_chunks: int = 1,
    ) -> None:
        """With `loss_chunks` above 1 the model computes the loss, one part of the tokens after the other."""
        self._model = model
        self._loss_chunks = loss_chunks
        self._sync_gradients = sync_gradients
        self._device = world.device
        self._context = context
        self._progress = progress

    def accumulate_gradient(self, microbatches: Sequence[Microbatch], scale: Tensor, on_loss: OnLoss) -> None:
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

    def loss_sums(self, micro: Microbatch) -> Tensor:
        with self._context.loss_parallel():
            return self._forward(micro) * self._context.loss_share

    def _forward(self, micro: Microbatch) -> Tensor:
        micro = self._context.local_batch(micro)
        if self._loss_chunks == 1:
            logits = self._model(micro.tokens, sample_keys=micro.sample_keys)
            return self._context.nll_sum(logits, micro.labels)
        labels, nll_sum, chunks = micro.labels.flatten(), self._context.nll_sum, self._loss_chunks

        def loss(x: Tensor, weight: Tensor) -> Tensor:
            inputs = x.flatten(0, 1), weight, labels, nll_sum, chunks
            found: Tensor = _ChunkedLoss.apply(*inputs)  # type: ignore[no-untyped-call]
            return found

        whole: Tensor = self._model(micro.tokens, sample_keys=micro.sample_keys, loss=loss)
        return whole
