"""Context parallelism: each rank has a slice of the sequence and gathers the keys and values of all ranks.

Llama 3 (arXiv 2407.21783) was trained with this kind of context parallelism. With few key/value heads, the
all-gather is cheap compared with the attention, and any attention kernel can be used. Each rank gets one
chunk from the front and one from the back of the sequence, which balances the work for causal attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.trainer.models.decoder import causal_attention
from trainkit.trainer.models.model import PositionSlice
from trainkit.trainer.torch_private import (
    all_gather_dim,
    chooses_cudnn,
    cudnn_attention,
    cudnn_attention_gradients,
    flash_attention_to_last,
)

Attend = Callable[..., Tensor]
"""Computes attention between queries [B, H, T, C] and keys and values [B, K, S, C], with or without a
mask."""
FLASH_MULTIPLE = 8
"""Flash attention requires a head dimension that is a multiple of this number."""
FLASH_CAPABILITY = (8, 0)
"""Compute capability of Ampere, the first GPU generation that supports flash attention."""


def context_positions(cp_rank: int, cp: int, seq_len: int) -> Tensor:
    """Return the positions that a context-parallel rank processes, int64 [seq_len / cp]."""
    chunks = torch.arange(seq_len, device="cpu").chunk(2 * cp)
    return torch.cat((chunks[cp_rank], chunks[2 * cp - 1 - cp_rank]))


def position_slice(cp_rank: int, cp: int, tp_rank: int, tp: int, seq_len: int) -> PositionSlice:
    """Return the positions that a rank processes; without sequence parallelism, `tp` must be 1."""
    attention = context_positions(cp_rank, cp, seq_len) if cp > 1 else torch.arange(seq_len, device="cpu")
    return PositionSlice(attention, attention.chunk(tp)[tp_rank])


def apply_context_parallel(attentions: list[nn.Module], group: dist.ProcessGroup, to_last: Attend) -> None:
    """Make attention modules gather the keys and values of all ranks, for queries at `context_positions`.

    For attention with a mask, the modules then call the function that they called before.
    """
    for attention in attentions:
        masked = cast(Attend, attention.attend)
        settings = {"group": group, "to_last": to_last, "masked": masked}
        attention.attend = partial(all_gather_attention, **settings)  # type: ignore[assignment, arg-type]


def all_gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    to_last: Attend,
    masked: Attend,
) -> Tensor:
    """Compute causal attention between this rank's queries [B, H, T, C] and the keys and values of all ranks.

    `k` and `v` are this rank's keys and values [B, K, T, C]. `to_last` computes causal attention for queries
    at the last key positions. If a `mask` [B, 1, T, S] for the keys of all ranks is given, `masked` computes
    the attention.
    """
    cp, cp_rank = group.size(), group.rank()
    keys, values = _gather(torch.stack((k, v)), group, cp)
    if mask is not None:
        return masked(q, keys, values, mask)
    size = q.shape[2] // 2
    outputs = []
    for chunk, queries in zip((cp_rank, 2 * cp - 1 - cp_rank), q.chunk(2, dim=2), strict=True):
        seen = (item[:, :, : (chunk + 1) * size] for item in (keys, values))
        outputs.append(to_last(queries, *seen) if chunk else causal_attention(queries, *seen))
    return torch.cat(outputs, dim=2)


def attention_to_last(device: torch.device, dtype: torch.dtype, head_dim: int) -> Attend:
    """Return a function that computes causal attention for queries at the last key positions."""
    if not has_flash_attention(device, dtype) or head_dim % FLASH_MULTIPLE:
        return masked_attention_to_last
    queries = torch.empty(1, 2, 128, head_dim, device=device, dtype=dtype, requires_grad=True)
    return cudnn_attention_to_last if chooses_cudnn(queries, queries[:, :1]) else flash_attention_to_last


def masked_attention_to_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention for queries at the last key positions, using a materialized mask."""
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    mask = mask.tril(k.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=k.shape[1] != q.shape[1])


def cudnn_attention_to_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention for queries at the last key positions, using two cuDNN calls.

    One call computes attention to the keys before the query positions, and the other to the keys at the query
    positions; the results are merged as in ring attention (arXiv 2310.01889). On long sequences, the two
    calls together take 50 to 67 % of the time of flash attention.
    """
    if q.shape[2] == 1:  # cuDNN does not support causal attention with a single key
        return flash_attention_to_last(q, k, v)
    out: Tensor = _Merged.apply(q, k, v)  # type: ignore[no-untyped-call]
    return out


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (k_before, k_last), (v_before, v_last) = _apart(q, k), _apart(q, v)
        out, logsumexp, *state = cudnn_attention(q, k_before, v_before, causal=False)
        out_last, logsumexp_last, *state_last = cudnn_attention(q, k_last, v_last, causal=True)
        merged = torch.logaddexp(logsumexp, logsumexp_last)
        out = torch.lerp(out_last.float(), out.float(), torch.exp(logsumexp - merged)).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merged, *state, *state_last)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, merged, *states = ctx.saved_tensors
        (k_before, k_last), (v_before, v_last) = _apart(q, k), _apart(q, v)
        before = cudnn_attention_gradients(grad, q, k_before, v_before, out, merged, states[:2], causal=False)
        last = cudnn_attention_gradients(grad, q, k_last, v_last, out, merged, states[2:], causal=True)
        keys, values = (torch.cat(pair, dim=2) for pair in zip(before[1:], last[1:], strict=True))
        return before[0] + last[0], keys, values


def _apart(q: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Split keys into those before the query positions and those at the query positions."""
    before = keys.shape[2] - q.shape[2]
    return keys[:, :, :before], keys[:, :, before:]


def _gather(local: Tensor, group: dist.ProcessGroup, cp: int) -> Tensor:
    """Return the tensors [..., T, C] of all ranks, concatenated in sequence order."""
    chunks = all_gather_dim(local.contiguous(), 3, group).chunk(2 * cp, dim=3)
    front, back = chunks[::2], chunks[1::2]
    return torch.cat((*front, *reversed(back)), dim=3)


def has_flash_attention(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch's flash attention supports a dtype on a device."""
    if device.type != "cuda" or dtype == torch.float32 or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY


def repeat_kv_heads(attentions: list[nn.Module]) -> None:
    """Make attention modules repeat keys and values, so that each query head has its own copy.

    Use repeated keys and values where flash attention does not support the device or the mask. With
    grouped-query attention and without flash attention, torch would choose a kernel that materializes all
    scores [B, H, T, S].
    """
    for attention in attentions:
        attention.attend = _repeating(cast(Attend, attention.attend))  # type: ignore[assignment]


def _repeating(attend: Attend) -> Attend:
    @wraps(attend)
    def repeating(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        repeats = q.shape[1] // k.shape[1]
        return attend(q, k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1), *mask)

    return repeating
