"""Translate the names of a decoder's parameters to and from the names of models in transformers.

The files of transformers contain one matrix per expert, and the decoder has one tensor for all experts. The
biases with which routers choose experts are buffers, and are translated as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trainkit.config.hf_families import ENDS, ROUTER_BIAS, Family, closest_family
from trainkit.errors import FatalError
from trainkit.plan.model_shape import ModelShape, model_values
from trainkit.safetensors import StoredWeights

_BLOCK_NAME = re.compile(r"blocks\.(\d+)\.(.+)")


def hf_family(shape: ModelShape) -> Family:
    """Return the family of models in transformers to which a decoder of this shape belongs."""
    return closest_family(model_values(shape))[0]


def hf_names(name: str, shape: ModelShape) -> list[str]:
    """Return the names under which transformers stores a parameter or the biases of a router.

    The experts of a layer have one name each. The result is empty for biases that transformers does not have.
    """
    module, _, kind = name.rpartition(".")
    match = _BLOCK_NAME.fullmatch(module)
    if match is None:
        return [f"{ENDS[module]}.{kind}"]
    family = hf_family(shape)
    layer, part = f"model.layers.{match[1]}", match[2]
    if f"{part}.{kind}" == ROUTER_BIAS:
        return [f"{layer}.{family.modules[ROUTER_BIAS]}"] if family.has_router_biases else []
    if shape.moe is None or part != "moe.experts":
        return [f"{layer}.{family.block_modules[part]}.{kind}"]
    stored = family.block_modules[f"{part}.{kind}"]
    return [f"{layer}.{stored.format(expert)}.weight" for expert in range(shape.moe.num_experts)]


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
