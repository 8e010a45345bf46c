"""AdamW (arXiv 1711.05101), with averages in float32, in bf16 or as 8-bit codes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from trainkit.trainer.optimizers.by_element import ByElement, Piece, Rates, in_full_precision, round_average
from trainkit.trainer.split_master import in_float32

TINY = 1e-30
"""Replaces 0 where a logarithm is computed, because the logarithm of 0 is not finite."""


class ShardedAdamW(ByElement):
    """AdamW on this rank's shards of a model's parameters, with torch's fused kernel."""

    counts_steps = True
    has_fused_kernel = True

    def _constants(self) -> tuple[float, ...]:
        return (*self._config.betas, self._config.eps)

    @staticmethod
    def formula(
        weight: Tensor,
        grad: Tensor,
        averages: Sequence[Tensor],
        step: Tensor | None,
        lr: float | Tensor,
        weight_decay: float | Tensor,
        *constants: float,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Compute the same update as the fused kernel."""
        assert step is not None
        (first, second), (beta1, beta2, eps) = averages, constants
        decayed = weight - lr * weight_decay * weight
        first_now = torch.lerp(first, grad, 1 - beta1)
        second_now = second * beta2 + (1 - beta2) * grad * grad
        # This formula equals 1 - beta ** step, but is more accurate in float32.
        bias1, bias2 = (-torch.expm1((step + 1) * math.log(beta or TINY)) for beta in (beta1, beta2))
        updated = decayed - lr / bias1 * first_now / ((second_now / bias2).sqrt() + eps)
        return updated, (first_now, second_now)

    def _update_pieces(self, pieces: list[Piece], rates: Rates, divisor: Tensor, skip: Tensor) -> None:
        # The kernel requires weights, gradients and averages of the same dtype; only what is stored is split
        # or in low precision.
        beta1, beta2, eps = self._constants()
        averages = [average for piece in pieces for average in piece.averages]
        new_averages = [*map(in_full_precision, averages)]
        with in_float32([piece.weight for piece in pieces]) as weights:
            adamw(
                weights,
                [piece.grad for piece in pieces],
                new_averages[::2],
                new_averages[1::2],
                [],
                [cast(Tensor, piece.step) for piece in pieces],
                fused=True,
                grad_scale=divisor,
                found_inf=skip,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=rates.lr,
                weight_decay=rates.weight_decay,
                eps=eps,
                maximize=False,
            )
        for average, updated in zip(averages, new_averages, strict=True):
            round_average(average, updated, skip)
