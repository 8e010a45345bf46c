"""What the attention kernels of a device can do, and what to do without."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import cast

import torch
from torch import Tensor, nn

FIRST_CAPABILITY = (8, 0)
"""Ampere."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of queries [B, H, T, C] to keys and values [B, K, S, C]."""


def has_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's flash attention computes with this type on the device."""
    if device.type != "cuda" or dtype == torch.float32 or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def repeat_shared_heads(attentions: list[nn.Module]) -> None:
    """Give every query head keys and values of its own, where only flash attention lets them be shared.

    Without it torch would take the kernel that keeps all scores [B, H, T, S].
    """
    for attention in attentions:
        attention.attend = _repeating(cast(Attend, attention.attend))  # type: ignore[assignment]


def _repeating(attend: Attend) -> Attend:
    @wraps(attend)
    def repeating(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        each = q.shape[1] // k.shape[1]
        return attend(q, k.repeat_interleave(each, dim=1), v.repeat_interleave(each, dim=1))

    return repeating
