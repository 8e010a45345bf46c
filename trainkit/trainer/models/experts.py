"""Define a feed-forward layer of experts: a router chooses a few of many small networks for each token.

Dimensions in shapes: N tokens, D model width, E experts, F width of an expert, K experts per token, R = N x K
rows (one for each token and chosen expert).

All operations between tokens and rows are gathers and sums in a fixed order, forward and backward, so that
training on a GPU can be repeated bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.config.training import Score
from trainkit.plan.feed_forward import MoeShape
from trainkit.trainer.models.model import local_tensor
from trainkit.trainer.torch_private import grouped_mm

Compute = Callable[[Tensor, Tensor], Tensor]
"""Applies experts to rows [R, D], sorted by expert; the int64 tensor [E] is the number of rows per expert."""


class Router(nn.Module):
    """Chooses K experts for each token, with float32 arithmetic whatever the dtype of the weight is."""

    bias: Tensor

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        score: Score = "softmax",
        norm_topk: bool = True,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.top_k, self.score, self.norm_topk, self.scale = top_k, score, norm_topk, scale
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        self.register_buffer("bias", torch.zeros(num_experts, dtype=torch.float32))
        """Added to the scores [E] to choose experts, but not to weight their outputs; balances the load."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the chosen experts, int64 [N, K], their weights, float32 [N, K], and all scores [N, E].

        The scores are float32 and sum to 1 for each token, also with `score` ``sigmoid``.
        """
        logits = F.linear(x.float(), self.weight.float())
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        chosen = (scores.detach() + self.bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.norm_topk:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if self.score == "sigmoid":
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * self.scale, scores


class Experts(nn.Module):
    """Applies to each token the SwiGLU networks of its chosen experts, and returns their weighted sum."""

    def __init__(self, dim: int, num_experts: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(num_experts, ffn_dim, dim))
        self.up = nn.Parameter(torch.empty(num_experts, ffn_dim, dim))
        self.down = nn.Parameter(torch.empty(num_experts, dim, ffn_dim))
        self.dispatch: Callable[[Tensor, Tensor, Compute], Tensor] = stay
        """Called with rows [R, D] sorted by expert, their number per expert, int64 [E], and `compute`.

        Returns the outputs of the rows [R, D] in the same order. Expert parallelism replaces `dispatch` to
        apply `compute` on the ranks that have the experts.
        """

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the outputs [N, D] for tokens [N, D], chosen experts, int64 [N, K], and weights [N, K]."""
        order = chosen.flatten().argsort(stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        rows: Tensor = _Spread.apply(x, order, place, chosen.shape[1])  # type: ignore[no-untyped-call]
        rows = self.dispatch(rows, count_rows(chosen, self.num_experts), self.compute)
        rows = permute(rows, place, order)
        # The product is float32, because the weights are.
        return (rows.view(*chosen.shape, -1) * weights[..., None]).sum(1).to(x.dtype)

    @property
    def num_experts(self) -> int:
        """Return the number of experts E, on all ranks together."""
        return len(self.gate)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Apply the experts of this rank to rows [R, D], sorted by expert, with `counts` rows for each."""
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up, down = (local_tensor(param).transpose(1, 2) for param in (self.gate, self.up, self.down))
        hidden = F.silu(grouped_mm(rows, gate, ends)) * grouped_mm(rows, up, ends)
        return grouped_mm(hidden, down, ends)


class MoE(nn.Module):
    """A feed-forward layer of experts: a router, its experts, and possibly shared experts."""

    def __init__(self, dim: int, shape: MoeShape, shared: nn.Module | None) -> None:
        """`shared` processes every token, and its output is added to the output of the experts."""
        super().__init__()
        routing = shape.top_k, shape.score, shape.norm_topk, shape.scale
        self.router = Router(dim, shape.num_experts, *routing)
        self.experts = Experts(dim, shape.num_experts, shape.ffn_dim)
        self.shared = shared
        self.has_loss = shape.aux_coef > 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output [B, T, D], and how the tokens were routed, float32 [E + 2].

        The second result contains the number of rows of each expert, the entropy of the scores, summed over
        the tokens, and the auxiliary loss of `balance_loss`. Only the auxiliary loss may have a gradient.
        """
        tokens = x.flatten(0, -2)
        chosen, weights, scores = self.router(tokens)
        y = self.experts(tokens, chosen, weights).view(x.shape)
        if self.shared is not None:
            y = y + self.shared(x)
        counts = count_rows(chosen, scores.shape[1]).float()
        loss = balance_loss(counts, scores) if self.has_loss else counts.new_zeros(())
        entropy = torch.special.entr(scores.detach()).sum()
        return y, torch.cat((counts, entropy.view(1), loss.view(1)))


def balance_loss(counts: Tensor, scores: Tensor) -> Tensor:
    """Return the auxiliary loss of Switch Transformers (arXiv 2101.03961); 1.0 if the load is balanced.

    The loss is E times the sum, over the experts, of an expert's share of the rows `counts` [E] and its mean
    score in `scores` [N, E].
    """
    return len(counts) * (counts / counts.sum() * scores.mean(0)).sum()


def stay(rows: Tensor, counts: Tensor, compute: Compute) -> Tensor:
    """Apply the experts on this rank; the default of `Experts.dispatch`."""
    return compute(rows, counts)


def count_rows(chosen: Tensor, num_experts: int) -> Tensor:
    """Return how often each expert is in `chosen` [N, K], as int64 [E], without waiting for the device."""
    experts = torch.arange(num_experts, device=chosen.device)
    ends = torch.searchsorted(chosen.flatten().sort().values, experts, right=True)
    return ends.diff(prepend=ends.new_zeros(1))


class _Spread(torch.autograd.Function):
    """Copies tokens [N, D] to rows [N x K, D] sorted by expert; the gradient is a sum over K rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.top_k = top_k
        return x[order // top_k]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        # Like a product of matrices, the sum of a 16-bit dtype is accumulated in float32.
        return grad[place].view(-1, ctx.top_k, grad.shape[-1]).sum(1), None, None, None


def permute(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Return rows in another order; the gradient applies the `inverse` order, without a scatter."""
    out: Tensor = _Permute.apply(rows, order, inverse)  # type: ignore[no-untyped-call]
    return out


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None
