"""Provides small models of transformers on disk, with the tests' tokenizer."""

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import preload
from trainkit.capabilities.export.command import chosen_checkpoint
from trainkit.config import load_config
from trainkit.plan.model_shape import resolve_model_shape
from trainkit.run.rundir import RunDir
from trainkit.safetensors import StoredWeights
from trainkit.trainer.models.decoder import Decoder
from trainkit.trainer.models.hf_names import read_decoder_weight

SIZES = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "vocab_size": 320, "max_position_embeddings": 128},
}
LLAMA3_ROPE = {
    **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}


def need(*modules: str) -> None:
    """Skip the test if a library is missing. CI requires all libraries."""
    for module in modules:
        if not os.environ.get("CI"):
            pytest.importorskip(module)
        importlib.import_module(module)


def save_model(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    """Write a model with random weights, biases and norms, and random biases of its routers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    preload("tests.support.preloaded_hf")
    config = AutoConfig.for_model(kind, **{**SIZES, **changes})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        biases = [item for name, item in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for param in (*model.parameters(), *biases):
            if param.dim() == 1:
                param.add_(torch.randn_like(param) * 0.1)
    model.save_pretrained(folder)
    return folder


def export_run(run: Path, out: Path, merge: bool = False, dtype: str = "fp32") -> None:
    """Export a run as `trainkit ckpt export` does, without a process that imports all libraries again."""
    from trainkit.capabilities.export.worker import ExportRequest, export

    folder = RunDir(run)
    config_file = folder.attempt(folder.attempt_numbers()[-1]).config_file
    out.mkdir()
    checkpoint = chosen_checkpoint(folder, None).path
    export(ExportRequest(str(run), str(config_file), str(checkpoint), str(out), dtype, merge=merge))


def decoder_of(folder: Path) -> Decoder:
    """Return trainkit's decoder with the weights of a model of transformers."""
    config = load_config(None, overrides=[f"model.hf={folder}", "data.tokenizer=bytes"], layers=False).config
    assert config.model.architecture == "llama"
    model = Decoder(resolve_model_shape(config.model, 320), 24).eval()
    weights = StoredWeights(folder)
    model.rebuild_buffers()
    biases = {f"blocks.{layer}.moe.router.bias": router.bias for layer, router in model.routers.items()}
    with torch.no_grad():
        for name, tensor in {**dict(model.named_parameters()), **biases}.items():
            tensor.copy_(read_decoder_weight(weights, model.shape, name, [slice(None)] * tensor.dim()))
    return model


def logits_of(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of a model as transformers computes them, float32 [B, T, vocab]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=tokens).logits
    return logits
