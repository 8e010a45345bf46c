"""Tests the families of models that trainkit's decoder and transformers both implement, with small models."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hf_models import decoder_of, export_run, logits_of, need, save_model
from tests.support.parity import Case, run_cases, worst_difference
from trainkit.config.hf_families import FAMILIES
from trainkit.config.hf_model import find_hf_model
from trainkit.trainer.models.decoder import Decoder, soft_cap

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("transformers")]
CAPS = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.3}
WINDOW = {"sliding_window": 5, "num_key_value_heads": 2}
GEMMA = {**WINDOW, "head_dim": 32, "query_pre_attn_scalar": 24, "initializer_range": 0.1}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", WINDOW),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "gemma2": ("gemma2", {**GEMMA, **CAPS}),
    "gemma2 without caps": ("gemma2", {**GEMMA, **dict.fromkeys(CAPS)}),
    "gemma2 with all layers alike": ("gemma2", {**GEMMA, "layer_types": ["sliding_attention"] * 4}),
    "gemma3": ("gemma3_text", {**GEMMA, "num_hidden_layers": 7}),
    "gemma3 with longer contexts": (
        "gemma3_text",
        {
            **GEMMA,
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 0.3,
        },
    ),
}
TOKENS = torch.arange(2 * 24).view(2, 24) * 5 % 320
COMMON = ("data.tokenizer=bytes", "train.eval_every=null", "checkpoint.best_metric=null", "train.steps=2")


@pytest.fixture(autouse=True)
def libraries() -> None:
    need("transformers")


def our_logits(model: Decoder) -> torch.Tensor:
    with torch.no_grad():
        logits = model(TOKENS, torch.zeros(2, dtype=torch.int32))
    return soft_cap(logits, model.shape.logit_soft_cap)


@pytest.mark.parametrize("name", KINDS)
def test_the_decoder_computes_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    kind, changes = KINDS[name]
    folder = save_model(tmp_path / "model", kind, **changes)
    theirs = logits_of(folder, TOKENS)
    torch.testing.assert_close(our_logits(decoder_of(folder)), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_the_entries_of_config_json_can_be_written_and_read(tmp_path: Path, name: str) -> None:
    kind, changes = KINDS[name]
    folder = save_model(tmp_path / "model", kind, **changes)
    values = find_hf_model(str(folder), tmp_path).values
    content = FAMILIES[kind].content(values)
    assert not list(FAMILIES[kind].differences(values))
    assert not FAMILIES[kind].unlike(content)
    assert FAMILIES[kind].values(content) == {key: values[key] for key in values if key != "vocab_size"}


LAYOUTS = [
    Case("tp", 2, {"tp": 2, "activation_checkpointing": "selective"}),
    Case("cp", 2, {"cp": 2, "activation_checkpointing": "full"}),
    Case("pp", 2, {"pp": 2}),
    Case("shard", 2, {"dp_shard": 2, "activation_checkpointing": "pointwise"}),
]


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3 with longer contexts"])
def test_every_layout_has_the_curve_of_transformers_and_exports_its_model(tmp_path: Path, name: str) -> None:
    kind, changes = KINDS[name]
    folder = save_model(tmp_path / "model", kind, **{**changes, "num_key_value_heads": 4})
    options = (*COMMON, f"model.hf={folder}", "model.preset=tiny", "optimizer.lr=0.003")
    theirs = Case("theirs", 1, {}, ("model.architecture=transformers",))
    run_cases(tmp_path, [theirs, Case("alone", 1, {}), *LAYOUTS], options, keep_labels=True)
    found = {case.name: worst_difference(tmp_path / case.name, tmp_path / "alone") for case in LAYOUTS}
    found["theirs"] = worst_difference(tmp_path / "alone", tmp_path / "theirs")
    assert max(found.values()) < 1e-5, found
    export_run(tmp_path / "tp", tmp_path / "out")
    logits = logits_of(tmp_path / "out", TOKENS)
    torch.testing.assert_close(our_logits(decoder_of(tmp_path / "out")), logits, rtol=1e-5, atol=1e-5)
    assert (logits - logits_of(folder, TOKENS)).abs().max() > 1e-3, "the run has trained the model"


SCRATCH = {
    "mistral": "model.sliding_window=6",
    "gemma2": "model={sliding_window: 6, full_attention_every: 2, attention_soft_cap: 1, logit_soft_cap: 1}",
    "gemma3_text": "model={sliding_window: 6, full_attention_every: 3, rope_local_theta: 100, qk_norm: true}",
}
GEMMA_BLOCKS = (
    *("model.activation=gelu_tanh", "model.post_norms=true", "model.zero_centered_norms=true"),
    *("model.scale_embeddings=true", "model.tie_embeddings=true"),
)


@pytest.mark.parametrize("kind", SCRATCH)
def test_a_run_from_scratch_is_exported(tmp_path: Path, kind: str) -> None:
    blocks = GEMMA_BLOCKS if kind.startswith("gemma") else ()
    options = (*COMMON, "model.num_kv_heads=2", "model.vocab_size=320", *blocks, SCRATCH[kind])
    run_cases(tmp_path, [Case("run", 1, {})], options)
    export_run(tmp_path / "run", tmp_path / "out")
    logits = logits_of(tmp_path / "out", TOKENS)
    torch.testing.assert_close(our_logits(decoder_of(tmp_path / "out")), logits, rtol=1e-5, atol=1e-5)
    assert find_hf_model(str(tmp_path / "out"), tmp_path).values["sliding_window"] == 6
