"""Context parallelism: every rank has a part of the sequence, and gathers the keys and values of all.

As in Llama 3 (arXiv 2407.21783): with few key/value heads the gathering is cheap beside the attention, and
any attention kernel can be used. A rank has one part from the front of the sequence and one from the back,
so that all have the same number of keys to look at.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_single_autograd

from trainkit.trainer.models.model import PositionSlice

FLASH_MULTIPLE = 8
"""Flash attention takes heads whose size is a multiple of it."""


def positions_of(cp_rank: int, cp: int, seq_len: int) -> Tensor:
    """The positions that a rank works on, int64 [seq_len / cp]."""
    parts = torch.arange(seq_len, device="cpu").chunk(2 * cp)
    return torch.cat((parts[cp_rank], parts[2 * cp - 1 - cp_rank]))


def seen_by(cp_rank: int, cp: int, tp_rank: int, tp: int, seq_len: int) -> PositionSlice:
    """What a rank sees of a sequence; `tp` is 1 where tensor-parallel ranks all hold the residual stream."""
    attention = positions_of(cp_rank, cp, seq_len) if cp > 1 else torch.arange(seq_len, device="cpu")
    return PositionSlice(attention, attention.chunk(tp)[tp_rank])


def apply_context_parallel(attentions: list[nn.Module], group: dist.ProcessGroup, flash: bool) -> None:
    """Let attention modules, which work on `positions_of` this rank, see the whole sequence before them."""
    for attention in attentions:
        attention.attend = partial(gathered_attention, group=group, flash=flash)  # type: ignore[assignment]


def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, flash: bool = False
) -> Tensor:
    """Causal attention of this rank's queries [B, H, T, C] to the keys and values [B, K, T, C] of all.

    `flash`: the device has flash attention for tensors of this type.
    """
    cp, cp_rank = group.size(), group.rank()
    keys, values = _gather(torch.stack((k, v)), group, cp)
    size = q.shape[2] // 2
    outputs = []
    for part, queries in zip((cp_rank, 2 * cp - 1 - cp_rank), q.chunk(2, dim=2), strict=True):
        num_keys = (part + 1) * size
        outputs.append(_attend_to_last(queries, keys[:, :, :num_keys], values[:, :, :num_keys], flash))
    return torch.cat(outputs, dim=2)


def _attend_to_last(q: Tensor, k: Tensor, v: Tensor, flash: bool) -> Tensor:
    """Causal attention of queries that stand at the last of the keys' positions."""
    shares_heads = k.shape[1] != q.shape[1]
    if q.shape[2] == k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shares_heads)
    if flash and q.shape[3] % FLASH_MULTIPLE == 0:
        # No mask in memory: to this kernel "causal" means that the last query stands at the last key.
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
        return out
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    mask = mask.tril(k.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=shares_heads)


def _gather(mine: Tensor, group: dist.ProcessGroup, cp: int) -> Tensor:
    """Tensors [..., T, C] of all ranks, in the order of the sequence."""
    parts = all_gather_single_autograd(mine.contiguous(), gather_dim=3, group=group).chunk(2 * cp, dim=3)
    front, back = parts[::2], parts[1::2]
    return torch.cat((*front, *reversed(back)), dim=3)
