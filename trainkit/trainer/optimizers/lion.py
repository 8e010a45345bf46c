"""Lion (arXiv 2302.06675), which keeps one average per weight and updates by the sign of another one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainkit.trainer.optimizers.by_element import ByElement


class ShardedLion(ByElement):
    """Lion on this rank's shards of a model's parameters."""

    def _constants(self) -> tuple[float, ...]:
        return self._config.betas

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
        (average,), (beta1, beta2) = averages, constants
        direction = torch.lerp(average, grad, 1 - beta1).sign()
        updated = weight - lr * weight_decay * weight - lr * direction
        return updated, (torch.lerp(average, grad, 1 - beta2),)
