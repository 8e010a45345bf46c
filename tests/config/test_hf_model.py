"""Tests the values that a Hugging Face model's config.json sets, and values that contradict it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.said import said
from trainkit.config import LoadedConfig, dump_effective, load_config, read_effective
from trainkit.config.hf_model import find_hf_model
from trainkit.errors import ConfigError

LLAMA: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 500000.0},
    "vocab_size": 320,
}
FACTORS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING = {"rope_type": "llama3", **FACTORS, "original_max_position_embeddings": 8192}


def write(folder: Path, without: str = "", **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    content = {key: value for key, value in {**LLAMA, **changes}.items() if key != without}
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def load(tmp_path: Path, *overrides: str) -> LoadedConfig:
    (tmp_path / "run.yaml").write_text("name: x\nmodel:\n  hf: model\n")
    return load_config("run.yaml", overrides=overrides, cwd=tmp_path, environ={})


def problem(tmp_path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *overrides)
    [found] = caught.value.problems
    return found.render()


def test_the_sizes_of_a_llama(tmp_path):
    folder = write(tmp_path / "model", rope_scaling=SCALING)
    loaded = load(tmp_path)
    model = loaded.config.model
    assert (model.architecture, model.hf) == ("llama", str(folder))
    assert (model.dim, model.num_layers, model.num_heads, model.num_kv_heads) == (64, 3, 4, 2)
    assert (model.ffn_dim, model.norm_eps, model.rope_theta) == (96, 1e-6, 500000.0)
    assert (model.vocab_size, model.qkv_bias, model.tie_embeddings) == (320, False, False)
    assert model.rope_scaling == {key: float(SCALING[key]) for key in SCALING if key != "rope_type"}
    assert loaded.config.data.tokenizer == str(folder / "tokenizer.json")
    assert loaded.origins["model.dim"] == str(folder / "config.json")

    (tmp_path / "effective.yaml").write_text(dump_effective(loaded.config))
    assert read_effective(tmp_path / "effective.yaml") == loaded.config
    assert load_config("effective.yaml", cwd=tmp_path, environ={}).config == loaded.config


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "without": "rope_theta"},
        {"rope_scaling": None, "head_dim": 16, "num_key_value_heads": 2},
    ],
)
def test_both_ways_to_write_the_rotary_embedding(tmp_path, changes):
    """Qwen 2 differs from Llama only in its biases."""
    qwen = {"model_type": "qwen2", "tie_word_embeddings": True, "layer_types": ["full_attention"] * 3}
    write(tmp_path / "model", **qwen, **changes)
    model = load(tmp_path).config.model
    assert (model.rope_theta, model.rope_scaling) == (500000.0, None)
    assert (model.architecture, model.qkv_bias, model.tie_embeddings) == ("llama", True, True)


def test_the_heads_of_qwen_3(tmp_path):
    """Qwen 3 normalizes queries and keys. Its heads have 128 numbers unless config.json says otherwise."""
    for given, expected in ({}, 128), ({"head_dim": 32}, 32), ({"head_dim": 16}, None):
        write(tmp_path / "model", model_type="qwen3", **given)
        model = load(tmp_path).config.model
        assert (model.architecture, model.head_dim) == ("llama", expected)
        assert (model.qk_norm, model.qkv_bias) == (True, False)


EXPERTS = {
    **{"model_type": "dots1", "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 32},
    **{"num_experts_per_tok": 2, "first_k_dense_replace": 1, "norm_topk_prob": True, "sliding_window": None},
    "routed_scaling_factor": 2.5,
}


@pytest.mark.parametrize(
    ("changes", "qk_norm", "qkv_bias"),
    [
        ({"max_window_layers": 3, "sliding_window": 16}, True, False),  # all three layers come before it
        ({"model_type": "glm4_moe", "partial_rotary_factor": 1.0, "attention_bias": True}, False, True),
        ({"model_type": "glm4_moe", "rope_parameters": {"partial_rotary_factor": 1.0}}, False, False),
    ],
)
def test_experts_with_sigmoid_scores(tmp_path, changes, qk_norm, qkv_bias):
    write(tmp_path / "model", **{**EXPERTS, **changes})
    model = load(tmp_path).config.model
    assert (model.architecture, model.qk_norm, model.qkv_bias) == ("llama", qk_norm, qkv_bias)
    moe = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 32, "num_shared": 1, "first_dense": 1}
    moe |= {"score": "sigmoid", "norm_topk": True, "scale": 2.5, "bias_rate": 0.0, "aux_coef": 0.0}
    assert model.moe.model_dump() == moe


LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e6, "rope_local_base_freq": 10_000, "rope_scaling": LINEAR},
        {"rope_parameters": {"full_attention": {**LINEAR, "rope_theta": 1e6}}, "without": "rope_theta"},
        {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {}}, "without": "rope_theta"},
    ],
)
@pytest.mark.parametrize(
    "layers", [{"sliding_window_pattern": 2}, {"layer_types": ["sliding_attention", "full_attention"] * 2}]
)
def test_the_blocks_of_gemma_3(tmp_path, rope, layers):
    write(
        tmp_path / "model", model_type="gemma3_text", num_hidden_layers=4, sliding_window=9, **rope, **layers
    )
    model = load(tmp_path).config.model
    assert (model.rope_theta, model.rope_local_theta) == (1e6, 1e4)
    assert model.rope_scaling == {"type": "linear", "factor": 8.0}
    assert (model.sliding_window, model.full_attention_every, model.query_pre_attn_scalar) == (9, 2, 256)
    assert (model.head_dim, model.tie_embeddings, model.activation) == (256, True, "gelu_tanh")
    assert "model.post_norms: is False" in problem(tmp_path, "model.post_norms=false")
    assert "model.moe: is" in problem(tmp_path, "model.moe={num_experts: 4}")


YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}
OTHER_MODELS: list[dict[str, Any]] = [
    *({"model_type": "gpt2"}, {"without": "hidden_size"}, {"hidden_act": "gelu"}),
    {"model_type": "qwen3", "attention_bias": True},
    *({"attention_bias": True}, {"attention_dropout": 0.1}, {"layer_types": ["sliding_attention"] * 3}),
    {"model_type": "mistral", "layer_types": ["full_attention"] * 3},
    {"model_type": "gemma2", "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    *({"model_type": "gemma2", **key} for key in ({"hidden_activation": "gelu"}, {"attention_bias": True})),
    {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
    {"model_type": "gemma3_text", "sliding_window": None},
    {"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
    *({"rope_scaling": {"factor": 2.0, **kind}} for kind in ({"type": "dynamic"}, {"rope_type": "llama3"})),
    *({"rope_scaling": {**YARN, **more}} for more in ({"mscale": 1.0}, {"truncate": False})),
    *({**EXPERTS, **more} for more in ({"n_group": 2}, {"without": "n_shared_experts"})),
    {**EXPERTS, "sliding_window": 16, "max_window_layers": 2},
    {**EXPERTS, "model_type": "glm4_moe"},
]


@pytest.mark.parametrize("changes", OTHER_MODELS)
def test_other_models_need_transformers(tmp_path, changes):
    folder = write(tmp_path / "model", **changes)
    said(find_hf_model(str(folder), tmp_path).reason)
    model = load(tmp_path).config.model
    assert (model.architecture, model.vocab_size, model.dim) == ("transformers", 320, None)
    said(problem(tmp_path, "model.architecture=llama"))


def test_lora_needs_transformers(tmp_path):
    write(tmp_path / "model")
    assert load(tmp_path, "model.lora={r: 8}").config.model.architecture == "transformers"


CONTRADICTIONS = f"""\
model.dim=128
model.preset=7b
model.quantize=nf4
model.hf=org/absent
model.hf=org/my--model
model.hf={"x" * 300}
model.hf=absent
model.hf=.
model.hf=null; model.from_scratch=true
model.architecture=mine.py:Mine
model.from_scratch=true; model.lora={{r: 8}}
model.lora={{r: 8}}; model.architecture=llama
model.architecture=transformers; model.qkv_bias=true
model.architecture=transformers; model.dropout=0.1
model.architecture=transformers; model.dim=96
model.architecture=transformers; parallel.pp=2
model.architecture=transformers; parallel.cp=2
model.architecture=transformers; parallel.tp=2; model.lora={{r: 8}}
model.architecture=transformers; data.source={{a: 1, b: 2}}
model.architecture=transformers; precision.float8=true
"""


def test_contradictions(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    write(tmp_path / "model")
    said("\n".join(problem(tmp_path, *line.split("; ")) for line in CONTRADICTIONS.splitlines()))


def test_a_downloaded_model_is_found_by_its_name(tmp_path, monkeypatch):
    import huggingface_hub.constants

    hub = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    snapshot, refs = (hub / "models--org--name" / name for name in ("snapshots/0123abc", "refs"))
    snapshot.mkdir(parents=True)
    write(snapshot)
    refs.mkdir()
    (refs / "main").write_text("0123abc")
    assert load(tmp_path, "model.hf=org/name").config.model.hf == str(snapshot)


def test_a_model_without_a_tokenizer(tmp_path):
    folder = write(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    said(problem(tmp_path))
    assert load(tmp_path, "data.tokenizer=bytes").config.data.tokenizer == "bytes"


def test_a_shipped_config_does_not_set_sizes(tmp_path):
    folder = write(tmp_path / "model")
    for name in ("quickstart", "models/8b"):
        config = load_config(name, overrides=[f"model.hf={folder}"], cwd=tmp_path, environ={}).config
        assert (config.model.dim, config.model.preset) == (64, "tiny")
        assert config.data.tokenizer == str(folder / "tokenizer.json")


def test_values_that_no_model_has(tmp_path):
    wrong = {"num_attention_heads": 0, "hidden_size": "64", "rope_scaling": [1], "vocab_size": 0}
    for key, value in {"quantization_config": {"bits": 4}, **wrong}.items():
        folder = write(tmp_path / "model", **{key: value})
        said(problem(tmp_path))
    for text in ("{", "{}"):
        (folder / "config.json").write_text(text)
        said(problem(tmp_path))
