"""Compute random numbers from where they are used (the layer, the element), without a generator state.

A counter-based generator has no state to save or restore, and yields the same numbers with any number of
processes. A dropout mask depends on (seed, sample, layer, element). An initial weight depends on (seed,
parameter name, element), so each rank can fill its own shard, and all layouts start with identical weights.

The hash is the finalizer of MurmurHash3 (Austin Appleby, public domain) on 32-bit integers, with a second key
mixed in half-way. The hash is not cryptographically secure.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

_STRIDE = -1640531527  # 0x9E3779B9 as int32; multiplying by this odd number spreads adjacent counters apart
_MULTIPLY_1 = -2048144789  # 0x85EBCA6B as int32, from MurmurHash3
_MULTIPLY_2 = -1028477387  # 0xC2B2AE35 as int32, from MurmurHash3
_UNIT = 1.0 / (1 << 24)
_CHUNK_ELEMENTS = 1 << 24
"""Maximum number of elements per chunk; the counters of a chunk take up several times as much memory as its
elements."""


def stable_key(*parts: object) -> int:
    """Return a 31-bit key computed from `parts`, the same in every process and Python version."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "little") & 0x7FFFFFFF


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int32 values right logically, that is, without sign extension."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def hash_int32(counter: Tensor, key: Tensor | int, second_key: Tensor | int = 0) -> Tensor:
    """Hash int32 counters and keys to uniformly distributed int32; counters and keys are broadcast."""
    x = counter * _STRIDE + key
    x = (x ^ _shift_right(x, 16)) * _MULTIPLY_1
    x = x ^ second_key
    x = (x ^ _shift_right(x, 13)) * _MULTIPLY_2
    return x ^ _shift_right(x, 16)


def dropout(
    x: Tensor,
    probability: float,
    sample_keys: Tensor,
    site_key: Tensor | int,
    positions: Tensor | None = None,
) -> Tensor:
    """Zero each element of `x` with the given probability, and scale up the remaining elements.

    `x` has shape [B, T, …]. `sample_keys` is int32 [B], one key per sample. `site_key` is 0-dim int32 and
    identifies the place in the model that applies dropout. `positions` is int64 [T or more] and contains the
    sequence position of each row of `x`; None means that positions start at 0.
    """
    if probability == 0.0:
        return x
    counter = torch.arange(x[0].numel(), device=x.device, dtype=torch.int32)
    if positions is not None:
        width = x[0, 0].numel()
        rows = positions[: x.shape[1], None].to(torch.int32) * width
        counter = (rows + counter[:width]).view(-1)
    keys = sample_keys[:, None]
    # Compare integers: with an int32 threshold, the hashes need not be converted to floats.
    threshold = min(round(probability * 2**32) - 2**31, 2**31 - 1)
    keep = hash_int32(counter, keys, site_key) >= threshold
    return x * (keep.view(x.shape) * (1.0 / (1.0 - probability))).to(x.dtype)


def fill_normal_(local: Tensor, std: float, name: str, shape: Sequence[int], offset: Sequence[int]) -> None:
    """Fill a shard of a tensor from N(0, std²), with the values that the shard has in the full tensor.

    `local` is the shard, `name` is the tensor's key including the seed, `shape` is the full tensor's shape,
    and `offset` is the index in each dimension at which the shard starts.
    """
    if local.numel() == 0:
        return
    rows = max(1, _CHUNK_ELEMENTS // local[0].numel())
    for start in range(0, len(local), rows):
        _fill_chunk(local[start : start + rows], std, name, shape, (offset[0] + start, *offset[1:]))


def _fill_chunk(local: Tensor, std: float, name: str, shape: Sequence[int], offset: Sequence[int]) -> None:
    index = torch.zeros((), dtype=torch.int64, device=local.device)
    for dim, (size, start) in enumerate(zip(local.shape, offset, strict=True)):
        stride = math.prod(shape[dim + 1 :])
        axis = (torch.arange(size, device=local.device) + start) * stride
        index = index + axis.view([-1 if d == dim else 1 for d in range(local.dim())])
    low = index & 0xFFFFFFFF
    counter = (low - ((low >> 31) << 32)).to(torch.int32)
    high = (index >> 32).to(torch.int32) * _STRIDE
    # Hash two independent keys, because keys that differ in only one bit would yield correlated numbers.
    first = hash_int32(counter, stable_key(name, "radius"), high)
    second = hash_int32(counter, stable_key(name, "angle"), high)
    # Box-Muller transform; a uniform float32 in (0, 1] has a resolution of 24 bits.
    radius = torch.sqrt(-2.0 * torch.log((_shift_right(first, 8) + 1) * _UNIT))
    angle = _shift_right(second, 8) * (2.0 * math.pi * _UNIT)
    local.copy_(radius * torch.cos(angle) * std)
