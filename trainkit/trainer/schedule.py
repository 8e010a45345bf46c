"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from trainkit.config.training import ScheduleConfig


def learning_rate(step: int, total_steps: int, peak_lr: float, config: ScheduleConfig) -> float:
    """The rate of one step; steps count from 1, and the last one is `total_steps`.

    Warm-up rises linearly and reaches the peak at step `warmup_steps`; `wsd` (warm-up, stable, decay;
    arXiv 2404.06395) stays there and falls linearly over the last `decay_steps`.
    """
    if step <= config.warmup_steps:
        return peak_lr * step / config.warmup_steps
    floor = peak_lr * config.min_lr_ratio
    if config.name == "constant":
        return peak_lr
    start = config.warmup_steps
    if config.name == "wsd":
        decay_steps = config.decay_steps or max(1, total_steps // 5)
        start = max(start, total_steps - decay_steps)
    if step <= start:
        return peak_lr
    progress = min(1.0, (step - start) / max(1, total_steps - start))
    if config.name == "cosine":
        return floor + (peak_lr - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak_lr + (floor - peak_lr) * progress
