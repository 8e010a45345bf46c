"""Describes the two kinds of feed-forward networks in blocks: their parameters, FLOPs and activations.

A dense network is one SwiGLU network. A network of experts has a router, which chooses some of many small
SwiGLU networks for each token, and possibly shared experts, which process every token. The functions have no
side effects.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from trainkit.config.training import MoeConfig, Score
from trainkit.errors import Problem

FLOAT32, INT64 = 4, 8
EXPERT_MULTIPLE = 8
"""Grouped matrix products need rows of a multiple of 16 bytes, which are 8 numbers in 16-bit dtypes."""


class Matrices(NamedTuple):
    """The matrices of one weight of a block, which have the same numbers of rows and columns."""

    rows: int
    columns: int
    num_experts: int = 0
    """Number of experts, each of which has one of the matrices; 0 if the weight is a single matrix."""

    @property
    def num_matrices(self) -> int:
        """Return the number of matrices."""
        return self.num_experts or 1

    @property
    def num_elements(self) -> int:
        """Return the number of elements of all the matrices."""
        return self.num_matrices * self.rows * self.columns


def swiglu_matrices(dim: int, ffn_dim: int, num_experts: int = 0) -> list[Matrices]:
    """Return the gate, up and down matrices of a SwiGLU network, or of `num_experts` such networks."""
    return [*[Matrices(ffn_dim, dim, num_experts)] * 2, Matrices(dim, ffn_dim, num_experts)]


@dataclass(frozen=True)
class MoeShape:
    """The dimensions of a model's experts, and how tokens are routed to them."""

    num_experts: int
    top_k: int
    ffn_dim: int
    num_shared: int = 0
    first_dense: int = 0
    score: Score = "softmax"
    norm_topk: bool = True
    scale: float = 1.0
    bias_rate: float = 0.0
    aux_coef: float = 0.0

    @property
    def shared_dim(self) -> int:
        """Return the hidden size of the shared experts, which are computed as one network."""
        return self.num_shared * self.ffn_dim


class FeedForwardKind(Protocol):
    """One kind of feed-forward network; `dim` is the width of the residual stream.

    Numbers of elements are per token, and have the compute dtype. With tensor parallelism, each rank has only
    a part of a dense network and of the shared experts, and all of the other experts.
    """

    is_split: ClassVar[bool]
    """True if tensor-parallel ranks split the hidden size, and False if each rank computes its own tokens."""

    @property
    def hidden(self) -> int:
        """Return the hidden sizes of all networks that process a token, together."""
        ...

    def params(self, dim: int) -> int:
        """Return the number of parameters."""
        ...

    def unsplit_params(self, dim: int) -> int:
        """Return the number of parameters that every tensor-parallel rank has."""
        ...

    def expert_params(self, dim: int) -> int:
        """Return the number of parameters of the experts that expert parallelism divides over ranks."""
        ...

    def matrices(self, dim: int) -> list[Matrices]:
        """Return the matrices of the network, except the router's, in the order of the model's parameters."""
        ...

    def active_params(self, dim: int) -> int:
        """Return the number of parameters by which each token is multiplied."""
        ...

    def saved(self, dim: int, num_inner: int) -> int:
        """Return the number of elements saved for the backward pass, besides the network's input.

        `num_inner` is the number of tensors of the hidden size that one SwiGLU network saves.
        """
        ...

    def products(self, dim: int, *, all_of_them: bool) -> int:
        """Return the number of elements that checkpointing by operation saves: of all or half the products.

        The output of a dense network's last product is not counted, because a tensor-parallel rank and a
        fused kernel treat the output differently.
        """
        ...

    def recomputed(self) -> int:
        """Return the hidden sizes of the products that `selective` checkpointing computes again."""
        ...

    def gradients(self, dim: int) -> int:
        """Return the number of elements of gradients at the start of the network's backward pass."""
        ...

    def output_gradients(self, dim: int) -> int:
        """Return the number of elements of output gradients that deferred weight gradients need."""
        ...

    def routing_bytes(self, dim: int, itemsize: int) -> int:
        """Return the bytes per token that the router saves, in float32 and int64."""
        ...

    def logit_bytes(self) -> int:
        """Return the bytes per token of the router's logits, which are a matrix product."""
        ...


@dataclass(frozen=True)
class Dense(FeedForwardKind):
    """One SwiGLU network that processes every token."""

    ffn_dim: int
    is_split: ClassVar[bool] = True

    @property
    def hidden(self) -> int:
        return self.ffn_dim

    def params(self, dim: int) -> int:
        return 3 * dim * self.ffn_dim

    def unsplit_params(self, dim: int) -> int:
        return 0

    def expert_params(self, dim: int) -> int:
        return 0

    def matrices(self, dim: int) -> list[Matrices]:
        return swiglu_matrices(dim, self.ffn_dim)

    def active_params(self, dim: int) -> int:
        return self.params(dim)

    def saved(self, dim: int, num_inner: int) -> int:
        return num_inner * self.ffn_dim

    def products(self, dim: int, *, all_of_them: bool) -> int:
        return self.ffn_dim * (2 if all_of_them else 1)

    def recomputed(self) -> int:
        return self.ffn_dim

    def gradients(self, dim: int) -> int:
        return 3 * self.ffn_dim

    def output_gradients(self, dim: int) -> int:
        return 2 * self.ffn_dim

    def routing_bytes(self, dim: int, itemsize: int) -> int:
        return 0

    def logit_bytes(self) -> int:
        return 0


@dataclass(frozen=True)
class RoutedExperts(FeedForwardKind):
    """A router and its experts, of which each token uses `top_k`, and the shared experts."""

    moe: MoeShape
    is_split: ClassVar[bool] = False

    @property
    def hidden(self) -> int:
        return self.moe.top_k * self.moe.ffn_dim + self.moe.shared_dim

    def params(self, dim: int) -> int:
        return self.unsplit_params(dim) + 3 * dim * self.moe.shared_dim

    def unsplit_params(self, dim: int) -> int:
        return dim * self.moe.num_experts + self.expert_params(dim)

    def expert_params(self, dim: int) -> int:
        return 3 * dim * self.moe.num_experts * self.moe.ffn_dim

    def matrices(self, dim: int) -> list[Matrices]:
        experts = swiglu_matrices(dim, self.moe.ffn_dim, self.moe.num_experts)
        return [*experts, *(swiglu_matrices(dim, self.moe.shared_dim) if self.moe.num_shared else [])]

    def active_params(self, dim: int) -> int:
        return dim * self.moe.num_experts + 3 * dim * self.hidden

    def saved(self, dim: int, num_inner: int) -> int:
        # Each of the K rows of a token is saved before and after the experts.
        return 2 * self.moe.top_k * dim + num_inner * self.hidden

    def products(self, dim: int, *, all_of_them: bool) -> int:
        moe, shared = self.moe, dim if self.moe.num_shared else 0
        if all_of_them:
            return 2 * self.hidden + moe.top_k * dim + shared
        # `selective` keeps the products of the router, of up, and of the shared experts' gate and down.
        return self.hidden + shared

    def recomputed(self) -> int:
        return 2 * self.moe.top_k * self.moe.ffn_dim + self.moe.shared_dim

    def gradients(self, dim: int) -> int:
        # The backward passes of the shared and of the other experts follow each other.
        hidden = max(self.moe.top_k * self.moe.ffn_dim, self.moe.shared_dim)
        return 3 * hidden + 2 * self.moe.top_k * dim

    def output_gradients(self, dim: int) -> int:
        return 2 * self.hidden + self.moe.top_k * dim

    def routing_bytes(self, dim: int, itemsize: int) -> int:
        moe = self.moe
        copy = FLOAT32 * dim if itemsize < FLOAT32 else 0  # the router computes in float32
        # The scores of all experts; and for each row its order and place, its expert, and three weights.
        return copy + FLOAT32 * moe.num_experts + (3 * INT64 + 3 * FLOAT32) * moe.top_k

    def logit_bytes(self) -> int:
        return FLOAT32 * self.moe.num_experts


def expert_problems(moe: MoeConfig, num_layers: int, dim: int, ffn_dim: int) -> Iterator[Problem]:
    """Yield every problem with the sizes of experts in a model with these dimensions."""
    key = "model.moe"
    if moe.top_k > moe.num_experts:
        message = f"has top_k {moe.top_k}, but num_experts is {moe.num_experts}"
        yield Problem(key, message, hint=f"set top_k to at most {moe.num_experts}")
    if moe.first_dense >= num_layers:
        message = f"has first_dense {moe.first_dense}, but the model has {num_layers} layers"
        yield Problem(key, message, hint=f"set first_dense to at most {num_layers - 1}, or model.moe to null")
    width = moe.expert_ffn_dim or ffn_dim
    if width % EXPERT_MULTIPLE:
        name = "expert_ffn_dim" if moe.expert_ffn_dim else "no expert_ffn_dim, and model.ffn_dim is"
        message = f"has {name} {width}, which is not a multiple of {EXPERT_MULTIPLE}"
        yield Problem(key, message, hint=f"set expert_ffn_dim to a multiple of {EXPERT_MULTIPLE}")
    if dim % EXPERT_MULTIPLE:
        message = f"is {dim}, which is not a multiple of {EXPERT_MULTIPLE}, but model.moe is set"
        yield Problem("model.dim", message, hint=f"choose a multiple of {EXPERT_MULTIPLE}")


def moe_shape(moe: MoeConfig, ffn_dim: int) -> MoeShape:
    """Return the shape of experts with the given config, in a model whose dense networks have `ffn_dim`."""
    values = moe.model_dump()
    return MoeShape(ffn_dim=values.pop("expert_ffn_dim") or ffn_dim, **values)
