"""Define a linear layer that adds the gradient of its weight to a float32 sum, without rounding the gradient.

In a 16-bit dtype, PyTorch rounds each weight gradient to that dtype before adding the gradient to a float32
sum. `Linear` instead lets the matrix product add to the sum: a microbatch reads and writes only the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_linears: WeakValueDictionary[int, Linear] = WeakValueDictionary()
"""Maps the key of each `Linear` that sums its gradient to the layer, because compiled code cannot refer to a
layer."""
_keys = count()


class Linear(nn.Linear):
    """A linear layer that can sum its weight's gradient in float32; see `sum_in_float32`."""

    _masters: Sequence[nn.Parameter] = ()
    """The float32 master of the weight, if any; in a list, because a module registers its own parameters."""
    _key: Tensor | None = None
    """The layer's key in `_linears`; a tensor, because torch.compile would compile each layer separately for
    an integer."""

    def sum_in_float32(self, master: nn.Parameter | None = None) -> None:
        """Add all gradients of the weight to the float32 ``grad`` of `master`.

        If `master` is None, the sum is the ``grad`` of the weight, whose `grad_dtype` must then be float32.
        Hooks on the weight are called as usual, but find no gradient in a weight that has a master.
        """
        key = next(_keys)
        _linears[key], self._key = self, torch.tensor(key, device="cpu")
        self._masters = [] if master is None else [master]

    def forward(self, x: Tensor) -> Tensor:
        # The compiler would drop an operation that returns only an unused gradient of the input.
        if self._key is None or not x.requires_grad:
            return super().forward(x)
        out: Tensor = _SummedLinear.apply(x, self.weight, self.bias, self._key)  # type: ignore[no-untyped-call]
        return out


class _SummedLinear(torch.autograd.Function):
    """Computes `F.linear`; the backward pass adds the weight's gradient to a sum instead of returning it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, key: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, key)
        ctx.has_bias = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, key = ctx.saved_tensors
        # Only compiled code needs the operation, because the compiler cannot trace the search for the sum.
        pass_back = _pass_back_compiled if torch.compiler.is_compiling() else _pass_back
        bias_grad = grad.flatten(0, -2).sum(0) if ctx.has_bias else None
        if not ctx.needs_input_grad[1]:  # the weight is frozen
            return grad @ weight, None, bias_grad, None
        return pass_back(grad, x, weight, key), None, bias_grad, None


def _pass_back(grad: Tensor, x: Tensor, weight: Tensor, key: Tensor) -> Tensor:
    """Add the weight's gradient to the sum of a layer, and return the gradient of the layer's input."""
    rows = grad.flatten(0, -2)
    linear = _linears[int(key)]
    owner = linear._masters[0] if linear._masters else linear.weight
    owner.grad = plus_product(owner.grad, rows.t(), x.flatten(0, -2))
    return (rows @ weight).view(x.shape)


_pass_back_compiled = torch.library.custom_op("trainkit::pass_back", _pass_back, mutates_args=())


@_pass_back_compiled.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, key: Tensor) -> Tensor:
    return grad.new_empty(x.shape)


def plus_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Return a float32 matrix `total`, changed in place, plus left @ right; None counts as zero.

    The product is not rounded to the dtype of the factors.
    """
    if left.device.type != "cuda":  # CPUs have no product of 16-bit matrices with a float32 result
        left, right = left.float(), right.float()
        return left @ right if total is None else total.add_(left @ right)
    if total is None:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
