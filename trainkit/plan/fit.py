"""Whether a run fits into the memory of its GPUs, before it is started. Pure."""

from __future__ import annotations

from itertools import islice

from trainkit.config.loaded import LoadedConfig
from trainkit.errors import Problem
from trainkit.plan.advice import advise
from trainkit.plan.choices import Choice
from trainkit.plan.cluster import Target
from trainkit.plan.device_memory import Gpu, gib
from trainkit.plan.hardware import Hardware, gpu_names, known_gpu
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.machine import Machine
from trainkit.plan.model_shape import ModelShape
from trainkit.plan.why import set_flags, settings
from trainkit.plan.workload import workload_of

MOST_ADVICE = 2


def judge_memory(
    loaded: LoadedConfig, plan: LaunchPlan, shape: ModelShape, machine: Machine, target: Target
) -> tuple[str | None, Problem | None]:
    """A sentence about the memory of a run, and the problem where it is certain not to fit.

    Neither where the memory of its GPUs is not known. Of types that go by one name the largest counts.
    """
    gpu = known_gpu(gpu_names(loaded.config, machine, target))
    if gpu is None:
        return None, None
    hardware = Hardware(gpu, plan.world_size, plan.workers_per_node)
    choice = Choice(workload_of(loaded.config, shape, plan.layout, plan.batch), hardware)
    if choice.memory.peak <= gpu.most_memory:
        return _words(choice, gpu), None
    return None, _problem(loaded, choice, gpu)


def _words(choice: Choice, gpu: Gpu) -> str:
    peak = choice.memory.peak
    words = f"about {gib(peak)} of the {gib(gpu.memory)} of each {gpu.name} ({peak / gpu.memory:.0%})"
    return words if peak <= gpu.usable else f"{words}: little is left for what cannot be foreseen"


def _problem(loaded: LoadedConfig, choice: Choice, gpu: Gpu) -> Problem:
    """What takes most decides which key it is about."""
    worst, work = choice.memory.at_worst, choice.work
    state = worst.params + worst.gradients + worst.optimizer
    if state > gpu.most_memory or state > worst.total / 2:
        key, value = "parallel.dp_shard", work.layout.dp_shard
        most = f"{gib(state)} of it weights, gradients and optimizer state"
    else:
        key, value = "train.device_batch_size", work.device_batch_size
        most = f"{gib(worst.activations + worst.loss)} of it activations and loss"
    message = (
        f"is {value}, with which a GPU needs about {gib(choice.memory.peak)} ({most}), but {_limit(gpu)}"
    )
    return loaded.problem(key, message, _hint(loaded, choice))


def _limit(gpu: Gpu) -> str:
    if gpu.most_memory > gpu.memory:
        return f"even the largest GPU of that name has {gib(gpu.most_memory)}"
    return f"{gpu.name} has {gib(gpu.memory)}"


def _hint(loaded: LoadedConfig, choice: Choice) -> str:
    found = islice(advise(choice, loaded.config.train.global_batch_size), MOST_ADVICE)
    parts = []
    for advice in found:
        flags = " ".join(set_flags(settings(advice.choice, loaded.config)))
        more = advice.choice.hardware.num_gpus
        where = f" on {more} GPUs" if more != choice.hardware.num_gpus else ""
        parts.append(f"{flags or 'the same'}{where} needs {gib(advice.choice.memory.peak)}")
    hint = ", or ".join(parts)
    return (
        f"{hint}; `trainkit plan` lists more" if hint else "`trainkit plan --gpus N` tells how many would do"
    )
