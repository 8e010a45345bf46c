"""Finds the layouts that can train a model on N GPUs, fastest first.

All functions in this module are pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from itertools import product
from typing import get_args

from trainkit.cluster.limits import ResourceRequest
from trainkit.cluster.machine import Machine
from trainkit.cluster.target import Target
from trainkit.config.loaded import LoadedConfig
from trainkit.config.running import Recomputation
from trainkit.config.schema import RunConfig
from trainkit.errors import ConfigError, Problem, UsageError
from trainkit.plan.batch import BatchRequest, make_batch
from trainkit.plan.gpus import Gpu, gpu_names, known_gpu, known_gpus, shown_types
from trainkit.plan.launch import Batch, Layout
from trainkit.plan.layout_rules import divisors_of, layout_problems, make_layout
from trainkit.plan.memory import Memory, memory_of
from trainkit.plan.model_shape import ModelShape
from trainkit.plan.step_cost import Cost, cost_of
from trainkit.plan.step_work import StepWork, work_of


@dataclass(frozen=True)
class Hardware:
    """The GPUs for which a layout is planned."""

    gpu: Gpu
    num_gpus: int
    node_size: int
    """Number of GPUs per node."""

    @property
    def num_nodes(self) -> int:
        return self.num_gpus // self.node_size


def find_hardware(
    config: RunConfig, machine: Machine, target: Target, gpu_type: str | None, num_gpus: int | None
) -> Hardware:
    """Return the hardware to plan for.

    The command line takes precedence over the config, and the machine or cluster provides missing values.
    Raises UsageError if the hardware cannot be determined.
    """
    names = [gpu_type] if gpu_type is not None else gpu_names(config, machine, target)
    gpu = known_gpu(names, config.resources)
    if gpu is None:
        raise _unknown(gpu_type, names, machine)
    size = _node_size(config, machine, target, gpu)
    if num_gpus is None:
        return Hardware(gpu, config.resources.most_nodes * size, size)
    size = min(size, num_gpus)
    if num_gpus % size:
        raise UsageError(
            f"--gpus {num_gpus} is not a multiple of {size} GPUs per node",
            hint="use --nodes N --gpus-per-node N instead of --gpus",
        )
    return Hardware(gpu, num_gpus, size)


def _node_size(config: RunConfig, machine: Machine, target: Target, gpu: Gpu) -> int:
    requested = config.resources.gpus_per_node
    if requested != "auto":
        return requested
    if target.cluster is not None:
        request = ResourceRequest.of(config.resources, target.cluster)
        return max((node.num_gpus() for node in request.gpu_nodes), default=gpu.node_size)
    return max(1, machine.num_gpus // config.resources.most_nodes) if machine.num_gpus else gpu.node_size


def _unknown(gpu_type: str | None, names: list[str], machine: Machine) -> UsageError:
    hint = f"--gpu-type takes a name from the driver or from Slurm, such as {', '.join(known_gpus()[:8])}"
    if gpu_type is not None:
        return UsageError(f"--gpu-type {gpu_type}: unknown GPU type", hint=hint)
    if names:
        return UsageError(f"unknown GPU type: {shown_types(names)}", hint=hint)
    message = f"no GPU type to plan for: resources.gpu_type is null, and {machine.gpu_reason}"
    return UsageError(message, hint=hint)


LONG_SEQUENCE = 16_384
"""Minimum sequence length in tokens for which context parallelism is tried even if parallel.cp is 1."""
COMPLEXITY = 0.01
"""Minimum relative speedup for which recomputation or an additional kind of parallelism is worth its
complexity."""


@dataclass(frozen=True)
class Choice:
    """A layout with batch sizes and activation checkpointing, and their estimated memory use and cost."""

    work: StepWork
    hardware: Hardware

    @cached_property
    def memory(self) -> Memory:
        """Return the memory use of the rank that needs the most memory."""
        return memory_of(self.work)

    @cached_property
    def cost(self) -> Cost:
        """Return the cost of one optimizer step."""
        return cost_of(self.work, self.hardware.gpu, self.hardware.node_size)

    @cached_property
    def fit(self) -> str:
        """Return ``fits``, ``tight`` (fits the total, but not the usable GPU memory) or ``no``."""
        if self.memory.peak <= self.hardware.gpu.usable:
            return "fits"
        return "tight" if self.memory.peak <= self.hardware.gpu.memory else "no"

    @cached_property
    def rank(self) -> tuple[int, float]:
        """Return a sort key.

        Choices that fit come first, then tight ones, each sorted by speed; all others follow, sorted by
        memory.
        """
        if self.fit == "no":
            return 2, float(self.memory.peak)
        kinds = sum(degree > 1 for degree in astuple(self.work.layout))
        kinds += self.work.parallel.activation_checkpointing != "none"
        per_token_s = self.cost.step_s / self.work.tokens_per_step
        return int(self.fit == "tight"), per_token_s * (1 + COMPLEXITY * kinds)


def choose(base: StepWork, hardware: Hardware, global_batch_size: int | None) -> list[Choice]:
    """Return the best choice for each layout that the model and the batch size allow, from best to worst.

    `base` determines the sequence length, the pipeline schedule and the maximum number of samples per pass.
    The function chooses activation checkpointing, the device batch size, the number of microbatches and
    ``zero``. Every choice has the given global batch size or, if it is None, the device batch size of `base`
    on every data-parallel rank.
    """
    best = (best_on_layout(base, layout, hardware, global_batch_size) for layout in layouts(base, hardware))
    return sorted((choice for choice in best if choice is not None), key=lambda choice: choice.rank)


def layouts(base: StepWork, hardware: Hardware) -> Iterator[Layout]:
    """Yield the layouts on all GPUs that are possible for the model.

    In such a layout, tp divides the number of key/value heads, and every pipeline stage has a layer. With a
    document mask, pp and cp are 1. With a user's optimizer or ``train.batch_warmup``, pp
    is 1.
    """
    shape, splits_sequence = base.shape, base.layout.cp > 1 or base.seq_len >= LONG_SEQUENCE
    experts = shape.moe.num_experts if shape.moe else 1
    for layout in enumerate_layouts(hardware.num_gpus, hardware.node_size, splits_sequence, experts):
        fits = shape.num_kv_heads % layout.tp == 0 and layout.pp <= shape.num_layers
        if layout.pp > 1 and (base.has_own_optimizer or base.warmup_batch_sizes):
            continue
        if fits and not (base.document_mask and layout.pp * layout.cp > 1):
            yield layout


def enumerate_layouts(
    world_size: int, node_size: int, splits_sequence: bool, num_experts: int = 1
) -> Iterator[Layout]:
    """Yield all layouts of `world_size` processes that keep tensor parallelism within a node.

    The degree cp is 1 unless `splits_sequence` is set. The degree ep divides `num_experts`.
    """
    factors = divisors_of(world_size)
    tps = [tp for tp in factors if tp <= node_size]
    for tp, pp, cp in product(tps, factors, factors if splits_sequence else [1]):
        if world_size % (tp * pp * cp) == 0:
            dp = world_size // (tp * pp * cp)
            for shard in divisors_of(dp):
                for ep in divisors_of(math.gcd(num_experts, shard * cp * tp)):
                    yield Layout(dp // shard, shard, tp, pp, cp, ep)


def best_on_layout(
    base: StepWork, layout: Layout, hardware: Hardware, global_batch_size: int | None
) -> Choice | None:
    """Return the best `Choice` for a layout, which has the lowest `Choice.rank`.

    Returns None if the model cannot be trained with this layout.
    """
    best: Choice | None = None
    works = list(candidate_batches(replace(base, layout=layout), global_batch_size))
    for mode in get_args(Recomputation):  # from no recomputation to the most
        # A mode of activation checkpointing that saves more memory is useful only if it allows a larger
        # batch.
        for index, work in enumerate(works):
            made = work.with_parallel(activation_checkpointing=mode)
            if next(layout_problems(made), None) is not None:
                break
            choice = Choice(made, hardware)
            if best is None or choice.rank < best.rank:
                best = choice
            if choice.fit == "fits":
                works = works[:index]
                break
    return best if best is None or best.fit != "fits" else _with_zero_2(best)


def candidate_batches(work: StepWork, global_batch_size: int | None) -> Iterator[StepWork]:
    """Yield `work` with each possible device batch size, largest first.

    The device batch size of `work` is the upper limit. The yielded work does not use activation
    checkpointing, because not every schedule supports it.
    """
    work = work.with_parallel(activation_checkpointing="none")
    dp = work.layout.dp
    if global_batch_size is None:
        global_batch_size = work.device_batch_size * dp
    if global_batch_size % dp:
        return
    share = global_batch_size // dp
    for samples in reversed(divisors_of(share)):
        divides_all = not any(size % (samples * dp) for size in work.warmup_batch_sizes)
        if samples <= work.device_batch_size and divides_all:
            made = _with_batch(work, samples, share // samples)
            if made is not None:
                yield made


def _with_batch(work: StepWork, samples: int, passes: int) -> StepWork | None:
    """Return `work` with `samples` per pass and `passes` per step, or None if a config rule forbids them."""
    if work.layout.pp == 1:
        made = replace(work, device_batch_size=samples, accumulation_steps=passes)
        return None if next(layout_problems(made), None) is not None else made
    # Prefer at least one microbatch per pipeline rank, so that the pipeline is also full during validation,
    # which does not accumulate gradients.
    pp, counts = work.layout.pp, divisors_of(passes)
    for microbatches in sorted(counts, key=lambda count: (count < pp, abs(count - pp))):
        made = replace(
            work.with_parallel(pp_microbatches=microbatches),
            device_batch_size=samples * microbatches,
            accumulation_steps=passes // microbatches,
        )
        if next(layout_problems(made), None) is None:
            return made
    return None


def _with_zero_2(choice: Choice) -> Choice:
    """Return the choice with ZeRO-2 if it then fits and is faster; otherwise, return the unchanged choice."""
    work = choice.work
    if work.shards == 1 or work.keeps_gathered:
        return choice
    other = Choice(work.with_parallel(zero=2), choice.hardware)
    return other if other.fit == "fits" and other.rank < choice.rank else choice


def configured_layout(
    loaded: LoadedConfig, shape: ModelShape, hardware: Hardware
) -> tuple[Choice | None, list[Problem]]:
    """Return the choice for the config's layout, or None and the problems that rule the layout out."""
    config = loaded.config
    try:
        layout, _ = make_layout(config.parallel, hardware.num_gpus)
        batch = make_batch(BatchRequest.of(loaded), layout, config.data.seq_len)
    except ConfigError as error:
        return None, loaded.located(error.problems)
    work = work_of(config, shape, layout, batch)
    found = loaded.located(layout_problems(work))
    return None if found else Choice(work, hardware), found


def base_work(config: RunConfig, shape: ModelShape, configured: Choice | None) -> StepWork:
    """Return the work from which `choose` derives other layouts.

    The work's device batch size, the upper limit for all layouts, is the config's number of samples per pass.
    """
    if configured is None:
        layout = Layout(tp=config.parallel.tp, pp=config.parallel.pp, cp=config.parallel.cp)
        work = work_of(config, shape, layout, Batch(config.train.device_batch_size, 1, 0, 0))
    else:
        work = configured.work
    return replace(work, device_batch_size=max(1, work.samples_per_pass))
