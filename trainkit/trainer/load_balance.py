"""Balance the load of a model's experts, and measure how the router distributes the tokens.

Each expert has a bias, which the router adds to its score when it chooses experts. After each step, the bias
of an expert with less than the mean load grows by a fixed amount, and the bias of an expert with more load
shrinks by the same amount (arXiv 2408.15664). The load is the number of tokens that all ranks sent to the
expert in all microbatches of the step. An auxiliary loss, computed from the tokens of one rank in one
microbatch, is available in addition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from trainkit.plan.model_shape import ModelShape
from trainkit.trainer.models.decoder import Decoder
from trainkit.trainer.models.model import Model


class LoadBalance:
    """Counts the tokens of each expert during a step, and updates the biases of this rank's experts."""

    METRIC_NAMES: ClassVar[tuple[str, ...]] = ("load_imbalance", "router_entropy")

    def __init__(self, model_parts: Sequence[Model], shape: ModelShape, device: torch.device) -> None:
        assert shape.moe is not None
        self._moe, self._first = shape.moe, shape.dense_layers
        num_layers = shape.num_layers - self._first
        self._sums = torch.zeros(num_layers, self._moe.num_experts + 1, dtype=torch.float64, device=device)
        self.loss_scale = torch.ones((), device=device)
        """Factor of the loss of a step; see `ForwardBackward.accumulate_gradient`."""
        decoders = [cast(Decoder, model) for model in model_parts]
        routers = {layer: router for model in decoders for layer, router in model.routers.items()}
        self._biases = {layer: router.bias for layer, router in routers.items()}
        for model in decoders:
            model.on_routing = self._count

    @property
    def size(self) -> int:
        """Return the number of values that `take` returns."""
        return self._sums.numel()

    @property
    def biases(self) -> Mapping[str, Tensor]:
        """Map names to the biases of this rank's layers, which checkpoints contain."""
        return {f"blocks.{layer}.moe.router.bias": bias for layer, bias in self._biases.items()}

    def _count(self, layer: int, routing: Tensor, x: Tensor) -> Tensor:
        """Add the result of `MoE.forward` to the sums; return `x`, with the auxiliary loss attached."""
        self._sums[layer - self._first] += routing[:-1].detach()
        if self._moe.aux_coef == 0.0:
            return x
        # The loss of a step is a sum over its tokens, so weight the mean over this microbatch's tokens.
        factor = self.loss_scale * (self._moe.aux_coef * x.shape[0] * x.shape[1])
        found: Tensor = _AttachLoss.apply(x, routing[-1], factor)  # type: ignore[no-untyped-call]
        return found

    def take(self) -> Tensor:
        """Return the sums of this rank's microbatches, to be summed across all ranks, and start new sums.

        The float64 values are, for each layer of the model, the number of rows of each expert, and the sum of
        the entropies. Ranks that compute the same tokens multiply all values by the same factor.
        """
        sums = self._sums.flatten().clone()
        self._sums.zero_()
        return sums

    def metrics(self, sums: Tensor) -> Tensor:
        """Return the value and divisor of each metric, given the sums over all ranks.

        `load_imbalance` is the standard deviation of the experts' loads divided by their mean, averaged over
        the layers. `router_entropy` is the mean entropy of a token's scores, in nats.
        """
        counts, entropies = self._split(sums)
        variation = counts.std(1, correction=0) / counts.mean(1)
        tokens = counts.sum() / self._moe.top_k
        return torch.stack((variation.mean(), torch.ones_like(tokens), entropies.sum(), tokens))

    @torch.no_grad()
    def update(self, sums: Tensor, skip: Tensor) -> None:
        """Update the biases, given the sums over all ranks; `skip` (0-dim) is 1.0 to skip the update."""
        if self._moe.bias_rate == 0.0:
            return
        counts, _ = self._split(sums)
        change = (counts.mean(1, keepdim=True) - counts).sign() * self._moe.bias_rate * (1.0 - skip)
        for layer, bias in self._biases.items():
            bias += change[layer - self._first].float()

    def _split(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return the counts [layers, E] and the sums of entropies [layers]."""
        table = sums.view(self._sums.shape)
        return table[:, :-1], table[:, -1]


class _AttachLoss(torch.autograd.Function):
    """Returns `x` unchanged; the backward pass also computes the gradients of a loss times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return x.clone()  # A pipeline stage that splits its backward pass must not return a view.

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (factor,) = ctx.saved_tensors
        return grad, factor, None
