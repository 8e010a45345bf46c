"""Tests models with experts of Hugging Face: training with trainkit's decoder, and export."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hf_models import decoder_of, export_run, logits_of, need, save_model
from tests.support.parity import Case, assert_same_curves, run_cases
from trainkit.config import load_config
from trainkit.config.hf_model import find_hf_model
from trainkit.errors import UsageError
from trainkit.safetensors import StoredWeights

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("transformers")]
SIGMOID = {
    **{"n_routed_experts": 4, "n_shared_experts": 2, "moe_intermediate_size": 32, "head_dim": 24},
    **{"first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "n_group": 1},
}
BIAS = "e_score_correction_bias"
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16, "mlp_only_layers": [0]},
    "mixtral": {"num_local_experts": 4},
    "dots1": {**SIGMOID, "sliding_window": None},
    "glm4_moe": {**SIGMOID, "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 1.0},
}
TOKENS = torch.arange(2 * 24).view(2, 24) * 5 % 320
UNEVALUATED = ("data.tokenizer=bytes", "train.eval_every=null", "checkpoint.best_metric=null")


@pytest.fixture(autouse=True)
def libraries() -> None:
    need("transformers")


def stored_names(folder: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("kind", KINDS)
def test_the_decoder_computes_the_logits_of_transformers(tmp_path: Path, kind: str) -> None:
    folder = save_model(tmp_path / "model", kind, num_experts_per_tok=2, **KINDS[kind])
    with torch.no_grad():
        found = decoder_of(folder)(TOKENS, torch.zeros(2, dtype=torch.int32))
    torch.testing.assert_close(found, logits_of(folder, TOKENS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_run_computes_the_logits_of_its_decoder(tmp_path: Path, kind: str) -> None:
    """The run starts from the model of transformers on two ranks, each of which reads its own experts."""
    folder = save_model(tmp_path / "model", kind, num_experts_per_tok=2, **KINDS[kind])
    options = [f"model.hf={folder}", "model.preset=tiny", "train.steps=2", "optimizer.lr=0.003", *UNEVALUATED]
    if "n_routed_experts" in KINDS[kind]:
        options.append("model.moe.bias_rate=0.02")
    cases = [Case("alone", 1, {}), Case("shard", 2, {"dp_shard": 2})]
    cases += [Case("divided", 2, {"tp": 2, "ep": 2}), Case("stages", 2, {"pp": 2})]
    run_cases(tmp_path, cases, options)
    assert_same_curves(tmp_path, cases)
    export_run(tmp_path / "shard", tmp_path / "out")
    with torch.no_grad():
        found = decoder_of(tmp_path / "out")(TOKENS, torch.zeros(2, dtype=torch.int32))
    theirs = logits_of(tmp_path / "out", TOKENS)
    torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-5)
    assert (theirs - logits_of(folder, TOKENS)).abs().max() > 1e-3, "the run has trained the model"
    assert stored_names(tmp_path / "out") == stored_names(folder)
    for name in (name for name in stored_names(folder) if name.endswith(BIAS)):
        # The run starts from the biases of the model, and changes each by the rate, or not, in both steps.
        steps = (StoredWeights(tmp_path / "out").read(name) - StoredWeights(folder).read(name)) / 0.02
        assert steps.any()
        assert (steps - steps.round()).abs().max() < 1e-4
        assert steps.abs().max() < 2.1


@pytest.mark.parametrize(
    ("own", "options"),
    [
        ("norm_topk: false, bias_rate: 0", ["model.qk_norm=true"]),
        ("score: sigmoid, num_shared: 2, scale: 1.5, bias_rate: 0.1", []),
        ("score: sigmoid, num_shared: 1, norm_topk: false", ["model.qk_norm=true", "model.qkv_bias=true"]),
    ],
)
def test_a_run_from_scratch_is_exported_with_the_settings_of_its_experts(
    tmp_path: Path, own: str, options: list[str]
) -> None:
    moe = f"{{num_experts: 4, top_k: 1, expert_ffn_dim: 24, first_dense: 1, {own}}}"
    options = [f"model.moe={moe}", "model.vocab_size=320", "train.steps=2", *options, *UNEVALUATED]
    run_cases(tmp_path, [Case("run", 1, {})], options)
    export_run(tmp_path / "run", tmp_path / "out")
    with torch.no_grad():
        found = decoder_of(tmp_path / "out")(TOKENS, torch.zeros(2, dtype=torch.int32))
    torch.testing.assert_close(found, logits_of(tmp_path / "out", TOKENS), rtol=1e-5, atol=1e-5)
    config = load_config(None, overrides=[*options, "data.tokenizer=bytes"], layers=False).config
    values = find_hf_model(str(tmp_path / "out"), tmp_path).values
    expected = config.model.model_dump()
    assert values["moe"] == {**expected["moe"], "bias_rate": 0.0}
    assert all(values[key] == expected[key] for key in ("qk_norm", "qkv_bias"))
    export_run(tmp_path / "run", tmp_path / "rounded", dtype="bf16")
    rounded = StoredWeights(tmp_path / "rounded")
    dtypes = {name: rounded.read(name).dtype for name in stored_names(tmp_path / "rounded")}
    assert all((torch.float32 if BIAS in name else torch.bfloat16) == dtype for name, dtype in dtypes.items())


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ("num_shared: 1", "model.moe.num_shared: 1; otherwise, the model is like mixtral"),
        ("score: sigmoid", 'model.moe.score: "sigmoid"; otherwise, the model is like mixtral'),
        ("first_dense: 1", "model.qk_norm: false; otherwise, the model is like qwen3_moe"),
        ("bias_rate: 0.001", "biases of the routers"),
    ],
)
def test_experts_that_transformers_lacks_are_not_exported(tmp_path: Path, entries: str, reason: str) -> None:
    moe = ", ".join(("num_experts: 4", *(() if "bias" in entries else ("bias_rate: 0",)), entries))
    options = (f"model.moe={{{moe}}}", "train.steps=1", *UNEVALUATED)
    run_cases(tmp_path, [Case("run", 1, {})], options)
    with pytest.raises(UsageError, match=reason):
        export_run(tmp_path / "run", tmp_path / "out")
