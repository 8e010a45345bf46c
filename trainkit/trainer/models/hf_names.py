"""Translate the names of a decoder's parameters to and from the names of models in transformers.

The files of transformers contain one matrix per expert, and the decoder has one tensor for all experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trainkit.errors import FatalError
from trainkit.plan.model_shape import ModelShape
from trainkit.safetensors import StoredWeights

_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
_ROUTER = {"qwen3_moe": "mlp.gate", "mixtral": "block_sparse_moe.gate"}
_EXPERT = {"qwen3_moe": "mlp.experts.{}.{}", "mixtral": "block_sparse_moe.experts.{}.{}"}
_MATRIX = {
    "qwen3_moe": {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
    "mixtral": {"gate": "w1", "up": "w3", "down": "w2"},
}
_ENDS = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_BLOCK_NAME = re.compile(r"blocks\.(\d+)\.(.+)")


def hf_family(shape: ModelShape) -> str:
    """Return the value of `model_type` in transformers for models with the shape."""
    if shape.moe is not None:
        return "qwen3_moe" if shape.qk_norm else "mixtral"
    return "qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias else "llama"


def hf_names(name: str, shape: ModelShape) -> list[str]:
    """Return the names under which transformers stores a decoder's parameter: one, or one for each expert."""
    module, _, kind = name.rpartition(".")
    match = _BLOCK_NAME.fullmatch(module)
    if match is None:
        return [f"{_ENDS[module]}.{kind}"]
    layer, part = f"model.layers.{match[1]}", match[2]
    if not part.startswith("moe.") or shape.moe is None:
        return [f"{layer}.{_BLOCK[part]}.{kind}"]
    family = hf_family(shape)
    if part == "moe.router":
        return [f"{layer}.{_ROUTER[family]}.{kind}"]
    stored = _EXPERT[family], _MATRIX[family][kind]
    return [f"{layer}.{stored[0].format(e, stored[1])}.weight" for e in range(shape.moe.num_experts)]


def hf_values(names: Sequence[str], value: Tensor) -> Iterator[Tensor]:
    """Yield the tensor that transformers stores under each of the names that `hf_names` returned."""
    yield from value.unbind() if len(names) > 1 else [value]


def read_decoder_weight(
    weights: StoredWeights, shape: ModelShape, name: str, index: Sequence[slice]
) -> Tensor:
    """Read a slice of a decoder parameter from the files of a model whose family `hf_family` returns.

    Raises FatalError if the files do not contain the parameter.
    """
    stored = hf_names(name, shape)
    missing = next((each for each in stored if each not in weights), None)
    if missing is not None:
        raise FatalError(
            f"{weights.folder} has no {missing}",
            hint=(
                "set model.architecture: transformers to train the model with the "
                "implementation in transformers"
            ),
        )
    if len(stored) == 1:
        return weights.read(stored[0], index)
    own = stored[index[0]] if index else stored
    if not own:  # a rank may have no expert
        return weights.read(stored[0], index[1:])[None][:0]
    return torch.stack([weights.read(each, index[1:]) for each in own])
