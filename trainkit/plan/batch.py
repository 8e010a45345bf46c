"""Computes batch sizes, ``global = device x data-parallel x accumulation``, and the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from trainkit.config.loaded import LoadedConfig
from trainkit.config.running import ParallelConfig
from trainkit.config.training import ScheduleConfig, WarmupStage
from trainkit.errors import ConfigError, Problem
from trainkit.formats import plural
from trainkit.plan.launch import Batch, BatchStage, Layout
from trainkit.plan.layout_rules import divisors_of, microbatch_problems

GLOBAL, DEVICE, MICROBATCHES, WARMUP = (
    "train.global_batch_size",
    "train.device_batch_size",
    "parallel.pp_microbatches",
    "train.batch_warmup",
)
NEAR = 1 / 8
"""Largest relative change of the global batch size that is accepted to keep a larger device batch."""


class BatchRequest(NamedTuple):
    """The batch sizes in a config; sizes that the user did not set are adapted to the layout."""

    device_batch_size: int
    global_batch_size: int | None
    parallel: ParallelConfig
    fixed: frozenset[str]
    """Keys of the batch sizes that the user set explicitly."""
    warmup: tuple[WarmupStage, ...] = ()
    """The global batch sizes of the first steps; these sizes never change."""

    @classmethod
    def of(cls, loaded: LoadedConfig) -> BatchRequest:
        """Return the batch sizes set in a config."""
        train, parallel = loaded.config.train, loaded.config.parallel
        fixed = frozenset(key for key in (GLOBAL, DEVICE, MICROBATCHES) if loaded.set_by_user(key))
        return cls(train.device_batch_size, train.global_batch_size, parallel, fixed, train.batch_warmup)


def make_batch(request: BatchRequest, layout: Layout, seq_len: int) -> Batch:
    """Return the batch of one optimizer step for a layout: the requested batch, or the closest one that fits.

    The global batch size is kept if it can be divided evenly among processes, and sizes that the user set
    never change. Raises ConfigError with suggested sizes if the samples of a step cannot be divided evenly.
    """
    device, total = request.device_batch_size, request.global_batch_size
    if request.warmup and (layout.pp > 1 or total is None):
        raise ConfigError([_warmup_problem(layout)])
    if total is None:
        candidates = [(device, 1)]
    else:
        # Do not try larger device batches than configured, because they might not fit in memory.
        tried = range(device if DEVICE in request.fixed else 1, device + 1)
        pairs = (pair for size in tried for pair in _accumulations(request, layout, size))
        candidates = sorted(set(pairs), key=lambda pair: _preference(request, layout.dp, *pair))
    if candidates and request.warmup:
        sizes = {size for size, _ in candidates if all(_fits(one, size, layout.dp) for one in request.warmup)}
        if not sizes:
            raise ConfigError([_stage_problem(request, layout.dp)])
        candidates = [pair for pair in candidates if pair[0] in sizes]
    for size, steps in candidates:
        for microbatches in _microbatches(request, layout, size):
            parallel = request.parallel.model_copy(update={"pp_microbatches": microbatches})
            if next(microbatch_problems(layout, parallel, size, steps), None) is None:
                return _with_warmup(_batch(layout, size, steps, seq_len, microbatches), request, layout.dp)
    if not candidates:
        raise ConfigError([_problem(request, layout.dp)])
    # If no number of microbatches is valid, `microbatch_problems` reports the problem later.
    return _batch(layout, *candidates[0], seq_len, request.parallel.pp_microbatches)


def _batch(layout: Layout, size: int, steps: int, seq_len: int, microbatches: int) -> Batch:
    total = size * layout.dp * steps
    return Batch(size, steps, total, total * seq_len, microbatches if layout.pp > 1 else None)


def _with_warmup(batch: Batch, request: BatchRequest, dp: int) -> Batch:
    """Add the stages of the warm-up to a batch whose device batch size divides all of them."""
    stages, step = list[BatchStage](), 0
    for stage in request.warmup:
        step += stage.steps
        accumulation = stage.global_batch_size // (batch.device_batch_size * dp)
        stages.append(BatchStage(step, accumulation, stage.global_batch_size))
    return replace(batch, warmup=tuple(stages)) if stages else batch


def _fits(stage: WarmupStage, size: int, dp: int) -> bool:
    return stage.global_batch_size % (size * dp) == 0


def _warmup_problem(layout: Layout) -> Problem:
    """Return the problem for a warm-up that is impossible for any batch size."""
    if layout.pp > 1:
        message = f"is set, but parallel.pp is {layout.pp}: a pipeline needs equal batches in all steps"
        hint = "remove train.batch_warmup, or use parallel.dp_shard or parallel.tp"
        return Problem(WARMUP, message, hint=hint)
    message = f"is set, but {GLOBAL} is null, so steps have no accumulation"
    return Problem(WARMUP, message, hint=f"set {GLOBAL}, which applies after the warm-up")


def _stage_problem(request: BatchRequest, dp: int) -> Problem:
    """Return the problem for the first stage of a warm-up that cannot be divided among the processes."""
    size = request.device_batch_size if DEVICE in request.fixed else 1
    stage = next(stage for stage in request.warmup if not _fits(stage, size, dp))
    total, unit = stage.global_batch_size, size * dp
    below = total // unit * unit
    works = " or ".join(str(number) for number in (below, below + unit) if number)
    processes = "1 data-parallel process" if dp == 1 else f"{dp} data-parallel processes"
    shown = f"{unit} ({processes} x {DEVICE} {size})" if size > 1 else processes
    message = f"contains global_batch_size {total}, which is not a multiple of {shown}"
    return Problem(WARMUP, message, hint=f"global_batch_size = {works} works")


def _accumulations(request: BatchRequest, layout: Layout, size: int) -> Iterator[tuple[int, int]]:
    """Yield the device batch size with each number of accumulation steps to try, exact matches first."""
    total, at_once = request.global_batch_size or 1, size * layout.dp
    if total % at_once == 0:
        yield size, total // at_once
    if GLOBAL not in request.fixed:
        reach = 1 if layout.pp == 1 else 4 * layout.pp  # a pipeline supports only some microbatch counts
        near = total // at_once
        yield from ((size, steps) for steps in range(max(1, near - reach), near + reach + 1))


def _preference(request: BatchRequest, dp: int, size: int, steps: int) -> tuple[float, ...]:
    """Return a sort key: first the requested global batch, then close sizes, then large device batches."""
    wanted = request.global_batch_size or 1
    difference = abs(size * steps * dp - wanted) / wanted
    if difference == 0:
        return 0, -size
    return (1, -size, difference) if difference <= NEAR else (2, difference, -size)


def _microbatches(request: BatchRequest, layout: Layout, size: int) -> list[int]:
    wanted = request.parallel.pp_microbatches
    if layout.pp == 1 or MICROBATCHES in request.fixed:
        return [wanted]
    return sorted(divisors_of(size), key=lambda count: (abs(count - wanted), count))


def _problem(request: BatchRequest, dp: int) -> Problem:
    """Return the problem for a global batch that cannot be divided among the processes.

    The hint lists the closest global batch sizes that can be divided evenly.
    """
    total, size = request.global_batch_size or 1, request.device_batch_size
    processes = "1 data-parallel process" if dp == 1 else f"{dp} data-parallel processes"
    step, shown = dp, processes
    if DEVICE in request.fixed:
        step, shown = size * dp, f"{size * dp} ({processes} x {DEVICE} {size})"
    below = total // step * step
    works = " or ".join(str(number) for number in (below, below + step) if number)
    message = f"is {total}, which is not a multiple of {shown}"
    return Problem(GLOBAL, message, hint=f"{GLOBAL} = {works} works")


def batch_changes(batch: Batch, request: BatchRequest) -> list[str]:
    """Return the differences between a batch and the batch sizes in the config."""
    derived = {
        GLOBAL: (batch.global_batch_size, request.global_batch_size or batch.global_batch_size),
        DEVICE: (batch.device_batch_size, request.device_batch_size),
        MICROBATCHES: (batch.pp_microbatches, batch.pp_microbatches and request.parallel.pp_microbatches),
    }
    return [f"{key} is {value} instead of {was}" for key, (value, was) in derived.items() if value != was]


def batch_reason(batch: Batch, request: BatchRequest, dp: int) -> str:
    """Describe how a batch is composed and how it differs from the config's batch sizes."""
    notes = batch_changes(batch, request)
    sentence = (
        f"{plural(batch.global_batch_size, 'sample')} per step = {batch.device_batch_size} per process "
        f"x {dp} data-parallel x {batch.accumulation_steps} accumulation"
    )
    sentence += batch.warmup_text
    return f"{sentence}; {', '.join(notes)} to fit this layout" if notes else sentence


LrScale = Literal["none", "linear", "sqrt"]


def scaled_lr(lr: float, scale: LrScale, dp: int, base: int) -> tuple[float, str]:
    """Scale a learning rate from `base` to `dp` data-parallel processes; return the new rate and the reason.

    ``linear`` follows Goyal et al. 2017 (arXiv 1706.02677). ``sqrt``, for Adam, follows Malladi et al. 2022
    (arXiv 2205.10287).
    """
    if scale == "none":
        return lr, f"optimizer.lr {lr:g}, unscaled (optimizer.lr_scale: none)"
    factor = dp / base if scale == "linear" else math.sqrt(dp / base)
    scaled = lr * factor
    rule = "linear in" if scale == "linear" else "square root of"
    reason = f"optimizer.lr {lr:g} x {factor:g} = {scaled:g}: {rule} data-parallel size {dp} over {base}"
    return scaled, reason


OwnSchedule = Callable[[int, int], float]
"""Returns the fraction of the peak learning rate for a step and the number of steps."""


def learning_rate(
    step: int,
    total_steps: int,
    peak_lr: float,
    config: ScheduleConfig,
    own: OwnSchedule | None = None,
) -> float:
    """Return the learning rate for a step; steps are numbered from 1 to `total_steps`.

    Warmup is linear and reaches the peak learning rate at step `warmup_steps`. The schedule `wsd` (warmup,
    stable, decay; arXiv 2404.06395) stays at the peak learning rate and then decays linearly over the last
    `decay_steps`. `own` is the user's schedule if `config` names one.
    """
    if step <= config.warmup_steps:
        return peak_lr * step / config.warmup_steps
    if own is not None:
        return peak_lr * own(step, total_steps)
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
