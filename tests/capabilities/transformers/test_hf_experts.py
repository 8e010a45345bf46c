"""Tests models with experts of Hugging Face: training with trainkit's decoder, and export."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hf_models import decoder_of, export_run, logits_of, need, save_model
from tests.support.parity import Case, run_cases, worst_difference
from trainkit.config.hf_model import find_hf_model
from trainkit.errors import UsageError

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("transformers")]
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16, "mlp_only_layers": [0]},
    "mixtral": {"num_local_experts": 4},
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
    options = (f"model.hf={folder}", "model.preset=tiny", "train.steps=2", "optimizer.lr=0.003", *UNEVALUATED)
    cases = [Case("alone", 1, {}), Case("shard", 2, {"dp_shard": 2})]
    run_cases(tmp_path, cases, options)
    assert worst_difference(tmp_path / "shard", tmp_path / "alone") < 1e-5
    export_run(tmp_path / "shard", tmp_path / "out")
    with torch.no_grad():
        found = decoder_of(tmp_path / "out")(TOKENS, torch.zeros(2, dtype=torch.int32))
    theirs = logits_of(tmp_path / "out", TOKENS)
    torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-5)
    assert (theirs - logits_of(folder, TOKENS)).abs().max() > 1e-3, "the run has trained the model"
    assert stored_names(tmp_path / "out") == stored_names(folder)


def test_a_run_from_scratch_is_exported_with_the_settings_of_its_experts(tmp_path: Path) -> None:
    moe = "{num_experts: 4, top_k: 1, expert_ffn_dim: 24, first_dense: 1, norm_topk: false, bias_rate: 0}"
    options = (f"model.moe={moe}", "model.qk_norm=true", "model.vocab_size=320", "train.steps=1")
    run_cases(tmp_path, [Case("run", 1, {})], (*options, *UNEVALUATED))
    export_run(tmp_path / "run", tmp_path / "out")
    with torch.no_grad():
        found = decoder_of(tmp_path / "out")(TOKENS, torch.zeros(2, dtype=torch.int32))
    torch.testing.assert_close(found, logits_of(tmp_path / "out", TOKENS), rtol=1e-5, atol=1e-5)
    values = find_hf_model(str(tmp_path / "out"), tmp_path).values["moe"]
    assert (values["top_k"], values["expert_ffn_dim"], values["first_dense"]) == (1, 24, 1)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ("num_shared: 1", "model.moe.num_shared: 1; otherwise, the model is like mixtral"),
        ("score: sigmoid", 'model.moe.score: "sigmoid"; otherwise, the model is like mixtral'),
        ("first_dense: 1", "model.qk_norm: false; otherwise, the model is like qwen3_moe"),
        ("bias_rate: 0.001", "the router's biases of this run"),
    ],
)
def test_experts_that_transformers_lacks_are_not_exported(tmp_path: Path, entries: str, reason: str) -> None:
    moe = ", ".join(("num_experts: 4", *(() if "bias" in entries else ("bias_rate: 0",)), entries))
    options = (f"model.moe={{{moe}}}", "train.steps=1", *UNEVALUATED)
    run_cases(tmp_path, [Case("run", 1, {})], options)
    with pytest.raises(UsageError, match=reason):
        export_run(tmp_path / "run", tmp_path / "out")
