"""What a model tells about itself, so that any layout can split it: an architecture is one file of these."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from trainkit.plan.model_shape import ModelShape

Role = Literal["embedding", "norm", "stream", "whole_input", "column", "row", "head"]
"""What tensor parallelism does with a module: ``column`` and ``row`` split a matrix by its outputs and by its
inputs; ``whole_input`` needs the whole sequence; a ``norm``, and whatever else works on the ``stream``
position by position, does not. Every module with parameters has one, or is inside of one that has."""


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
class PositionSlice:
    """The positions of a sequence that a rank works on, int64."""

    attention: Tensor
    """Those that it has queries of."""
    stream: Tensor
    """Those whose residual stream it holds; fewer, where tensor-parallel ranks share them."""

    @classmethod
    def all(cls, seq_len: int) -> PositionSlice:
        positions = torch.arange(seq_len, device="cpu")  # also while a model without values is built
        return cls(positions, positions)


class Model(nn.Module):
    """A model, or the part of it that a pipeline stage has.

    A parameter has the same name in every part. `forward(x, sample_keys)` takes token ids [B, T] where the
    part has the embedding, else the residual stream [B, T, D]; it gives logits [B, T, vocab] where it has the
    head, else the residual stream.
    """

    TENSOR_PLAN: ClassVar[dict[str, Role]]
    """Names of modules, in which ``*`` stands for one part of a name, and what is done with them."""
    TIED: ClassVar[dict[str, str]]
    """Parameters that can be one weight: the name of the later one -> that of the first."""

    def __init__(self, shape: ModelShape, seq_len: int, part: Part | None = None) -> None:
        """Make the modules of `part`, of the whole model if None."""
        super().__init__()
        self.shape = shape
        self.is_tied = shape.tie_embeddings

    @staticmethod
    @abstractmethod
    def num_params(shape: ModelShape) -> int:
        """All parameters, tied ones once."""

    @staticmethod
    @abstractmethod
    def flops_per_token(shape: ModelShape, seq_len: int) -> float:
        """Floating point operations that training needs for one token, recomputation not counted."""

    @property
    @abstractmethod
    def layers(self) -> list[nn.Module]:
        """The repeated layers of this part, in order: the unit of compiling, recomputing and sharding."""

    @property
    @abstractmethod
    def attentions(self) -> list[nn.Module]:
        """The modules whose `attend(q, k, v)` looks at a whole sequence; replaced where a rank has a part."""

    @property
    @abstractmethod
    def stream_shape(self) -> tuple[int, int]:
        """Positions and width of the residual stream that this rank holds of one sample."""

    @abstractmethod
    def see(self, seen: PositionSlice) -> None:
        """Work on these positions of a sequence only."""

    @abstractmethod
    def restore(self) -> None:
        """Bring back what `to_empty` loses: the buffers' values, and that tied weights are one."""

    @abstractmethod
    def init_std(self, name: str) -> float | None:
        """Standard deviation of a parameter's initial values by its name; None: ones (norm weights)."""

    def tie(self) -> None:
        """Make tied parameters one, where both are in this part; whatever replaces parameters loses that."""
        if not self.is_tied:
            return
        here = dict(self.named_parameters(remove_duplicate=False))
        for later, first in self.TIED.items():
            if later in here and first in here:
                owner, _, name = later.rpartition(".")
                setattr(self.get_submodule(owner), name, here[first])

    def canonical(self, name: str) -> str:
        """The name of a parameter in the whole model; of tied ones, that of the first."""
        return self.TIED.get(name, name) if self.is_tied else name

    @property
    def tied_names(self) -> set[str]:
        """Canonical names of the weights that both ends of the model use."""
        return set(self.TIED.values()) if self.is_tied else set()
