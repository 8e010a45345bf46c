"""Keeps frozen linear layers in 4 bits under adapters: the NormalFloat of QLoRA, arXiv 2305.14314."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.trainer.models.model import ReadWeight

BLOCK = 64
"""Weights that share a scale; QLoRA's."""
SCALE_BLOCK = 256
"""Scales that share a scale of their own."""


def _bitsandbytes() -> Any:
    # It warns of a kernel for inference that it does not find.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    import bitsandbytes.functional as functional

    return functional


class NF4Linear(nn.Module):
    """A frozen linear layer with a weight of 4 bits, scales of 8 bits, and its bias as it was.

    Its buffers are empty until `quantize`, and not in checkpoints: the weight is read at every start.
    """

    packed: Tensor
    scales: Tensor
    offset: Tensor
    scales_of_scales: Tensor
    codes_of_scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        for name in ("packed", "scales", "offset", "scales_of_scales", "codes_of_scales"):
            self.register_buffer(name, None, persistent=False)
        # Not as a decorator, which would import the compiler into every run.
        self.forward = torch.compiler.disable(self.forward)  # type: ignore[method-assign, no-untyped-call]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        return self.out_features, self.in_features

    @torch.no_grad()
    def quantize(self, weight: Tensor) -> None:
        """Set the weight, float [out, in], on the device where it is."""
        assert weight.shape == self.shape
        self.packed, state = _bitsandbytes().quantize_4bit(
            weight.float().contiguous(), blocksize=BLOCK, quant_type="nf4", compress_statistics=True
        )
        self.scales, self.offset = state.absmax, state.offset
        self.scales_of_scales, self.codes_of_scales = state.state2.absmax, state.state2.code

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """The weight that the layer multiplies with, [out, in]."""
        functional = _bitsandbytes()
        scales = functional.QuantState(
            self.scales_of_scales, code=self.codes_of_scales, blocksize=SCALE_BLOCK, dtype=torch.float32
        )
        state = functional.QuantState(
            self.scales,
            shape=torch.Size(self.shape),
            blocksize=BLOCK,
            quant_type="nf4",
            dtype=dtype,
            offset=self.offset,
            state2=scales,
        )
        return cast(Tensor, functional.dequantize_4bit(self.packed, state))

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        with torch.autocast(kind, enabled=False):
            return cast(Tensor, _Multiply.apply(x.to(dtype), self))  # type: ignore[no-untyped-call]


class _Multiply(torch.autograd.Function):
    """Multiplies with the weight of an `NF4Linear`, which it computes again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: NF4Linear) -> Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return F.linear(x, layer.weight_in(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.weight_in(gradient.dtype), None


def quantize_linears(model: nn.Module, but: Collection[nn.Module]) -> int:
    """Replace the frozen linear layers of a model, except those in `but` and tied ones; returns how many.

    The parameters are on the meta device; `read_quantized` reads them.
    """
    uses = Counter(
        id(param) for _, param in model.named_parameters(remove_duplicate=False) if not param.requires_grad
    )
    found = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module not in but and uses[id(module.weight)] == 1
    }
    for name, module in found.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, NF4Linear(module))
    return len(found)


def quantized_layers(model: nn.Module) -> dict[str, NF4Linear]:
    """The quantised layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, NF4Linear)}


def read_quantized(model: nn.Module, read: ReadWeight, device: torch.device) -> None:
    """Read and quantise the weights of all quantised layers, one after the other, on the device."""
    for name, layer in quantized_layers(model).items():
        layer.quantize(read(f"{name}.weight", [slice(0, size) for size in layer.shape]).to(device))


def restore_linears(model: nn.Module) -> None:
    """Replace the quantised layers by linear ones in float32 with the same function."""
    for name, layer in quantized_layers(model).items():
        linear = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(layer.weight_in(torch.float32), requires_grad=False)
        linear.bias = layer.bias
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, linear)
