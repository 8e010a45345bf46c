"""Translate the names of a decoder's parameters to and from the names of models in transformers.

The files of transformers contain one matrix per expert, and the decoder has one tensor for all experts. The
biases with which routers choose experts are buffers, and are translated as well.
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
    "moe.shared.gate": "mlp.shared_experts.gate_proj",
    "moe.shared.up": "mlp.shared_experts.up_proj",
    "moe.shared.down": "mlp.shared_experts.down_proj",
}
_MATRIX = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_MIXTRAL_MATRIX = {"gate": "w1", "up": "w3", "down": "w2"}
_ENDS = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_BLOCK_NAME = re.compile(r"blocks\.(\d+)\.(.+)")


def hf_family(shape: ModelShape) -> str:
    """Return the value of `model_type` in transformers for models with the shape."""
    if shape.moe is not None:
        return "glm4_moe" if has_stored_biases(shape) else "qwen3_moe" if shape.qk_norm else "mixtral"
    return "qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias else "llama"


def has_stored_biases(shape: ModelShape) -> bool:
    """Return whether models in transformers with the shape store the biases of their routers."""
    return shape.moe is not None and shape.moe.score == "sigmoid"


def hf_names(name: str, shape: ModelShape) -> list[str]:
    """Return the names under which transformers stores a parameter or the biases of a router.

    The experts of a layer have one name each. The result is empty for biases that transformers does not have.
    """
    module, _, kind = name.rpartition(".")
    match = _BLOCK_NAME.fullmatch(module)
    if match is None:
        return [f"{_ENDS[module]}.{kind}"]
    layer, part = f"model.layers.{match[1]}", match[2]
    is_mixtral = hf_family(shape) == "mixtral"
    experts = f"{layer}.{'block_sparse_moe' if is_mixtral else 'mlp'}"
    if part == "moe.router" and kind == "bias":
        return [f"{experts}.gate.e_score_correction_bias"] if has_stored_biases(shape) else []
    if part == "moe.router":
        return [f"{experts}.gate.{kind}"]
    if part == "moe.experts" and shape.moe is not None:
        matrix = (_MIXTRAL_MATRIX if is_mixtral else _MATRIX)[kind]
        return [f"{experts}.experts.{expert}.{matrix}.weight" for expert in range(shape.moe.num_experts)]
    return [f"{layer}.{_BLOCK[part]}.{kind}"]


def hf_values(names: Sequence[str], value: Tensor) -> Iterator[Tensor]:
    """Yield the tensor that transformers stores under each of the names that `hf_names` returned."""
    yield from value.unbind() if len(names) > 1 else [value]


def read_decoder_weight(
    weights: StoredWeights, shape: ModelShape, name: str, index: Sequence[slice]
) -> Tensor:
    """Read a slice of a parameter, or of the biases of a router, from the files of a model of transformers.

    Biases that transformers does not have are zeros. Raises FatalError if the files do not contain the name.
    """
    stored = hf_names(name, shape)
    if not stored and shape.moe is not None:
        return torch.zeros(shape.moe.num_experts)[tuple(index)]
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
