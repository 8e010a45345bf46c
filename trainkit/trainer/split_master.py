"""Store a float32 master weight in two halves: the bf16 weight that computes, and 16 more bits.

The upper half is the master weight rounded to bf16, to nearest and ties to even, so the model computes with
the same weights as with a separate cast. The lower half is the difference of the two bit patterns as int16.
Together, the halves take 4 bytes per element, and a float32 master weight with a separate cast takes 6.

Joining the halves returns the master weight exactly, with two exceptions. A master weight halfway between two
bf16 values may be 2**15 units in the last place above its rounded value, which int16 cannot represent; such
a weight moves by one unit toward the rounded value. NaN stays NaN, but its sign and payload may change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.trainer.models.model import Weight, set_tensor, shared_names
from trainkit.trainer.torch_private import copy_each

SPLIT_DTYPE = torch.bfloat16
"""The compute dtype whose weights are upper halves: only bf16 has the exponent of float32."""
COPY_ELEMENTS = 1 << 22
"""Number of elements split at a time when values are loaded."""


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper and lower half of a float32 tensor, both as int16."""
    upper = master.to(SPLIT_DTYPE).view(torch.int16)
    rounded = upper.to(torch.int32)
    rounded <<= 16
    lower = master.view(torch.int32) - rounded
    return upper, lower.clamp_(-0x8000, 0x7FFF).to(torch.int16)


def join(upper: Tensor, lower: Tensor) -> Tensor:
    """Return the float32 tensor with these halves, which are both int16."""
    bits = upper.to(torch.int32)
    bits <<= 16
    bits += lower
    return bits.view(torch.float32)


@dataclass(frozen=True)
class SplitMaster:
    """A float32 master weight that is stored in two halves."""

    weight: Tensor
    """The upper half, as bf16."""
    lower: Tensor
    """The lower half, as int16."""

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def halves(self) -> tuple[Tensor, Tensor]:
        """Return the upper and lower half, both as int16."""
        return self.weight.view(torch.int16), self.lower

    def __getitem__(self, index: Any) -> SplitMaster:
        return SplitMaster(self.weight[index], self.lower[index])

    def numel(self) -> int:
        return self.weight.numel()

    def split(self, rows: int) -> list[SplitMaster]:
        """Split the master weight into groups of `rows` rows each; the results are views of its halves."""
        pieces = zip(torch.split(self.weight, rows), torch.split(self.lower, rows), strict=True)
        return [SplitMaster(*halves) for halves in pieces]

    def join(self) -> Tensor:
        """Return a copy of the master weight in float32."""
        return join(*self.halves)

    def copy_(self, master: Tensor) -> None:
        """Store a tensor of any floating-point dtype and device, converting some rows at a time."""
        for halves, piece in row_pieces(COPY_ELEMENTS, self, master):
            for half, value in zip(halves.halves, split(piece.to(self.lower.device).float()), strict=True):
                half.copy_(value)


def master_of(weight: Weight) -> Tensor | SplitMaster:
    """Return the float32 values of a weight, which a checkpoint contains."""
    param = weight.param.detach()
    return param if weight.lower is None else SplitMaster(param, weight.lower)


def row_pieces(max_elements: int, whole: Tensor | SplitMaster, *others: Any) -> Iterator[tuple[Any, ...]]:
    """Yield matching views of all tensors, with up to `max_elements` elements, or one row, per view."""
    if whole.numel() <= max_elements:
        yield whole, *others
        return
    rows = max(1, max_elements // whole.shape[1:].numel())
    yield from zip(*(item.split(rows) for item in (whole, *others)), strict=True)


@contextmanager
def in_float32(weights: Sequence[Tensor | SplitMaster]) -> Iterator[list[Tensor]]:
    """Join the split master weights among `weights`, and store the updated values when the context exits.

    The number of kernels does not depend on the number of weights if all of them are contiguous.
    """
    masters = [weight for weight in weights if isinstance(weight, SplitMaster)]
    is_flat = len(masters) > 1 and all(master.weight.is_contiguous() for master in masters)
    halves = [[half.view(-1) for half in master.halves] for master in masters] if is_flat else []
    uppers, lowers = [upper for upper, _ in halves], [lower for _, lower in halves]
    if is_flat:
        flat = join(torch.cat(uppers), torch.cat(lowers))
        sizes = [master.numel() for master in masters]
        joined = [part.view(item.shape) for part, item in zip(torch.split(flat, sizes), masters, strict=True)]
    else:
        joined = [master.join() for master in masters]
    values = iter(joined)
    yield [next(values) if isinstance(weight, SplitMaster) else weight for weight in weights]
    if is_flat:
        upper, lower = split(flat)
        copy_each([*uppers, *lowers], [*torch.split(upper, sizes), *torch.split(lower, sizes)])
    else:
        for master, value in zip(masters, joined, strict=True):
            master.copy_(value)


@torch.no_grad()
def split_weights(
    model: nn.Module, keep: tuple[type[nn.Module], ...] = (), *, rounds_gradients: bool = True
) -> dict[nn.Parameter, Tensor]:
    """Replace a model's float32 parameters with their upper halves; return a mapping to the lower halves.

    Modules whose type is in `keep` stay in float32. Each float32 parameter is freed before the next one is
    split. As with `cast_weights`, the gradients of all passes in a step are summed in float32, here in the
    ``grad`` of the new parameters. If `rounds_gradients`, the gradient of each pass is first rounded to bf16.
    """
    names = shared_names(model)
    lowers: dict[nn.Parameter, Tensor] = {}
    while names:
        master, own = names.popitem()
        owners = [model.get_submodule(name.rpartition(".")[0]) for name in own]
        if master.dtype != torch.float32 or any(isinstance(owner, keep) for owner in owners):
            continue
        weight = torch.empty_like(master, dtype=SPLIT_DTYPE, requires_grad=False)
        halves = SplitMaster(weight, torch.empty_like(master, dtype=torch.int16, requires_grad=False))
        halves.copy_(master)
        param = nn.Parameter(weight, requires_grad=master.requires_grad)
        if param.requires_grad and not rounds_gradients:
            param.grad_dtype = torch.float32
        elif param.requires_grad:
            param.grad_dtype = None  # any dtype
            param.register_hook(_rounded)  # type: ignore[no-untyped-call]
            param.register_post_accumulate_grad_hook(_gradient_to_float32)  # type: ignore[no-untyped-call]
        for name in own:
            set_tensor(model, name, param)
        lowers[param] = halves.lower
    return lowers


def _rounded(gradient: Tensor) -> Tensor:
    """Round the gradient of a pass to bf16, as torch does for a parameter that takes only its own dtype."""
    return gradient if gradient.dtype == SPLIT_DTYPE else gradient.to(SPLIT_DTYPE).to(gradient.dtype)


def _gradient_to_float32(param: Tensor) -> None:
    """Convert the gradient of a step's first pass to float32; torch adds the gradients of later passes."""
    assert param.grad is not None
    if param.grad.dtype != torch.float32:
        param.grad = param.grad.float()
