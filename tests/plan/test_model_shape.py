"""Compares presets with published sizes, and tests shapes that cannot be built."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
import yaml

from tests.support.said import said
from trainkit.config.running import ParallelConfig
from trainkit.config.training import ModelConfig, Preset
from trainkit.errors import ConfigError
from trainkit.plan.model_shape import PRESETS, ModelShape, flops_per_token, num_params, resolve_model_shape
from trainkit.plan.model_shape import num_params_between_embeddings as num_params_of_blocks
from trainkit.plan.step_work import attends_in_blocks
from trainkit.trainer.models.decoder import Decoder


@pytest.mark.parametrize(
    ("preset", "vocab_size", "tied", "params"),
    [
        ("70b", 32_000, False, 68_976_648_192),  # Llama 2 70B
        ("13b", 32_000, False, 13_015_864_320),  # Llama 2 13B
        ("7b", 32_000, False, 6_738_415_616),  # Llama 2 7B
        ("8b", 128_256, False, 8_030_261_248),  # Llama 3 8B
        ("3b", 128_256, True, 3_212_749_824),  # Llama 3.2 3B
        ("1b", 128_256, True, 1_235_814_400),  # Llama 3.2 1B
        ("60m", 32_000, False, 58_073_600),  # GaLore: 58M
        ("125m", 32_000, False, 134_105_856),  # GaLore: 134M
        ("350m", 32_000, False, 367_969_280),  # GaLore: 368M
    ],
)
def test_published_sizes(preset, vocab_size, tied, params):
    model = ModelConfig(preset=preset, vocab_size=vocab_size, tie_embeddings=tied)
    assert num_params(resolve_model_shape(model, vocab_size)) == params


def test_the_size_of_qwen_3():
    """Qwen3 0.6B has 0.44B parameters in its blocks, which contain 16 heads of 128 at a width of 1024."""
    sizes = {"dim": 1024, "num_layers": 28, "num_heads": 16, "num_kv_heads": 8, "ffn_dim": 3072}
    model = ModelConfig(**sizes, vocab_size=151_936, head_dim=128, qk_norm=True, tie_embeddings=True)
    shape = resolve_model_shape(model, 151_669)
    assert num_params(shape) == 596_049_920
    with torch.device("meta"):
        built = Decoder(shape, 8)
    assert sum(param.numel() for param in built.parameters()) == num_params(shape)


GEMMA = {"tie_embeddings": True, "activation": "gelu_tanh", "post_norms": True, "head_dim": 256}
GEMMAS = {
    2_614_341_888: {
        **{"dim": 2304, "num_heads": 8, "num_kv_heads": 4, "ffn_dim": 9216, "vocab_size": 256_000},
        **{"sliding_window": 4096, "full_attention_every": 2},
    },
    999_885_952: {
        **{"dim": 1152, "num_heads": 4, "num_kv_heads": 1, "ffn_dim": 6912, "vocab_size": 262_144},
        **{"sliding_window": 512, "full_attention_every": 6, "qk_norm": True},
    },
}


@pytest.mark.parametrize("params", GEMMAS)
def test_the_sizes_of_gemma(params):
    """Gemma 2 2B and Gemma 3 1B have 26 blocks, with four norms each."""
    shape = resolve_model_shape(ModelConfig(num_layers=26, **GEMMA, **GEMMAS[params]), 1)
    with torch.device("meta"):
        built = Decoder(shape, 8)
    assert num_params(shape) == sum(param.numel() for param in built.parameters()) == params


@pytest.mark.parametrize(("window", "every", "limits"), [(64, 3, (64, 64, 512)), (600, None, (512,) * 3)])
def test_windows_lower_the_flops_of_attention(window, every, limits):
    config = ModelConfig(preset="nano", num_layers=3, sliding_window=window, full_attention_every=every)
    shape = resolve_model_shape(config, 257)
    seen = sum(min(position + 1, limit) for limit in limits for position in range(512)) / 512 / 3
    assert shape.attended(512) == pytest.approx(2 * seen, rel=1 / 64)
    flops = [flops_per_token(each, 512) for each in (shape, replace(shape, sliding_window=None))]
    saved = 12 * 3 * shape.query_dim * (512 - shape.attended(512))
    assert flops[1] - flops[0] == pytest.approx(saved)
    assert (saved > 0) == (window < 512)


def test_small_presets_are_small_and_grow():
    def size(preset: Preset) -> int:
        return num_params_of_blocks(resolve_model_shape(ModelConfig(preset=preset), 256))

    assert (size("nano"), size("tiny")) == (98_624, 787_584)
    assert get_args(Preset) == tuple(PRESETS)
    sizes = [size(preset) for preset in PRESETS]
    assert sizes == sorted(sizes)


def test_the_config_overrides_the_preset():
    sizes = {"dim": 96, "num_layers": 3, "num_heads": 6, "num_kv_heads": 3, "ffn_dim": 100, "vocab_size": 300}
    others = {"norm_eps": 1e-6, "rope_theta": 500.0, "dropout": 0.1, "tie_embeddings": True}
    found = resolve_model_shape(ModelConfig(preset="nano", **sizes, **others), 300)
    assert found == ModelShape(300, 96, 3, 6, 3, 16, 100, 1e-6, 500.0, True, 0.1)
    padded = {1: 64, 64: 64, 65: 128, 257: 320, 50257: 50304}
    assert {tokens: resolve_model_shape(ModelConfig(), tokens).vocab_size for tokens in padded} == padded


MISFITS = """\
num_heads: 3, num_kv_heads: 3
num_kv_heads: 3
dim: 132, num_heads: 4
vocab_size: 256
head_dim: 15
rope_scaling: {factor: 2}
rope_scaling: {type: linear, factor: 2, beta_fast: 3}
rope_scaling: {type: 3, factor: 2}
rope_scaling: {type: yarn, factor: linear, original_max_position_embeddings: 32}
full_attention_every: 2, rope_local_theta: 100
full_attention_every: 1, sliding_window: 8
activation: gelu_tanh, moe: {num_experts: 4}
dim: 100, num_heads: 3, num_kv_heads: 2, vocab_size: 1
""".splitlines()


def test_shapes_that_do_not_fit():
    for changes in MISFITS:
        with pytest.raises(ConfigError) as error:
            resolve_model_shape(ModelConfig.model_validate(yaml.safe_load(f"{{{changes}}}")), 257)
        said(error.value.message)


def test_flops_per_token():
    shape = ModelShape(10, 4, 2, 2, 1, 2, 6, 1e-5, 1e4, False, 0.0)
    # A block has q and o with 2 * 4 * 4, k and v with 2 * 4 * 2, feed-forward with 3 * 4 * 6, and norms with
    # 2 * 4. The last norm adds 4 and the head 40.
    matmul_params = 2 * (32 + 16 + 72 + 8) + 4 + 40
    assert num_params_of_blocks(shape) == matmul_params - 40
    assert num_params(shape) == matmul_params + 40
    assert flops_per_token(shape, 8) == 6 * matmul_params + 12 * 2 * 4 * 8
    assert flops_per_token(shape, 8, causal=True) == 6 * matmul_params + 6 * 2 * 4 * 8
    tied = replace(shape, tie_embeddings=True)  # the head is multiplied all the same
    assert num_params(shape) - num_params(tied) == 40
    assert flops_per_token(tied, 8) == flops_per_token(shape, 8)


def test_attention_computes_the_mask_of_documents_where_it_is_compiled_in_half_precision():
    compiled, plain = ParallelConfig(), ParallelConfig(compile=False)
    shape = resolve_model_shape(ModelConfig(preset="mini"), 257)
    small_heads = resolve_model_shape(ModelConfig(preset="mini", num_heads=64), 257)
    assert attends_in_blocks(compiled, shape, "bf16", "cuda")
    assert not attends_in_blocks(plain, shape, "bf16", "cuda")
    assert not attends_in_blocks(compiled, shape, "fp32", "cuda")
    assert not attends_in_blocks(compiled, shape, "bf16", "cpu")
    assert not attends_in_blocks(compiled, small_heads, "bf16", "cuda")
