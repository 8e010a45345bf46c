"""A Llama-style decoder with RMSNorm, rotary position embeddings, grouped-query attention and SwiGLU.

Dimensions in shapes: B samples, T positions, D model width, H query heads, K key/value heads, C head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trainkit.plan.model_shape import (
    LinearScaling,
    Llama3Scaling,
    ModelShape,
    RopeScaling,
    YarnScaling,
    flops_per_token,
    num_params,
)
from trainkit.trainer.models.experts import MoE, Router
from trainkit.trainer.models.linear import Linear
from trainkit.trainer.models.model import HeadLoss, Model, PositionSlice, Role, StageSpec
from trainkit.trainer.stateless_random import dropout, stable_key

INIT_STD = 0.02
MASK_BLOCK = 128
"""Number of positions per block in the mask created by `document_blocks`."""
Mask = Tensor | BlockMask


def rope_table(positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Return the cosines and sines of RoPE angles (arXiv 2104.09864) as float32 [2, T, C / 2].

    With YaRN, they are multiplied by the factor that sharpens attention.
    """
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    frequencies = theta ** (-pairs / head_dim)
    sharpness = 1.0
    if scaling is not None:
        kept = _kept(frequencies, theta, scaling)
        frequencies = frequencies * (kept + (1.0 - kept) / scaling.factor)
    if isinstance(scaling, YarnScaling):
        sharpness = scaling.attention_factor or 0.1 * math.log(max(scaling.factor, 1.0)) + 1.0
    angles = torch.outer(positions.float(), frequencies)
    return torch.stack((angles.cos(), angles.sin())) * sharpness


def _kept(frequencies: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Return for each RoPE frequency whether a longer context keeps it (1) or divides it by the factor (0).

    Values between 0 and 1 interpolate between both frequencies.
    """
    if isinstance(scaling, LinearScaling):
        return torch.zeros_like(frequencies)
    if isinstance(scaling, Llama3Scaling):
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        return ((turns - low) / (high - low)).clamp(0.0, 1.0)
    num_pairs = len(frequencies)

    def pair_with(turns: float) -> float:
        """Return the index, as a fraction, of the pair that turns this often in the original context."""
        wavelength = scaling.original_max_position_embeddings / (2 * math.pi * turns)
        return num_pairs * math.log(wavelength) / math.log(theta)

    first = max(math.floor(pair_with(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_with(scaling.beta_slow)), 2 * num_pairs - 1)
    pairs = torch.arange(num_pairs, dtype=torch.float32, device=frequencies.device)
    return 1.0 - ((pairs - first) / ((last - first) or 1e-3)).clamp(0.0, 1.0)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate pairs (i, i + C/2) of the last dimension of x [B, T, heads, C] by the angles in `rope`."""
    cos, sin = rope[0, : x.shape[1], None, :], rope[1, : x.shape[1], None, :]
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute causal attention between queries [B, H, T, C] and keys and values [B, K, T, C].

    A `mask` [B, 1, T, T] is added to the scores; the mask itself must be causal.
    """
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=k.shape[1] != q.shape[1]
    )


def document_mask(tokens: Tensor, eos_id: int, dtype: torch.dtype) -> Tensor:
    """Return the mask [B, 1, T, T] for causal attention within each document of tokens [B, T].

    The token `eos_id` ends a document. The mask is 0 where a position may attend to another, and -inf
    elsewhere. PyTorch would convert a boolean mask to a floating-point mask in every layer, and keep each
    converted mask for the backward pass.
    """
    documents = _documents(tokens, eos_id)
    allowed = (documents[:, :, None] == documents[:, None, :]).tril()
    mask = torch.zeros(allowed.shape, dtype=dtype, device=tokens.device)
    return mask.masked_fill_(~allowed, -torch.inf)[:, None]


def document_blocks(tokens: Tensor, eos_id: int) -> BlockMask:
    """Return the mask of `document_mask` as a BlockMask for `block_attention`.

    The attention kernel computes the mask on the fly and skips blocks that contain only other documents.
    Document indices increase with the position, so the first and last index in each block determine which
    blocks can be skipped.
    """
    documents, length = _documents(tokens, eos_id), tokens.shape[1]
    starts = torch.arange(0, length, MASK_BLOCK, device=tokens.device)
    first, last = documents[:, starts], documents[:, (starts + MASK_BLOCK - 1).clamp(max=length - 1)]
    whole = (last[:, :, None] == first[:, None, :]).tril(-1)
    partly = (first[:, :, None] <= last[:, None, :]).tril() & ~whole

    def allowed(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[sample, query] == documents[sample, key])

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number of selected blocks in each row, and block indices with selected blocks first."""
        marks = blocks[:, None].byte()
        return marks.sum(-1).int(), marks.argsort(dim=-1, descending=True, stable=True).int()

    sizes, parts = (length, length), (*listed(partly), *listed(whole))
    return BlockMask.from_kv_blocks(*parts, BLOCK_SIZE=MASK_BLOCK, mask_mod=allowed, seq_lengths=sizes)


def block_attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """Compute attention with a BlockMask; unless compiled, the computation materializes all scores."""
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=k.shape[1] != q.shape[1])


def _documents(tokens: Tensor, eos_id: int) -> Tensor:
    """Return the document index of each token, int64 [B, T]; an `eos_id` belongs to the document it ends."""
    is_end = tokens == eos_id
    return is_end.cumsum(1) - is_end.long()


class Attention(nn.Module):
    """Causal grouped-query self-attention."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.wq = Linear(shape.dim, shape.query_dim, bias=shape.qkv_bias)
        self.wk = Linear(shape.dim, shape.kv_dim, bias=shape.qkv_bias)
        self.wv = Linear(shape.dim, shape.kv_dim, bias=shape.qkv_bias)
        self.wo = Linear(shape.query_dim, shape.dim, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps) if shape.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps) if shape.qk_norm else nn.Identity()
        self.attend: Callable[..., Tensor] = causal_attention
        """Function that computes the attention; replaced, for example, for context parallelism."""

    def forward(self, x: Tensor, rope: Tensor, mask: Mask | None = None) -> Tensor:
        # With tensor parallelism, a rank has only some of the heads, so infer their number.
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (project(x).view(heads) for project in (self.wq, self.wk, self.wv))
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        masks = () if mask is None else (mask,)  # attention for context parallelism takes no mask
        y = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), *masks)
        out: Tensor = self.wo(y.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """SwiGLU feed-forward network: a gated two-layer perceptron (arXiv 2002.05202)."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate = Linear(dim, ffn_dim, bias=False)
        self.up = Linear(dim, ffn_dim, bias=False)
        self.down = Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """A pre-norm transformer layer: attention, then feed-forward, each added to its input.

    The feed-forward network is dense, or consists of experts.
    """

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        moe = None if layer < shape.dense_layers else shape.moe
        self.dropout = shape.dropout
        self.attention_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.ffn = FeedForward(shape.dim, shape.ffn_dim) if moe is None else None
        self.moe: MoE | None = None
        if moe is not None:
            shared = FeedForward(shape.dim, moe.shared_dim) if moe.num_shared else None
            self.moe = MoE(shape.dim, moe, shared)

    def forward(
        self,
        x: Tensor,
        rope: Tensor,
        positions: Tensor,
        sample_keys: Tensor,
        site_keys: Tensor,
        mask: Mask | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream, and how the tokens were routed (see `MoE.forward`), if to experts."""
        probability, routing = self.dropout if self.training else 0.0, None
        y = self.attention(self.attention_norm(x), rope, mask)
        x = x + dropout(y, probability, sample_keys, site_keys[0], positions)
        y = self.ffn_norm(x)
        if self.moe is not None:
            y, routing = self.moe(y)
        elif self.ffn is not None:
            y = self.ffn(y)
        return x + dropout(y, probability, sample_keys, site_keys[1], positions), routing


class Head(Linear):
    """Projects hidden states to logits, or computes the loss directly without materializing all logits."""

    def forward(self, x: Tensor, loss: HeadLoss | None = None) -> Tensor:
        return super().forward(x) if loss is None else loss(x, self.weight)


class Decoder(Model):
    """A decoder that maps token ids to logits, or one pipeline stage of such a decoder.

    `forward(tokens, sample_keys)` takes tokens, int64 [B, T], and sample_keys, int32 [B], and returns logits
    [B, T, vocab]. A stage without the embedding takes the residual stream [B, T, D] instead of tokens, and a
    stage without the head returns the residual stream. If `loss` is given, the head returns the loss (0-dim,
    float32) instead of the logits.
    """

    rope: Tensor
    positions: Tensor
    site_keys: Tensor
    eos_id: int | None = None
    """If set, this token ends a document, and tokens attend only within their own document.

    If `eos_id` is set, the embedding and the whole sequence must be on the same rank.
    """
    masks_blocks: bool = False
    """True if the attention modules take a BlockMask from `document_blocks`; set by `attend_in_blocks`."""

    TENSOR_PLAN: ClassVar[dict[str, Role]] = {
        "embedding": "embedding",
        "blocks.*.attention_norm": "norm",
        "blocks.*.attention": "whole_input",
        "blocks.*.attention.wq": "column",
        "blocks.*.attention.wk": "column",
        "blocks.*.attention.wv": "column",
        "blocks.*.attention.q_norm": "heads",
        "blocks.*.attention.k_norm": "heads",
        "blocks.*.attention.wo": "row",
        "blocks.*.ffn_norm": "norm",
        "blocks.*.ffn": "whole_input",
        "blocks.*.ffn.gate": "column",
        "blocks.*.ffn.up": "column",
        "blocks.*.ffn.down": "row",
        "blocks.*.moe.router": "stream",
        "blocks.*.moe.experts": "experts",
        "blocks.*.moe.shared": "whole_input",
        "blocks.*.moe.shared.gate": "column",
        "blocks.*.moe.shared.up": "column",
        "blocks.*.moe.shared.down": "row",
        "norm": "norm",
        "head": "head",
    }
    TIED: ClassVar[dict[str, str]] = {"head.weight": "embedding.weight"}
    COMPUTES_LOSS: ClassVar[bool] = True
    on_routing: Callable[[int, Tensor, Tensor], Tensor] = staticmethod(lambda layer, routing, x: x)
    """Called in training with a layer's number, how its tokens were routed (see `MoE.forward`), and the
    residual stream; returns the residual stream, to which the auxiliary loss may be attached."""

    def __init__(self, shape: ModelShape, seq_len: int, stage: StageSpec | None = None) -> None:
        super().__init__(shape, seq_len, stage)
        stage = stage or StageSpec.whole(shape.num_layers)
        self.position_slice = PositionSlice.all(seq_len)
        self.embedding = nn.Embedding(shape.vocab_size, shape.dim) if stage.has_embedding else None
        # Use None for layers of other stages, so that parameter names do not depend on the stage.
        self.blocks = nn.ModuleList()
        for layer in range(shape.num_layers):
            block = Block(shape, layer) if layer in stage.layers else None
            self.blocks.add_module(str(layer), block)
        self.norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps) if stage.has_head else None
        self.head = Head(shape.dim, shape.vocab_size, bias=False) if stage.has_head else None
        self.register_buffer("rope", self.make_rope(), persistent=False)
        self.register_buffer("positions", self.position_slice.stream.clone(), persistent=False)
        self.register_buffer("site_keys", self.make_site_keys(), persistent=False)
        self.tie()

    num_params = staticmethod(num_params)
    flops_per_token = staticmethod(flops_per_token)

    @property
    def layers(self) -> list[nn.Module]:
        return [block for block in self.blocks if block is not None]

    @property
    def ends(self) -> tuple[list[nn.Module], list[nn.Module]]:
        first, last = (self.embedding,), (self.norm, self.head)
        return [module for module in first if module], [module for module in last if module]

    @property
    def attentions(self) -> list[nn.Module]:
        return [cast(Block, block).attention for block in self.layers]

    @property
    def routers(self) -> dict[int, Router]:
        """Map the numbers of this stage's layers with experts to their routers."""
        blocks = enumerate(cast(Iterable[Block | None], self.blocks))
        return {layer: block.moe.router for layer, block in blocks if block is not None and block.moe}

    @property
    def stream_shape(self) -> tuple[int, int]:
        return len(self.positions), self.shape.dim

    def attend_in_blocks(self) -> None:
        """Let the attention kernels compute the document mask; worthwhile only if the blocks are compiled."""
        self.masks_blocks = True
        for attention in self.attentions:
            cast(Attention, attention).attend = block_attention

    def set_positions(self, position_slice: PositionSlice) -> None:
        self.position_slice = position_slice
        self.rope, self.positions = self.make_rope(), position_slice.stream.clone()

    def make_rope(self) -> Tensor:
        shape = self.shape
        positions = self.position_slice.attention
        return rope_table(positions, shape.head_dim, shape.rope_theta, shape.rope_scaling)

    def make_site_keys(self) -> Tensor:
        """Return int32 keys [1 + 2 x layers], one for each place in the model that applies dropout.

        The keys are tensor elements, because torch.compile would specialize each block on Python integers.
        """
        sites = range(1 + 2 * self.shape.num_layers)
        return torch.tensor([stable_key("dropout", site) for site in sites], dtype=torch.int32)

    def forward(self, x: Tensor, sample_keys: Tensor, loss: HeadLoss | None = None) -> Tensor:
        mask: Mask | None = None
        if self.embedding is not None:
            tokens, x = x, self.embedding(x)
            if self.eos_id is not None and self.masks_blocks:
                mask = document_blocks(tokens, self.eos_id)
            elif self.eos_id is not None:
                mask = document_mask(tokens, self.eos_id, x.dtype)
            if self.training:
                x = dropout(x, self.shape.dropout, sample_keys, self.site_keys[0], self.positions)
        blocks = zip(self.blocks, self.site_keys[1:].view(-1, 2), strict=True)
        for layer, (block, site_keys) in enumerate(blocks):
            if block is not None:
                x, routing = block(x, self.rope, self.positions, sample_keys, site_keys, mask)
                if routing is not None and self.training:
                    x = self.on_routing(layer, routing, x)
        if self.head is not None and self.norm is not None:
            x = self.head(self.norm(x), loss)
        return x

    def rebuild_buffers(self) -> None:
        self.rope.copy_(self.make_rope())
        self.positions.copy_(self.position_slice.stream)
        self.site_keys.copy_(self.make_site_keys())
        for router in self.routers.values():
            router.bias.zero_()
        self.tie()

    def init_std(self, name: str) -> float | None:
        """Return the standard deviation of a parameter's initial values, or None for norm weights (ones).

        In deeper models, the initial values of projections into the residual stream are smaller, as in GPT-2.
        """
        if "norm" in name:
            return None
        if name.endswith(".bias"):
            return 0.0
        if name.endswith(("wo.weight", "down.weight", "experts.down")):
            return INIT_STD / math.sqrt(2 * self.shape.num_layers)
        return INIT_STD
