"""Checks before the start whether a run fits in GPU memory, and suggests changes if not. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from trainkit.cluster.units import gib
from trainkit.config.loaded import LoadedConfig
from trainkit.errors import Problem
from trainkit.plan.gpus import Gpu
from trainkit.plan.hardware import Hardware
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.layouts.choices import MODES, Choice, candidate_batches, choose, violates_rules
from trainkit.plan.layouts.table import set_flags, settings
from trainkit.plan.model_shape import ModelShape
from trainkit.plan.step_work import work_of

MAX_NODES = 512
"""Larger clusters are not tried."""


@dataclass(frozen=True)
class Advice:
    """A change that makes the run fit."""

    what: str
    """The change, as a hint names it."""
    choice: Choice


def advise(requested: Choice, global_batch_size: int | None) -> Iterator[Advice]:
    """Changes that make a run fit, the smallest first.

    They are activation checkpointing, a smaller batch, another layout, more GPUs. Offload comes last: it
    saves the most memory but is slow.
    """
    yield from _on_same_layout(requested, global_batch_size)
    fitting = [
        found
        for found in choose(requested.work, requested.hardware, global_batch_size)
        if found.fit == "fits"
    ]
    if fitting:
        yield Advice("another layout", fitting[0])
        return
    more = fewest_gpus(requested, global_batch_size)
    if more is not None:
        yield Advice(f"{more.hardware.num_gpus} GPUs", more)
    offloaded = choose(requested.work.with_parallel(offload=True), requested.hardware, global_batch_size)
    if offloaded and offloaded[0].fit == "fits":
        yield Advice("parallel.offload", offloaded[0])


def _on_same_layout(requested: Choice, global_batch_size: int | None) -> Iterator[Advice]:
    mode = requested.work.parallel.activation_checkpointing
    for stronger in MODES[MODES.index(mode) + 1 :]:
        work = requested.work.with_parallel(activation_checkpointing=stronger)
        choice = Choice(work, requested.hardware)
        if not violates_rules(work) and choice.fit == "fits":
            yield Advice(f"parallel.activation_checkpointing: {stronger}", choice)
            break
    for smaller in candidate_batches(requested.work, global_batch_size):
        work = smaller.with_parallel(activation_checkpointing=mode)
        if work.samples_per_pass < requested.work.samples_per_pass and not violates_rules(work):
            choice = Choice(work, requested.hardware)
            if choice.fit == "fits":
                yield Advice(f"train.device_batch_size: {work.device_batch_size}", choice)
                break


def fewest_gpus(requested: Choice, global_batch_size: int | None) -> Choice | None:
    """The best choice on the fewest GPUs that fit; None if none fits or the batch is too small."""
    for hardware in _sizes(requested.hardware):
        found = choose(requested.work, hardware, global_batch_size)
        if found and found[0].fit == "fits":
            return found[0]
    return None


def _sizes(hardware: Hardware) -> Iterator[Hardware]:
    """The sizes to try: parts of a node, then nodes in powers of two and the midpoints between them."""
    size = max(hardware.node_size, hardware.gpu.node_size)
    for num_gpus in range(1, size + 1):
        if size % num_gpus == 0:
            yield replace(hardware, num_gpus=num_gpus, node_size=num_gpus)
    nodes = 2
    while nodes <= MAX_NODES:
        yield replace(hardware, num_gpus=nodes * size, node_size=size)
        if nodes % 2 == 0:
            yield replace(hardware, num_gpus=3 * nodes // 2 * size, node_size=size)
        nodes *= 2


MAX_ADVICE = 2


def check_memory(
    loaded: LoadedConfig, plan: LaunchPlan, shape: ModelShape, gpu: Gpu
) -> tuple[str | None, Problem | None]:
    """A sentence about the memory of a run, or the problem if it certainly does not fit.

    If a name has variants, the one with the most memory counts.
    """
    hardware = Hardware(gpu, plan.world_size, plan.workers_per_node)
    choice = Choice(work_of(loaded.config, shape, plan.layout, plan.batch), hardware)
    if choice.memory.peak <= gpu.most_memory:
        return _memory_text(choice, gpu), None
    return None, _problem(loaded, choice, gpu)


def _memory_text(choice: Choice, gpu: Gpu) -> str:
    peak = choice.memory.peak
    text = f"about {gib(peak)} of the {gib(gpu.memory)} of each {gpu.name} ({peak / gpu.memory:.0%})"
    return text if peak <= gpu.usable else f"{text}: little headroom is left"


def _problem(loaded: LoadedConfig, choice: Choice, gpu: Gpu) -> Problem:
    """The problem of a run that does not fit, for the key that affects the largest part."""
    worst, work = choice.memory.at_peak, choice.work
    state = worst.params + worst.gradients + worst.optimizer
    if state > gpu.most_memory or state > worst.total / 2:
        key, value = "parallel.dp_shard", work.layout.dp_shard
        most = f"{gib(state)} for weights, gradients and optimizer state"
    else:
        key, value = "train.device_batch_size", work.device_batch_size
        most = f"{gib(worst.activations + worst.loss)} for activations and loss"
    message = f"is {value}: each GPU needs about {gib(choice.memory.peak)} ({most}), but {_limit(gpu)}"
    return loaded.problem(key, message, _hint(loaded, choice))


def _limit(gpu: Gpu) -> str:
    if gpu.most_memory > gpu.memory:
        return f"even the largest GPU with that name has {gib(gpu.most_memory)}"
    return f"{gpu.name} has {gib(gpu.memory)}"


def _hint(loaded: LoadedConfig, choice: Choice) -> str:
    found = islice(advise(choice, loaded.config.train.global_batch_size), MAX_ADVICE)
    parts = []
    for advice in found:
        flags = " ".join(set_flags(settings(advice.choice, loaded.config)))
        more = advice.choice.hardware.num_gpus
        where = f" on {more} GPUs" if more != choice.hardware.num_gpus else ""
        parts.append(f"{flags or 'the same config'}{where} needs {gib(advice.choice.memory.peak)}")
    hint = ", or ".join(parts)
    return (
        f"{hint}; `trainkit plan` lists more"
        if hint
        else "`trainkit plan --gpus N` shows how many GPUs are enough"
    )
