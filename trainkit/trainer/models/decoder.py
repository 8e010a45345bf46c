"""A Llama-style decoder with RMSNorm, rotary position embeddings, grouped-query attention and SwiGLU.

Options of the decoder add the blocks of Gemma 2 (arXiv 2408.00118) and Gemma 3 (arXiv 2503.19786).
Dimensions in shapes: B samples, T positions, S key positions, D model width, H query heads, K key/value
heads, C head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, and_masks, flex_attention

from trainkit.config.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from trainkit.config.training import Activation
from trainkit.plan.model_shape import ModelShape, flops_per_token, num_params
from trainkit.trainer.models.experts import MoE, Router
from trainkit.trainer.models.linear import Linear
from trainkit.trainer.models.model import HeadLoss, Model, PositionSlice, Role, StageSpec
from trainkit.trainer.stateless_random import dropout, stable_key

INIT_STD = 0.02
MASK_BLOCK = 128
"""Number of positions per block in the mask created by `block_mask`."""
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


def rotate(x: Tensor, rope: Tensor, factor: float = 1.0) -> Tensor:
    """Rotate pairs (i, i + C/2) of the last dimension of x [B, T, heads, C] by the angles in `rope`.

    The result is multiplied by `factor` before it is rounded to the dtype of x.
    """
    rope = rope if factor == 1.0 else rope * factor
    cos, sin = rope[0, : x.shape[1], None, :], rope[1, : x.shape[1], None, :]
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute causal attention between queries [B, H, T, C] and keys and values [B, K, S, C].

    A `mask` [B, 1, T, S] is added to the scores; the mask itself must be causal.
    """
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=k.shape[1] != q.shape[1]
    )


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """Limit numbers smoothly to the range from -cap to cap (arXiv 2408.00118); None sets no limit."""
    return x if cap is None else cap * torch.tanh(x / cap)


def capped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, cap: float) -> Tensor:
    """Compute attention like `causal_attention`, with soft-capped float32 scores, which are all in memory."""
    batch, heads, length, head_dim = q.shape
    rows = q.reshape(batch, k.shape[1], -1, head_dim)  # query heads with the same keys follow each other
    scores = soft_cap((rows @ k.mT).float() / math.sqrt(head_dim), cap)
    scores = scores.view(batch, k.shape[1], -1, length, k.shape[2]) + mask[:, :, None]
    return (scores.softmax(-1).to(v.dtype).flatten(2, 3) @ v).view(batch, heads, length, head_dim)


def dense_mask(
    queries: Tensor,
    num_keys: int,
    dtype: torch.dtype,
    window: int | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Return the mask [B, 1, T, S] for causal attention at the positions `queries`, int64 [T].

    Tokens attend to at most `window` positions, and, given the document index of each token, int64 [B, T],
    only within their own document. Without documents, B is 1. The mask is 0 where a position may attend to
    another, and -inf elsewhere. PyTorch would convert a boolean mask to a floating-point mask in every layer,
    and keep each converted mask for the backward pass.
    """
    # Comparisons need one byte for each pair of positions, and a matrix of distances would need eight.
    keys, last = torch.arange(num_keys, device=queries.device), queries[:, None]
    allowed = keys <= last if window is None else (keys <= last) & (keys > last - window)
    allowed = allowed[None]
    if documents is not None:
        allowed = allowed & (documents[:, :, None] == documents[:, None, :])
    mask = torch.zeros(allowed.shape, dtype=dtype, device=queries.device)
    return mask.masked_fill_(~allowed, -torch.inf)[:, None]


def block_mask(positions: Tensor, window: int | None = None, documents: Tensor | None = None) -> BlockMask:
    """Return the mask of `dense_mask` for all `positions`, int64 [T], as a BlockMask for `block_attention`.

    The attention kernel computes the mask on the fly and skips blocks that contain only other documents, or
    only positions outside of the window. Document indices [B, T] increase with the position, so the first and
    last index in each block determine which blocks can be skipped.
    """
    length = len(positions)
    starts = positions[::MASK_BLOCK]
    ends = (starts + MASK_BLOCK - 1).clamp(max=length - 1)
    whole = (starts[:, None] > starts)[None]
    partly = (starts[:, None] >= starts)[None]
    if window is not None:
        whole = whole & (ends[:, None] - starts < window)
        partly = partly & (starts[:, None] - ends < window)
    if documents is not None:
        first, last = documents[:, starts], documents[:, ends]
        whole = whole & (last[:, :, None] == first[:, None, :])
        partly = partly & (first[:, :, None] <= last[:, None, :])
    partly = partly & ~whole
    # A tensor, because compiled blocks would be specialized on a Python integer.
    limit = positions.new_full((), length if window is None else window)

    def in_order(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    def in_window(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < limit)

    mask_mods = [in_order if window is None else in_window]
    if documents is not None:

        def in_document(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return documents[sample, query] == documents[sample, key]

        mask_mods.append(in_document)

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number of selected blocks in each row, and block indices with selected blocks first."""
        marks = blocks[:, None].byte()
        return marks.sum(-1).int(), marks.argsort(dim=-1, descending=True, stable=True).int()

    sizes, parts = (length, length), (*listed(partly), *listed(whole))
    mask_mod = and_masks(*mask_mods)
    return BlockMask.from_kv_blocks(*parts, BLOCK_SIZE=MASK_BLOCK, mask_mod=mask_mod, seq_lengths=sizes)


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None = None, cap: float | None = None
) -> Tensor:
    """Compute attention with a BlockMask and optionally soft-capped scores.

    Without a mask, the attention is causal. Unless compiled, the computation with a mask materializes all
    scores.
    """
    if mask is None:
        return causal_attention(q, k, v)

    def capped(score: Tensor, sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return soft_cap(score, cap)

    score_mod = None if cap is None else capped
    return flex_attention(q, k, v, score_mod, block_mask=mask, enable_gqa=k.shape[1] != q.shape[1])


def document_index(tokens: Tensor, eos_id: int) -> Tensor:
    """Return the document index of each token, int64 [B, T]; an `eos_id` belongs to the document it ends."""
    is_end = tokens == eos_id
    return is_end.cumsum(1) - is_end.long()


class ZeroCenteredNorm(nn.RMSNorm):
    """An RMSNorm that multiplies by 1 + weight, with float32 arithmetic, as in Gemma."""

    def forward(self, x: Tensor) -> Tensor:
        weight = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, weight, self.eps).to(x.dtype)


def make_norm(shape: ModelShape, size: int) -> nn.RMSNorm:
    """Return the kind of RMSNorm that a model of this shape uses, for inputs whose last size is `size`."""
    kind = ZeroCenteredNorm if shape.zero_centered_norms else nn.RMSNorm
    return kind(size, eps=shape.norm_eps)


class Attention(nn.Module):
    """Causal grouped-query self-attention."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.query_factor = math.sqrt(shape.head_dim / (shape.query_pre_attn_scalar or shape.head_dim))
        """Factor of queries, because attention divides the scores by the square root of `head_dim`."""
        self.wq = Linear(shape.dim, shape.query_dim, bias=shape.qkv_bias)
        self.wk = Linear(shape.dim, shape.kv_dim, bias=shape.qkv_bias)
        self.wv = Linear(shape.dim, shape.kv_dim, bias=shape.qkv_bias)
        self.wo = Linear(shape.query_dim, shape.dim, bias=False)
        self.q_norm = make_norm(shape, shape.head_dim) if shape.qk_norm else nn.Identity()
        self.k_norm = make_norm(shape, shape.head_dim) if shape.qk_norm else nn.Identity()
        cap = shape.attention_soft_cap
        self.attend: Callable[..., Tensor] = (
            causal_attention if cap is None else partial(capped_attention, cap=cap)
        )
        """Function that computes the attention; replaced, for example, for context parallelism."""

    def forward(self, x: Tensor, rope: Tensor, mask: Mask | None = None) -> Tensor:
        # With tensor parallelism, a rank has only some of the heads, so infer their number.
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (project(x).view(heads) for project in (self.wq, self.wk, self.wv))
        q, k = rotate(self.q_norm(q), rope, self.query_factor), rotate(self.k_norm(k), rope)
        masks = () if mask is None else (mask,)  # the functions for unmasked attention take no mask
        y = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), *masks)
        out: Tensor = self.wo(y.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """SwiGLU feed-forward network: a gated two-layer perceptron (arXiv 2002.05202), or its variant GeGLU."""

    def __init__(self, dim: int, ffn_dim: int, activation: Activation = "silu") -> None:
        super().__init__()
        self.gate = Linear(dim, ffn_dim, bias=False)
        self.up = Linear(dim, ffn_dim, bias=False)
        self.down = Linear(ffn_dim, dim, bias=False)
        self.activate = F.silu if activation == "silu" else partial(F.gelu, approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.activate(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """A pre-norm transformer layer: attention, then feed-forward, each added to its input.

    The feed-forward network is dense, or consists of experts.
    """

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        moe = None if layer < shape.dense_layers else shape.moe
        self.dropout = shape.dropout
        self.attention_norm = make_norm(shape, shape.dim)
        self.attention = Attention(shape)
        self.attention_post_norm = make_norm(shape, shape.dim) if shape.post_norms else None
        self.ffn_norm = make_norm(shape, shape.dim)
        self.ffn = FeedForward(shape.dim, shape.ffn_dim, shape.activation) if moe is None else None
        self.moe: MoE | None = None
        if moe is not None:
            shared = FeedForward(shape.dim, moe.shared_dim) if moe.num_shared else None
            self.moe = MoE(shape.dim, moe, shared)
        self.ffn_post_norm = make_norm(shape, shape.dim) if shape.post_norms else None

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
        if self.attention_post_norm is not None:
            y = self.attention_post_norm(y)
        x = x + dropout(y, probability, sample_keys, site_keys[0], positions)
        y = self.ffn_norm(x)
        if self.moe is not None:
            y, routing = self.moe(y)
        elif self.ffn is not None:
            y = self.ffn(y)
        if self.ffn_post_norm is not None:
            y = self.ffn_post_norm(y)
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
    float32) instead of the logits. The logits are not yet limited by `ModelShape.logit_soft_cap`.
    """

    rope: Tensor
    local_rope: Tensor | None
    queries: Tensor
    positions: Tensor
    site_keys: Tensor
    eos_id: int | None = None
    """If set, this token ends a document, and tokens attend only within their own document.

    If `eos_id` is set, the embedding and the whole sequence must be on the same rank.
    """
    masks_blocks: bool = False
    """True if the attention modules take a BlockMask from `block_mask`; set by `attend_in_blocks`."""

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
        "blocks.*.attention_post_norm": "norm",
        "blocks.*.ffn_norm": "norm",
        "blocks.*.ffn_post_norm": "norm",
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
        self.norm = make_norm(shape, shape.dim) if stage.has_head else None
        self.head = Head(shape.dim, shape.vocab_size, bias=False) if stage.has_head else None
        self.seq_len = seq_len
        self.register_buffer("rope", self.make_rope(), persistent=False)
        self.register_buffer("local_rope", self.make_local_rope(), persistent=False)
        self.register_buffer("queries", self.position_slice.attention.clone(), persistent=False)
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
        """Let the attention kernels compute the masks; worthwhile only if the blocks are compiled."""
        self.masks_blocks = True
        for attention in self.attentions:
            cast(Attention, attention).attend = partial(block_attention, cap=self.shape.attention_soft_cap)

    @property
    def has_masks(self) -> bool:
        """Return whether any block of this stage needs a mask to attend to whole samples."""
        return any(self.needs_mask(window, self.seq_len) for window in self.windows)

    @property
    def windows(self) -> list[int | None]:
        """Return the sliding window of each layer of the model; None without a window."""
        return [self.shape.window(layer) for layer in range(self.shape.num_layers)]

    def needs_mask(self, window: int | None, num_keys: int) -> bool:
        """Return whether attention to `num_keys` positions needs a mask in blocks with this window."""
        is_limited = window is not None and window < num_keys
        return is_limited or self.eos_id is not None or self.shape.attention_soft_cap is not None

    def set_positions(self, position_slice: PositionSlice) -> None:
        self.position_slice = position_slice
        self.rope, self.local_rope = self.make_rope(), self.make_local_rope()
        self.positions, self.queries = position_slice.stream.clone(), position_slice.attention.clone()

    def make_rope(self) -> Tensor:
        shape = self.shape
        positions = self.position_slice.attention
        return rope_table(positions, shape.head_dim, shape.rope_theta, shape.rope_scaling)

    def make_local_rope(self) -> Tensor | None:
        """Return the `rope_table` of blocks with a sliding window, or None if all blocks use the same one."""
        theta = self.shape.rope_local_theta
        return (
            None if theta is None else rope_table(self.position_slice.attention, self.shape.head_dim, theta)
        )

    def make_masks(self, x: Tensor, tokens: Tensor | None) -> dict[int | None, Mask | None]:
        """Map the sliding windows of this stage's blocks to masks; None stands for causal attention.

        The masks have the dtype of the residual stream x. If a token ends a document, `tokens` is required.
        """
        length = len(self.queries) if tokens is None else tokens.shape[1]
        # Context-parallel ranks attend to the positions of all ranks.
        num_keys = length * (self.seq_len // len(self.queries))
        documents = None
        if self.eos_id is not None and tokens is not None:
            documents = document_index(tokens, self.eos_id)
        masks: dict[int | None, Mask | None] = {}
        for window in {window for window, block in zip(self.windows, self.blocks, strict=True) if block}:
            limit = None if window is None or window >= num_keys else window
            if not self.needs_mask(window, num_keys):
                masks[window] = None
            elif self.masks_blocks:
                masks[window] = block_mask(self.queries[:length], limit, documents)
            else:
                masks[window] = dense_mask(self.queries[:length], num_keys, x.dtype, limit, documents)
        return masks

    def make_site_keys(self) -> Tensor:
        """Return int32 keys [1 + 2 x layers], one for each place in the model that applies dropout.

        The keys are tensor elements, because torch.compile would specialize each block on Python integers.
        """
        sites = range(1 + 2 * self.shape.num_layers)
        return torch.tensor([stable_key("dropout", site) for site in sites], dtype=torch.int32)

    def forward(self, x: Tensor, sample_keys: Tensor, loss: HeadLoss | None = None) -> Tensor:
        tokens: Tensor | None = None
        if self.embedding is not None:
            tokens, x = x, self.embedding(x)
            if self.shape.scale_embeddings:
                x = x * x.new_full((), math.sqrt(self.shape.dim))  # rounded like the embedding
            if self.training:
                x = dropout(x, self.shape.dropout, sample_keys, self.site_keys[0], self.positions)
        masks = self.make_masks(x, tokens)
        local_rope = self.rope if self.local_rope is None else self.local_rope
        blocks = zip(self.blocks, self.windows, self.site_keys[1:].view(-1, 2), strict=True)
        for layer, (block, window, site_keys) in enumerate(blocks):
            if block is not None:
                rope = self.rope if window is None else local_rope
                x, routing = block(x, rope, self.positions, sample_keys, site_keys, masks[window])
                if routing is not None and self.training:
                    x = self.on_routing(layer, routing, x)
        if self.head is not None and self.norm is not None:
            x = self.head(self.norm(x), loss)
        return x

    def rebuild_buffers(self) -> None:
        self.rope.copy_(self.make_rope())
        if self.local_rope is not None and (local_rope := self.make_local_rope()) is not None:
            self.local_rope.copy_(local_rope)
        self.queries.copy_(self.position_slice.attention)
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
            return 0.0 if self.shape.zero_centered_norms else None
        if name.endswith(".bias"):
            return 0.0
        if name.endswith(("wo.weight", "down.weight", "experts.down")):
            return INIT_STD / math.sqrt(2 * self.shape.num_layers)
        return INIT_STD
