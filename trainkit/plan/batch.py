"""Batch arithmetic: ``global = device x data parallel x accumulation`` samples."""

from __future__ import annotations

import math
from typing import Literal

from trainkit.errors import ConfigError, Problem
from trainkit.plan.launch import Batch


def make_batch(device_batch_size: int, global_batch_size: int | None, dp: int, seq_len: int) -> Batch:
    """The batch of one optimizer step over `dp` data-parallel processes.

    Raises ConfigError when the global batch is not a multiple of what the processes read at once; the
    hint names sizes that would do.
    """
    at_once = device_batch_size * dp
    if global_batch_size is None:
        global_batch_size = at_once
    if global_batch_size % at_once:
        processes = "1 data-parallel process" if dp == 1 else f"{dp} data-parallel processes"
        message = (
            f"is {global_batch_size}, which is not a multiple of the {at_once} samples that "
            f"{processes} x train.device_batch_size {device_batch_size} read at once"
        )
        hint = _hint(device_batch_size, global_batch_size, dp)
        raise ConfigError([Problem("train.global_batch_size", message, hint=hint)])
    return Batch(
        device_batch_size=device_batch_size,
        accumulation_steps=global_batch_size // at_once,
        global_batch_size=global_batch_size,
        tokens_per_step=global_batch_size * seq_len,
    )


def batch_reason(batch: Batch, dp: int) -> str:
    """The arithmetic of a batch as one sentence."""
    return (
        f"{batch.global_batch_size} samples a step = {batch.device_batch_size} at once "
        f"x {dp} data-parallel x {batch.accumulation_steps} accumulation"
    )


def fitting_global_sizes(device_batch_size: int, global_batch_size: int, dp: int) -> list[int]:
    """The multiples of what is read at once next to a global batch size."""
    at_once = device_batch_size * dp
    below = global_batch_size // at_once * at_once
    return [size for size in (below, below + at_once) if size > 0]


def fitting_device_sizes(device_batch_size: int, global_batch_size: int, dp: int) -> list[int]:
    """The nearest device batch sizes, one smaller and one larger, that divide the global batch."""
    if global_batch_size % dp:
        return []
    share = global_batch_size // dp
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    smaller = [size for size in sizes if size < device_batch_size][-1:]
    larger = [size for size in sizes if size > device_batch_size][:1]
    return smaller + larger


def _hint(device_batch_size: int, global_batch_size: int, dp: int) -> str:
    global_sizes = " or ".join(map(str, fitting_global_sizes(device_batch_size, global_batch_size, dp)))
    hint = f"train.global_batch_size = {global_sizes} would do"
    device_sizes = fitting_device_sizes(device_batch_size, global_batch_size, dp)
    if device_sizes:
        hint += f", or train.device_batch_size = {' or '.join(map(str, device_sizes))}"
    return hint


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
