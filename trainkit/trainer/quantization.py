"""Quantize tensors: frozen linear layers under adapters to 4 bits, and AdamW averages to 8 bits.

4-bit weights use the NormalFloat format from QLoRA (arXiv 2305.14314). An 8-bit average has one code per
element and one float32 scale per block of a matrix row, as in "8-bit Optimizers via Block-wise Quantization"
(arXiv 2110.02861). trainkit differs from the paper in three ways:

- Blocks do not cross rows, so that ranks can shard rows without cutting a block.
- A scale has the sign of its block's largest element, which is therefore exact even if negative.
- A square is never rounded to 0, because the update would then divide by eps alone.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.errors import FatalError
from trainkit.plan.optimizer_state import row_blocks
from trainkit.trainer.models.model import ReadWeight

BLOCK = 64
"""Number of weights that share a scale, as in QLoRA."""
SCALE_BLOCK = 256
"""Number of scales that share a second-level scale."""


def _bitsandbytes() -> Any:
    # Silence bitsandbytes' warning that a kernel is missing, because the missing kernel is used only for
    # inference.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    import bitsandbytes.functional as functional

    return functional


class NF4Linear(nn.Module):
    """A frozen linear layer with a 4-bit weight, 8-bit scales and an unquantized bias.

    The layer's buffers are empty until `quantize` is called. Checkpoints do not contain the buffers, because
    the weight is read from the model's files at every start.
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
        # Call `disable` only when a layer is created: as a decorator, it would import the compiler in every
        # run.
        self.forward = torch.compiler.disable(self.forward)  # type: ignore[method-assign, no-untyped-call]

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of rows and columns of the weight."""
        return self.out_features, self.in_features

    @torch.no_grad()
    def quantize(self, weight: Tensor) -> None:
        """Quantize a floating-point weight [out, in] and store the result on the weight's device."""
        assert weight.shape == self.shape
        self.packed, state = _bitsandbytes().quantize_4bit(
            weight.float().contiguous(), blocksize=BLOCK, quant_type="nf4", compress_statistics=True
        )
        self.scales, self.offset = state.absmax, state.offset
        self.scales_of_scales, self.codes_of_scales = state.state2.absmax, state.state2.code

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight [out, in]."""
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
    """Multiplies by the weight of an `NF4Linear`, which the backward pass dequantizes again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: NF4Linear) -> Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return F.linear(x, layer.weight_in(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.weight_in(gradient.dtype), None


def quantize_linears(model: nn.Module, but: Collection[nn.Module]) -> int:
    """Quantize a model's frozen linear layers, except tied layers and layers in `but`; return their number.

    The weights stay on the meta device until `read_quantized` reads their values.
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
        model.set_submodule(name, NF4Linear(module))
    return len(found)


def quantized_layers(model: nn.Module) -> dict[str, NF4Linear]:
    """Return a model's quantized layers, keyed by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, NF4Linear)}


def read_quantized(model: nn.Module, read: ReadWeight, device: torch.device) -> None:
    """Read the weights of all quantized layers and quantize them on the device, layer by layer."""
    for name, layer in quantized_layers(model).items():
        layer.quantize(read(f"{name}.weight", [slice(0, size) for size in layer.shape]).to(device))


def restore_linears(model: nn.Module) -> None:
    """Replace quantized layers with float32 linear layers that compute the same function."""
    for name, layer in quantized_layers(model).items():
        linear = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(layer.weight_in(torch.float32), requires_grad=False)
        linear.bias = layer.bias
        model.set_submodule(name, linear)


DECADES = 7
SMALLEST_SQUARE = 1e-7
"""Smallest representable square, relative to the largest square in its block."""


def code_values(*, is_signed: bool) -> Tensor:
    """Return the values of the 256 codes, relative to a scale, as float32 [256] in ascending order up to 1.

    The values span seven decades; each decade has twice as many values as the decade below.
    """
    values = [0.0 if is_signed else SMALLEST_SQUARE, 1.0]
    for decade in range(DECADES):
        count = 2 ** (decade if is_signed else decade + 1)
        unit = 10.0 ** (decade + 1 - DECADES)
        magnitudes = [unit * (0.1 + 0.9 * (index + 0.5) / count) for index in range(count)]
        values += [*magnitudes, *(-magnitude for magnitude in magnitudes if is_signed)]
    return torch.tensor(sorted(values), dtype=torch.float32)


@dataclass(frozen=True)
class QuantizedAverage:
    """A running average for this rank's shard of a parameter, stored with 8 bits."""

    codes: Tensor
    """The codes as uint8, in the shape of the shard."""
    scales: Tensor
    """The scales as float32 [rows, blocks per row]."""
    values: Tensor
    """The value of each code, as returned by `code_values`."""
    part: int
    """Number of elements in each part of a row; a part consists of whole blocks."""
    num_blocks: int
    """Number of blocks in each part of a row."""

    @classmethod
    def zeros(cls, shard: Tensor, param: Tensor, name: str, values: Tensor) -> QuantizedAverage:
        """Return a running average of zeros for a shard of a parameter.

        Raises FatalError if the layout cuts through a block.
        """
        row, whole_row = shard.shape[1:].numel(), param.shape[1:].numel()
        part, num_blocks = row_blocks(whole_row)
        if row % part:
            raise FatalError(
                f"optimizer.name is adamw_8bit, but the layout cuts a block: a rank has {row} of the"
                f" {whole_row} elements of a row of {name}",
                hint=f"shard the rows into chunks of a multiple of {part} elements, or use adamw",
            )
        codes = torch.zeros_like(shard, dtype=torch.uint8)
        # A scale of 0 makes every code represent 0.
        scales = torch.zeros(shard.shape[0], row // part * num_blocks, device=shard.device)
        return cls(codes, scales, values, part, num_blocks)

    def split(self, rows: int) -> list[QuantizedAverage]:
        """Split the average into groups of `rows` rows each; the results are views of this average."""
        pieces = zip(torch.split(self.codes, rows), torch.split(self.scales, rows), strict=True)
        return [
            QuantizedAverage(codes, scales, self.values, self.part, self.num_blocks)
            for codes, scales in pieces
        ]

    def parts(self) -> tuple[Tensor, Tensor]:
        """Return views of the codes and scales where each part of a row is a separate row."""
        return self.codes.view(-1, self.part), self.scales.view(-1, self.num_blocks)

    @classmethod
    def of_parts(cls, codes: Tensor, scales: Tensor, values: Tensor) -> QuantizedAverage:
        return cls(codes, scales, values, codes.shape[1], scales.shape[1])

    def dequantize(self) -> Tensor:
        """Return the average as float32, with the shape and strides of the shard."""
        relative = self.values.index_select(0, self.codes.flatten().int())
        average = self._without_blocks(self._in_blocks(relative) * self.scales.view(-1, 1))
        if self.codes.is_contiguous():
            return average
        # The fused kernel assumes that an average has the same strides as its parameter.
        return torch.empty_like(self.codes, dtype=torch.float32).copy_(average)

    def quantize(self, average: Tensor, skip: Tensor) -> None:
        """Round a float32 average to 8 bits and store the result, or do nothing if `skip` is 1."""
        blocks = self._in_blocks(average.flatten())
        least, most = blocks.aminmax(dim=1, keepdim=True)
        scales = most.where(most >= -least, least)
        relative = blocks / scales.where(scales != 0, 1.0)
        codes = torch.bucketize(relative, (self.values[1:] + self.values[:-1]) / 2, out_int32=True)
        is_skipped = skip.bool()
        self.codes.copy_(self.codes.where(is_skipped, self._without_blocks(codes).to(torch.uint8)))
        self.scales.copy_(self.scales.where(is_skipped, scales.view_as(self.scales)))

    def _in_blocks(self, elements: Tensor) -> Tensor:
        """Return the shard's elements, row by row, as [blocks, elements per block], padded with zeros."""
        size = -(-self.part // self.num_blocks)
        padding = size * self.num_blocks - self.part
        parts = elements.view(-1, self.part)
        return (F.pad(parts, (0, padding)) if padding else parts).view(-1, size)

    def _without_blocks(self, blocks: Tensor) -> Tensor:
        """Invert `_in_blocks`: return the elements in the shape of the shard."""
        parts = blocks.view(-1, self.num_blocks * blocks.shape[1])
        return parts[:, : self.part].reshape(self.codes.shape)
