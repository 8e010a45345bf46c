"""Context parallelism: each rank has a slice of the sequence and gathers the keys and values of all ranks.

As in Llama 3 (arXiv 2407.21783): with few key/value heads the all-gather is cheap compared with the
attention, and any attention kernel can be used. Each rank has one chunk from the front of the sequence and
one from the back, which balances the work of causal attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.trainer.models.model import PositionSlice
from trainkit.trainer.torch_private import all_gather_dim, flash_attention_to_last

FLASH_MULTIPLE = 8
"""Flash attention requires head dimensions that are multiples of this."""


def context_positions(cp_rank: int, cp: int, seq_len: int) -> Tensor:
    """The positions of a rank, int64 [seq_len / cp]."""
    chunks = torch.arange(seq_len, device="cpu").chunk(2 * cp)
    return torch.cat((chunks[cp_rank], chunks[2 * cp - 1 - cp_rank]))


def position_slice(cp_rank: int, cp: int, tp_rank: int, tp: int, seq_len: int) -> PositionSlice:
    """The positions of a rank; `tp` is 1 if the residual stream is not split over tensor-parallel ranks."""
    attention = context_positions(cp_rank, cp, seq_len) if cp > 1 else torch.arange(seq_len, device="cpu")
    return PositionSlice(attention, attention.chunk(tp)[tp_rank])


def apply_context_parallel(attentions: list[nn.Module], group: dist.ProcessGroup, flash: bool) -> None:
    """Make attention modules gather the keys and values of all ranks; queries are at `context_positions`."""
    for attention in attentions:
        attention.attend = partial(all_gather_attention, group=group, flash=flash)  # type: ignore[assignment]


def all_gather_attention(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, flash: bool = False
) -> Tensor:
    """Causal attention of this rank's queries [B, H, T, C] to the keys and values [B, K, T, C] of all ranks.

    `flash`: whether the device has flash attention for this dtype.
    """
    cp, cp_rank = group.size(), group.rank()
    keys, values = _gather(torch.stack((k, v)), group, cp)
    size = q.shape[2] // 2
    outputs = []
    for chunk, queries in zip((cp_rank, 2 * cp - 1 - cp_rank), q.chunk(2, dim=2), strict=True):
        num_keys = (chunk + 1) * size
        outputs.append(_attend_suffix(queries, keys[:, :, :num_keys], values[:, :, :num_keys], flash))
    return torch.cat(outputs, dim=2)


def _attend_suffix(q: Tensor, k: Tensor, v: Tensor, flash: bool) -> Tensor:
    """Causal attention of queries whose positions are the last of the keys' positions."""
    shared_kv = k.shape[1] != q.shape[1]
    if q.shape[2] == k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared_kv)
    if flash and q.shape[3] % FLASH_MULTIPLE == 0:
        return flash_attention_to_last(q, k, v)  # without a mask in memory
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    mask = mask.tril(k.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=shared_kv)


def _gather(local: Tensor, group: dist.ProcessGroup, cp: int) -> Tensor:
    """The tensors [..., T, C] of all ranks, in sequence order."""
    chunks = all_gather_dim(local.contiguous(), 3, group).chunk(2 * cp, dim=3)
    front, back = chunks[::2], chunks[1::2]
    return torch.cat((*front, *reversed(back)), dim=3)


FLASH_CAPABILITY = (8, 0)
"""Compute capability of Ampere."""
Attend = Callable[..., Tensor]
"""Attention of queries [B, H, T, C] to keys and values [B, K, S, C], with a mask or without."""


def has_flash_attention(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's flash attention supports this dtype on the device."""
    if device.type != "cuda" or dtype == torch.float32 or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY


def repeat_kv_heads(attentions: list[nn.Module]) -> None:
    """Make attention modules repeat keys and values for every query head.

    For devices and masks without flash attention: for shared keys and values torch would choose a kernel that
    materialises all scores [B, H, T, S].
    """
    for attention in attentions:
        attention.attend = _repeating(cast(Attend, attention.attend))  # type: ignore[assignment]


def _repeating(attend: Attend) -> Attend:
    @wraps(attend)
    def repeating(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        repeats = q.shape[1] // k.shape[1]
        return attend(q, k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1), *mask)

    return repeating
