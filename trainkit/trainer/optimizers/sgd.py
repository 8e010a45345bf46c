"""Stochastic gradient descent with momentum, as in torch.optim.SGD, but with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trainkit.trainer.optimizers.by_element import ByElement


class ShardedSGD(ByElement):
    """SGD on this rank's shards of a model's parameters; without momentum, SGD keeps no state."""

    def _constants(self) -> tuple[float, ...]:
        return self._config.momentum, float(self._config.nesterov)

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
        momentum, nesterov = constants
        averages = [average * momentum + grad for average in averages]
        direction = averages[0] if averages else grad
        if averages and nesterov:
            direction = grad + momentum * direction
        return weight - lr * weight_decay * weight - lr * direction, averages
