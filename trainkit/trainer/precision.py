"""Number formats: what is computed in which type, and the loss scale that fp16 needs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trainkit.config.training import PrecisionConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_LOSS_SCALE = 2.0**100
"""Halving an infinite factor would never bring it back."""


def autocast(model: nn.Module, device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """The context of a forward pass; a model that is wrapped casts its parameters itself."""
    if dtype == torch.float32 or isinstance(model, FSDPModule):
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


class LossScale:
    """A factor on the loss that keeps fp16 gradients from vanishing, halved when they overflow.

    Lives on the device: neither the overflow nor the factor is waited for. Since the overflow is read off
    the global gradient norm, all ranks skip the same steps.
    """

    def __init__(self, config: PrecisionConfig, device: torch.device) -> None:
        self.enabled = config.dtype == "fp16"
        self._growth_interval = config.loss_scale_growth_interval
        start = config.init_loss_scale if self.enabled else 1.0
        self.value = torch.tensor(start, dtype=torch.float32, device=device)
        self._good_steps = torch.zeros((), dtype=torch.float32, device=device)

    def update(self, skipped: Tensor) -> None:
        """After a step; skipped: float32 [], 1 when it was skipped for a gradient that is not finite."""
        if not self.enabled:
            return
        good = torch.where(skipped > 0, 0.0, self._good_steps + 1)
        grow = good >= self._growth_interval
        factor = torch.where(skipped > 0, 0.5, torch.where(grow, 2.0, 1.0))
        self.value = (self.value * factor).clamp(1.0, MAX_LOSS_SCALE)
        self._good_steps = torch.where(grow, 0.0, good)

    def state(self) -> dict[str, float]:
        return {"value": self.value.item(), "good_steps": self._good_steps.item()}

    def load(self, state: dict[str, float]) -> None:
        if self.enabled and state:
            self.value.fill_(state["value"])
            self._good_steps.fill_(state["good_steps"])
