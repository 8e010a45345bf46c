"""Learning-rate scaling with its reason."""

from __future__ import annotations

import pytest

from trainkit.plan.batch import LrScale, scaled_lr


@pytest.mark.parametrize(
    ("scale", "dp", "base", "lr", "reason"),
    [
        ("none", 8, 1, 3e-4, "optimizer.lr 0.0003, unscaled (optimizer.lr_scale: none)"),
        ("linear", 4, 1, 1.2e-3, "optimizer.lr 0.0003 x 4 = 0.0012: linear in data-parallel size 4 over 1"),
        (
            "linear",
            4,
            8,
            1.5e-4,
            "optimizer.lr 0.0003 x 0.5 = 0.00015: linear in data-parallel size 4 over 8",
        ),
        ("sqrt", 4, 1, 6e-4, "optimizer.lr 0.0003 x 2 = 0.0006: square root of data-parallel size 4 over 1"),
        (
            "sqrt",
            4,
            16,
            1.5e-4,
            "optimizer.lr 0.0003 x 0.5 = 0.00015: square root of data-parallel size 4 over 16",
        ),
        ("sqrt", 1, 1, 3e-4, "optimizer.lr 0.0003 x 1 = 0.0003: square root of data-parallel size 1 over 1"),
    ],
)
def test_scaled_lr(scale: LrScale, dp: int, base: int, lr: float, reason: str) -> None:
    scaled, why = scaled_lr(3e-4, scale, dp, base)
    assert scaled == pytest.approx(lr, rel=1e-15)
    assert why == reason
