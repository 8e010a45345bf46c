"""Resolves a model's dimensions from its preset and config, and counts its parameters and FLOPs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainkit.config.hf_families import MODEL_KEYS, OPTIONS
from trainkit.config.rope import ROPE_SCALINGS, RopeScaling, scaling_keys, scaling_values
from trainkit.config.training import Activation, ModelConfig
from trainkit.errors import ConfigError, Problem
from trainkit.formats import JsonObject
from trainkit.plan.feed_forward import (
    Dense,
    FeedForwardKind,
    MoeShape,
    RoutedExperts,
    expert_problems,
    moe_shape,
)

VOCAB_MULTIPLE = 64
"""Vocabulary sizes are rounded up to a multiple of this number, because matrix kernels are then faster."""


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a Llama-style decoder."""

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    norm_eps: float
    rope_theta: float
    tie_embeddings: bool
    dropout: float
    qkv_bias: bool = False
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    moe: MoeShape | None = None
    """The experts of all blocks but the first ones; None if every block has a dense feed-forward network."""
    sliding_window: int | None = None
    full_attention_every: int | None = None
    rope_local_theta: float | None = None
    query_pre_attn_scalar: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    activation: Activation = "silu"
    post_norms: bool = False
    zero_centered_norms: bool = False
    scale_embeddings: bool = False

    def window(self, layer: int) -> int | None:
        """Return the number of positions to which a token attends in one block; None without a limit."""
        every = self.full_attention_every
        return None if every is not None and (layer + 1) % every == 0 else self.sliding_window

    def attended(self, seq_len: int) -> float:
        """Return twice the mean number of positions to which a token attends, averaged over the blocks.

        Without a sliding window, the result is `seq_len`.
        """
        windows = [min(self.window(layer) or seq_len, seq_len) for layer in range(self.num_layers)]
        return sum(window * (2 - window / seq_len) for window in windows) / self.num_layers

    @property
    def dense_layers(self) -> int:
        """Return the number of blocks, from the first one, that have a dense feed-forward network."""
        return self.num_layers if self.moe is None else self.moe.first_dense

    def feed_forward(self, layer: int) -> FeedForwardKind:
        """Return the kind of the feed-forward network of one block."""
        if self.moe is None or layer < self.moe.first_dense:
            return Dense(self.ffn_dim)
        return RoutedExperts(self.moe)

    @property
    def norms_per_block(self) -> int:
        """Return the number of RMSNorms in a block that process the residual stream or a change of it."""
        return 4 if self.post_norms else 2

    @property
    def query_dim(self) -> int:
        """Return the total size of all query heads, which can differ from `dim`."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Return the total size of all key heads, which equals the total size of all value heads."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class Preset:
    """The dimensions of a predefined model."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    vocab_size: int | None = None
    """Vocabulary size; None for small-vocabulary models, which use the tokenizer's vocabulary size."""
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0


# 60m, 125m, 350m: the Llama configurations of GaLore (arXiv 2403.03507). 8b: Llama 3 8B.
# 1b, 3b: Llama 3.2, which also needs `model.tie_embeddings`.
# 7b, 13b, 70b: Llama 2 (arXiv 2307.09288).
PRESETS: dict[str, Preset] = {
    "nano": Preset(64, 2, 4, 2, 192),
    "tiny": Preset(128, 4, 4, 2, 384),
    "mini": Preset(256, 8, 8, 4, 768),
    "60m": Preset(512, 8, 8, 8, 1376, 32_000),
    "125m": Preset(768, 12, 12, 12, 2048, 32_000),
    "350m": Preset(1024, 24, 16, 16, 2736, 32_000),
    "1b": Preset(2048, 16, 32, 8, 8192, 128_256, rope_theta=500_000.0),
    "3b": Preset(3072, 28, 24, 8, 8192, 128_256, rope_theta=500_000.0),
    "7b": Preset(4096, 32, 32, 32, 11008, 32_000),
    "8b": Preset(4096, 32, 32, 8, 14336, 128_256, rope_theta=500_000.0),
    "13b": Preset(5120, 40, 40, 40, 13824, 32_000),
    "70b": Preset(8192, 80, 64, 8, 28672, 32_000),
}


SIZES = ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "norm_eps", "rope_theta")


def vocabulary_note(model: ModelConfig, tokenizer_vocab_size: int) -> str | None:
    """Return a note if the preset's and the tokenizer's vocabulary sizes differ, else None."""
    preset = PRESETS[model.preset].vocab_size
    padded = _padded(tokenizer_vocab_size)
    if model.vocab_size is not None or preset is None or preset == padded:
        return None
    if preset > padded:
        why = f"the size of preset {model.preset}; the tokenizer has {tokenizer_vocab_size:,} tokens"
        return f"{preset:,} entries, {why} (model.vocab_size: {padded} would suffice)"
    return f"{padded:,} entries for the tokenizer, more than the {preset:,} of preset {model.preset}"


def _padded(tokenizer_vocab_size: int) -> int:
    return -(-tokenizer_vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def resolve_model_shape(model: ModelConfig, tokenizer_vocab_size: int) -> ModelShape:
    """Return a model's dimensions: the dimensions of its preset, with the overrides in its config applied.

    Raises ConfigError that lists all incompatible sizes.
    """
    preset = PRESETS[model.preset]
    scaling, problems = _rope_scaling(model)
    sizes = {name: getattr(model, name) or getattr(preset, name) for name in SIZES}
    options = {name: getattr(model, name) for name in OPTIONS}
    shape = ModelShape(
        vocab_size=model.vocab_size or max(_padded(tokenizer_vocab_size), preset.vocab_size or 0),
        **sizes,
        head_dim=model.head_dim or sizes["dim"] // sizes["num_heads"],
        tie_embeddings=model.tie_embeddings,
        dropout=model.dropout,
        rope_scaling=scaling,
        **{**options, "moe": None if model.moe is None else moe_shape(model.moe, sizes["ffn_dim"])},
    )
    problems += _option_problems(model)
    if model.moe is not None:
        problems += expert_problems(model.moe, shape.num_layers, shape.dim, shape.ffn_dim)
    is_head_dim_set = model.head_dim is not None
    problems = _shape_problems(shape, tokenizer_vocab_size, is_head_dim_set=is_head_dim_set) + problems
    if problems:
        raise ConfigError(problems)
    return shape


def model_values(shape: ModelShape) -> JsonObject:
    """Return the values of `MODEL_KEYS` from which `resolve_model_shape` computes a shape."""
    moe = None if shape.moe is None else {**vars(shape.moe), "expert_ffn_dim": shape.moe.ffn_dim}
    found = {key: getattr(shape, key) for key in MODEL_KEYS}
    return {**found, "rope_scaling": scaling_values(shape.rope_scaling), "moe": moe}


def _rope_scaling(model: ModelConfig) -> tuple[RopeScaling | None, list[Problem]]:
    """Return the scaling of the rotary position embedding, or the problems with `model.rope_scaling`."""
    if not model.rope_scaling:
        return None, []
    given: dict[str, Any] = {str(key): value for key, value in model.rope_scaling.items()}
    kind = given.pop("type", "llama3")
    wrong = None if kind in ROPE_SCALINGS else f"has the type {kind}"
    known = {} if wrong else scaling_keys(kind)
    missing = [name for name, is_required in known.items() if is_required and name not in given]
    unknown = [name for name in given if name not in known]
    texts = [name for name, value in given.items() if isinstance(value, str)]
    if wrong:
        hint = f"use one of {', '.join(ROPE_SCALINGS)}"
    elif missing:
        wrong, hint = f"has no {missing[0]}, which the type {kind} needs", "specify it"
    elif unknown:
        wrong, hint = (
            f"has {unknown[0]}, which the type {kind} does not use",
            "remove it, or set another type",
        )
    elif texts:
        wrong, hint = f"has {given[texts[0]]} as {texts[0]}", "specify a number"
    else:
        return ROPE_SCALINGS[kind](**given), []
    return None, [Problem("model.rope_scaling", wrong, hint=hint)]


def _shape_problems(shape: ModelShape, tokenizer_vocab_size: int, *, is_head_dim_set: bool) -> list[Problem]:
    problems = []
    if shape.vocab_size < tokenizer_vocab_size:
        message = f"is {shape.vocab_size}, but the tokenizer has {tokenizer_vocab_size} tokens"
        hint = "use null to select a size that is large enough"
        problems.append(Problem("model.vocab_size", message, hint=hint))
    if is_head_dim_set:
        if shape.head_dim % 2:
            hint = "choose an even size, as the rotary position embedding requires"
            problems.append(Problem("model.head_dim", f"is {shape.head_dim}, which is odd", hint=hint))
    elif shape.dim % shape.num_heads:
        message = f"is {shape.num_heads}, which does not divide model.dim {shape.dim}"
        hint = "choose a divisor of model.dim, or set model.head_dim"
        problems.append(Problem("model.num_heads", message, hint=hint))
    elif shape.head_dim % 2:
        message = f"is {shape.num_heads}, which results in the odd head size {shape.head_dim}"
        hint = "choose an even dim / num_heads, as the rotary position embedding requires"
        problems.append(Problem("model.num_heads", message, hint=hint))
    if shape.num_heads % shape.num_kv_heads:
        message = f"is {shape.num_kv_heads}, which does not divide model.num_heads {shape.num_heads}"
        hint = "choose a divisor: every key/value head must serve the same number of query heads"
        problems.append(Problem("model.num_kv_heads", message, hint=hint))
    return problems


def _option_problems(model: ModelConfig) -> Iterator[Problem]:
    """Yield every problem with options that other options make ineffective or impossible."""
    for key in ("full_attention_every", "rope_local_theta"):
        value = getattr(model, key)
        if value is not None and model.sliding_window is None:
            message = f"is {value:g}, but model.sliding_window is null"
            yield Problem(f"model.{key}", message, hint=f"set model.sliding_window, or remove model.{key}")
    if model.full_attention_every == 1 and model.sliding_window is not None:
        message = f"is 1, but model.sliding_window is {model.sliding_window}, which no block would have"
        yield Problem("model.full_attention_every", message, hint="set model.sliding_window to null")
    if model.activation != "silu" and model.moe is not None:
        message = f"is {model.activation}, but model.moe is set, and experts support only silu"
        yield Problem("model.activation", message, hint="remove model.activation")


def num_params(shape: ModelShape) -> int:
    """Return the total number of parameters, including embeddings; tied embeddings are counted once."""
    embeddings = shape.vocab_size * shape.dim * (1 if shape.tie_embeddings else 2)
    return embeddings + num_params_between_embeddings(shape)


def num_active_params(shape: ModelShape) -> int:
    """Return the number of parameters that compute one token: all but those of experts not chosen."""
    kinds = [shape.feed_forward(layer) for layer in range(shape.num_layers)]
    unused = sum(kind.params(shape.dim) - kind.active_params(shape.dim) for kind in kinds)
    return num_params(shape) - unused


def num_params_between_embeddings(shape: ModelShape) -> int:
    """Return the number of parameters in the decoder blocks and the final norm."""
    return sum(num_params_of_block(shape, layer) for layer in range(shape.num_layers)) + shape.dim


def num_params_of_block(shape: ModelShape, layer: int) -> int:
    """Return the number of parameters of one decoder block."""
    attention = 2 * shape.dim * (shape.query_dim + shape.kv_dim)
    norms = shape.norms_per_block * shape.dim + (2 * shape.head_dim if shape.qk_norm else 0)
    biases = (shape.query_dim + 2 * shape.kv_dim) if shape.qkv_bias else 0
    return attention + biases + shape.feed_forward(layer).params(shape.dim) + norms


def flops_per_token(shape: ModelShape, seq_len: int, *, causal: bool = False) -> float:
    """Return the training FLOPs per token, without recomputation.

    The formula is ``6 N + 12 L H Q T`` from PaLM, appendix B (arXiv 2204.02311). N includes the blocks and
    the output projection (even if tied), but not the embedding, which is only a lookup, nor the experts that
    do not process the token. With sliding windows, T is `ModelShape.attended`. With `causal`, the term of
    attention is halved, because a causal mask allows half of the scores.
    """
    embeddings = shape.vocab_size * shape.dim * (1 if shape.tie_embeddings else 2)
    matmul_params = num_active_params(shape) - embeddings + shape.vocab_size * shape.dim
    attention = (6 if causal else 12) * shape.num_layers * shape.query_dim * shape.attended(seq_len)
    return float(6 * matmul_params + attention)
