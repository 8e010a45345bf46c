"""Tests sliding windows and the blocks of Gemma on every layout."""

import json
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support.models import nano, sample_keys, tokens
from tests.support.parity import Case, assert_same_curves, run_cases, worst_difference
from trainkit.capabilities.generate.worker import logits_of
from trainkit.trainer.models.decoder import block_attention, capped_attention, causal_attention

WINDOW = {"sliding_window": 4, "full_attention_every": 2, "num_layers": 2}


def test_a_token_attends_only_to_its_window():
    """With two blocks with windows, a token depends on the 6 tokens before it, and with one on all tokens."""
    for every, first in ((None, 9), (2, 0)):
        model = nano(**{**WINDOW, "full_attention_every": every}).eval()
        found = model(tokens(1), sample_keys(1))
        for changed in range(16):
            other = tokens(1)
            other[0, changed] += 1
            is_same = torch.equal(model(other, sample_keys(1))[0, 15], found[0, 15])
            assert is_same == (changed < first), (every, changed)


@pytest.mark.parametrize("cap", [None, 0.5])
@pytest.mark.parametrize("config", [{}, {"num_kv_heads": 4}, {"sliding_window": 20}])
def test_attention_in_blocks_equals_attention_with_a_mask_in_memory(cap, config):
    """The window of 20 tokens is longer than the sample, so attention is causal."""
    model, in_blocks = (nano(**{**WINDOW, **config, "attention_soft_cap": cap}) for _ in range(2))
    in_blocks.attend_in_blocks()
    for packed in (tokens(), tokens() % 8):
        for one in (model, in_blocks):
            one.eos_id = 3 if packed.max() < 8 else None
        assert model.has_masks == (
            cap is not None or one.eos_id is not None or config.get("sliding_window") != 20
        )
        with torch.no_grad():
            found, expected = (one(packed, sample_keys()) for one in (in_blocks, model))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_generation_computes_windows_and_soft_caps_for_a_part_of_a_sample():
    model = nano(**WINDOW, logit_soft_cap=0.1, attention_soft_cap=0.5).eval()
    with torch.no_grad():
        found = logits_of(model, torch.device("cpu"))(tokens(1)[0, :9].tolist())
        whole = model(tokens(1), sample_keys(1))[0, 8]
    torch.testing.assert_close(found, 0.1 * torch.tanh(whole / 0.1))
    assert found.abs().max() < 0.1


@pytest.mark.parametrize(("in_blocks", "eos_id"), [(True, 3), (True, None), (False, None)])
def test_each_kind_of_block_is_compiled_once(in_blocks, eos_id):
    """Each step has other masks, and only blocks with and without a window may differ in their code."""
    model = nano(**{**WINDOW, "num_layers": 6, "attention_soft_cap": 0.5})
    model.eos_id = eos_id
    if in_blocks:
        model.attend_in_blocks()
    graphs = CompileCounterWithBackend("eager")
    for block in model.layers:
        block.forward = torch.compile(block.forward, backend=graphs, fullgraph=True)
    with torch.no_grad():
        for seed in range(3):
            model(tokens(2, seed=seed) % 8, sample_keys())
    assert graphs.frame_count == (2 if in_blocks else 1)


def test_a_large_cap_changes_nothing():
    q, k, v = (torch.randn(2, heads, 9, 8) for heads in (4, 2, 2))
    mask = torch.full((9, 9), -torch.inf).triu(1)[None, None]
    expected = causal_attention(q, k, v)
    torch.testing.assert_close(capped_attention(q, k, v, mask, 1e4), expected, rtol=1e-4, atol=1e-5)
    assert (capped_attention(q, k, v, mask, 0.5) - expected).abs().max() > 0.01
    assert torch.equal(block_attention(q, k, v, None), expected)


GEMMA = (
    "model={sliding_window: 5, full_attention_every: 3, rope_local_theta: 100, activation: gelu_tanh, "
    "post_norms: true, zero_centered_norms: true, scale_embeddings: true, qk_norm: true, dropout: 0.1, "
    "query_pre_attn_scalar: 20, attention_soft_cap: 0.5, logit_soft_cap: 1, tie_embeddings: true}",
    "train.steps=3",
)
CASES = [
    Case("recomputed", 1, {"activation_checkpointing": "full"}),
    Case("selective", 1, {"activation_checkpointing": "selective"}),
    Case("compiled", 1, {"compile": True}),
    Case("shard", 2, {"dp_shard": 2, "activation_checkpointing": "pointwise"}),
    Case("tp", 2, {"tp": 2, "activation_checkpointing": "selective"}),
    Case("plain-tp", 2, {"tp": 2, "sequence_parallel": False, "loss_parallel": False}),
    Case("cp", 2, {"cp": 2, "activation_checkpointing": "full"}),
    Case("pp", 2, {"pp": 2, "pp_schedule": "zbv"}),
    Case("cp-tp", 4, {"cp": 2, "tp": 2}),
    Case("interleaved-tp", 4, {"pp": 2, "tp": 2, "pp_schedule": "interleaved_1f1b"}),
]


@pytest.mark.slow
def test_every_layout_of_gemma_blocks_has_one_curve(tmp_path: Path) -> None:
    run_cases(tmp_path, [Case("alone", 1, {}), *CASES], GEMMA)
    assert_same_curves(tmp_path, CASES)


@pytest.mark.slow
def test_windows_within_documents(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": f"line {n} " * (n % 9)}) + "\n" for n in range(300))
    (tmp_path / "rows.jsonl").write_text(rows)
    options = (*GEMMA, f"data.source={tmp_path}/rows.jsonl", "data.val_fraction=0.2")
    masked = ("data.document_mask=true",)
    cases = [
        Case("tp", 2, {"tp": 2, "activation_checkpointing": "full"}, masked),
        Case("shard", 2, {"dp_shard": 2}, masked),
    ]
    run_cases(tmp_path, [Case("plain", 1, {}), Case("alone", 1, {}, masked), *cases], options)
    assert worst_difference(tmp_path / "plain", tmp_path / "alone") > 1e-4
    assert_same_curves(tmp_path, cases)
