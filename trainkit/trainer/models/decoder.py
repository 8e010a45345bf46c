"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shapes: B samples, T positions, D model width, H query heads, K key/value heads, C = D / H.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.plan.model_shape import ModelShape
from trainkit.trainer.stateless_random import dropout, stable_key

INIT_STD = 0.02


def rope_table(seq_len: int, head_dim: int, theta: float) -> Tensor:
    """Rotation angles' cosines and sines, float32 [2, T, C / 2] (RoFormer, arXiv 2104.09864)."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate pairs (i, i + C/2) of the last dimension of x [B, T, heads, C] by their position's angle."""
    cos, sin = rope[0, : x.shape[1], None, :], rope[1, : x.shape[1], None, :]
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention in which several query heads share one key/value head."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.num_kv_heads = shape.num_kv_heads
        self.head_dim = shape.dim // shape.num_heads
        kv_dim = self.num_kv_heads * self.head_dim
        self.wq = nn.Linear(shape.dim, shape.dim, bias=False)
        self.wk = nn.Linear(shape.dim, kv_dim, bias=False)
        self.wv = nn.Linear(shape.dim, kv_dim, bias=False)
        self.wo = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = rotate(self.wq(x).view(batch, length, self.num_heads, self.head_dim), rope)
        k = rotate(self.wk(x).view(batch, length, self.num_kv_heads, self.head_dim), rope)
        v = self.wv(x).view(batch, length, self.num_kv_heads, self.head_dim)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.num_kv_heads != self.num_heads,
        )
        out: Tensor = self.wo(y.transpose(1, 2).reshape(batch, length, -1))
        return out


class FeedForward(nn.Module):
    """SwiGLU: a gated two-layer perceptron (arXiv 2002.05202)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.up = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.down = nn.Linear(shape.ffn_dim, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One layer: attention, then feed-forward, each behind a norm and added to its input."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.attention_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.ffn = FeedForward(shape)

    def forward(self, x: Tensor, rope: Tensor, sample_keys: Tensor, site_keys: Tensor) -> Tensor:
        probability = self.dropout if self.training else 0.0
        y = self.attention(self.attention_norm(x), rope)
        x = x + dropout(y, probability, sample_keys, site_keys[0])
        y = self.ffn(self.ffn_norm(x))
        return x + dropout(y, probability, sample_keys, site_keys[1])


class Decoder(nn.Module):
    """Token ids to logits.

    `forward(tokens, sample_keys)`: tokens int64 [B, T], sample_keys int32 [B] -> logits [B, T, vocab].
    """

    rope: Tensor
    site_keys: Tensor

    def __init__(self, shape: ModelShape, seq_len: int) -> None:
        super().__init__()
        self.shape = shape
        self.seq_len = seq_len
        self.embedding = nn.Embedding(shape.vocab_size, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.head = nn.Linear(shape.dim, shape.vocab_size, bias=False)
        self.register_buffer("rope", self.make_rope(), persistent=False)
        self.register_buffer("site_keys", self.make_site_keys(), persistent=False)
        self.tie()

    def tie(self) -> None:
        """Make the head share the embedding's weight, where the shape says so."""
        if self.shape.tie_embeddings:
            self.head.weight = self.embedding.weight

    def make_rope(self) -> Tensor:
        return rope_table(self.seq_len, self.shape.dim // self.shape.num_heads, self.shape.rope_theta)

    def make_site_keys(self) -> Tensor:
        """One key for each dropout of the model, int32 [1 + 2 x layers].

        Tensors, not numbers in the blocks: a compiled block would be compiled anew for each of them.
        """
        sites = range(1 + 2 * self.shape.num_layers)
        return torch.tensor([stable_key("dropout", site) for site in sites], dtype=torch.int32)

    def forward(self, tokens: Tensor, sample_keys: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.training:
            x = dropout(x, self.shape.dropout, sample_keys, self.site_keys[0])
        for block, site_keys in zip(self.blocks, self.site_keys[1:].view(-1, 2), strict=True):
            x = block(x, self.rope, sample_keys, site_keys)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def restore(self) -> None:
        """Bring back what `to_empty` loses: the buffers' values, and that tied weights are one."""
        self.rope.copy_(self.make_rope())
        self.site_keys.copy_(self.make_site_keys())
        self.tie()

    def init_std(self, name: str) -> float | None:
        """Standard deviation of a parameter's initial values by its name; None: ones (norm weights).

        What writes into the residual stream starts smaller, as in GPT-2, so that depth does not blow it up.
        """
        if "norm" in name:
            return None
        if name.endswith(("wo.weight", "down.weight")):
            return INIT_STD / math.sqrt(2 * self.shape.num_layers)
        return INIT_STD
