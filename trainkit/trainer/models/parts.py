"""What a model tells about itself, so that any layout can split it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Role = Literal["embedding", "norm", "whole_input", "column", "row", "head"]
"""What tensor parallelism does with a module: ``column`` and ``row`` split a matrix by its outputs and by its
inputs, ``whole_input`` needs the whole sequence, ``norm`` does not."""


@dataclass(frozen=True)
class Part:
    """What of a model one pipeline stage holds."""

    layers: range
    has_embedding: bool = True
    has_head: bool = True

    @classmethod
    def whole(cls, num_layers: int) -> Part:
        return cls(range(num_layers))


@dataclass(frozen=True)
class Seen:
    """The positions of a sequence that a rank works on, int64."""

    attention: Tensor
    """Those that it has queries of."""
    stream: Tensor
    """Those whose residual stream it holds; fewer, where tensor-parallel ranks share them."""

    @classmethod
    def all(cls, seq_len: int) -> Seen:
        positions = torch.arange(seq_len, device="cpu")  # also while a model without values is built
        return cls(positions, positions)
