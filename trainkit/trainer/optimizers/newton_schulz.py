"""Orthogonalize matrices by the Newton-Schulz iteration of Muon (arXiv 2502.16982), in a chosen precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from trainkit.config.training import NewtonSchulzPrecision
from trainkit.plan.muon import ITERATIONS

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic polynomial that is applied to the singular values in each iteration."""
EPS = 1e-7
"""Added to the norm, so that a matrix of zeros stays zero."""
TF32_DROPPED_BITS = 13
"""Number of mantissa bits of float32 that TF32 drops."""


def orthogonalize_(matrices: Tensor, precision: NewtonSchulzPrecision = "fp32") -> Tensor:
    """Set all singular values of matrices to about 1, in place, and return the matrices.

    `matrices` is float32 [batch, m, n], with m <= n.
    """
    matrices.div_(torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True).add_(EPS))
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16() if precision == "bf16" else matrices
    following = torch.empty_like(x)
    with _precision_of_products(precision):
        for _ in range(ITERATIONS):
            gram = _product(x, x.mT, precision)
            polynomial = _add_product(gram, b, gram, gram, c, precision)
            del gram
            _add_product(x, a, polynomial, x, 1.0, precision, out=following)
            del polynomial
            x, following = following, x
    return matrices.copy_(x)


@contextmanager
def _precision_of_products(precision: NewtonSchulzPrecision) -> Iterator[None]:
    """Multiply float32 matrices in TF32 for ``tf32x3``, else in float32, whatever `precision.tf32` says."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32x3" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _product(left: Tensor, right: Tensor, precision: NewtonSchulzPrecision) -> Tensor:
    if precision != "tf32x3":
        return torch.bmm(left, right)
    left_high, left_low = split_for_tf32(left)
    right_high, right_low = split_for_tf32(right)
    found = torch.bmm(left_low, right_high)  # The smallest terms are added first.
    found.baddbmm_(left_high, right_low)
    return found.baddbmm_(left_high, right_high)


def _add_product(
    addend: Tensor,
    factor: float,
    left: Tensor,
    right: Tensor,
    scale: float,
    precision: NewtonSchulzPrecision,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``factor * addend + scale * left @ right``, in `out` unless it is None."""
    out = torch.empty_like(addend) if out is None else out
    if precision != "tf32x3":
        return torch.baddbmm(addend, left, right, beta=factor, alpha=scale, out=out)
    return torch.add(_product(left, right, precision).mul_(scale), addend, alpha=factor, out=out)


def split_for_tf32(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return a float32 tensor rounded to TF32, and the rest, which TF32 represents with a small error.

    The product of two tensors is nearly as accurate as in float32 if the product of the two rests is omitted.
    """
    bits = values.contiguous().view(torch.int32)
    half = 1 << (TF32_DROPPED_BITS - 1)
    high = ((bits + half) & -(1 << TF32_DROPPED_BITS)).view(torch.float32)
    return high, values - high
