"""The peak learning rate after scaling over the data-parallel size."""

from __future__ import annotations

import math
from typing import Literal

LrScale = Literal["none", "linear", "sqrt"]


def scaled_lr(lr: float, scale: LrScale, dp: int, base: int) -> tuple[float, str]:
    """The learning rate for `dp` data-parallel processes when `lr` was tuned for `base`, and why.

    Linear: Goyal et al. 2017 (arXiv 1706.02677). Square root, for Adam: Malladi et al. 2022
    (arXiv 2205.10287).
    """
    if scale == "none":
        return lr, f"optimizer.lr {lr:g} as it is (optimizer.lr_scale: none)"
    factor = dp / base if scale == "linear" else math.sqrt(dp / base)
    scaled = lr * factor
    rule = "linear in" if scale == "linear" else "square root of"
    reason = f"optimizer.lr {lr:g} x {factor:g} = {scaled:g}: {rule} data-parallel size {dp} over {base}"
    return scaled, reason
