"""Suggests config changes if no layout fits into GPU memory, and formats layouts as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from operator import attrgetter
from typing import Literal, TypedDict

from trainkit.capabilities.layouts.choices import Choice, Hardware, choose
from trainkit.capabilities.layouts.effective_time import EffectiveTime
from trainkit.config.schema import RunConfig
from trainkit.formats import GIB, MIB, plural, size, table
from trainkit.plan.launch import Layout
from trainkit.plan.layout_rules import DEGREES, describe_layout, yaml_text
from trainkit.plan.memory import Parts, state_bytes
from trainkit.plan.step_work import StepWork

MAX_NODES = 512
"""Maximum number of nodes for which layouts are tried."""


def advise(work: StepWork, hardware: Hardware, global_batch_size: int | None) -> Iterator[tuple[str, Choice]]:
    """Yield each config change that makes the run fit, and the best layout choice after the change.

    The function tries two changes: using the smallest number of GPUs that fits the run, and offloading, which
    saves the most memory but is slow.
    """
    for other in _sizes(hardware):
        found = choose(work, other, global_batch_size)
        if found and found[0].fit == "fits":
            yield plural(other.num_gpus, "GPU"), found[0]
            break
    offloaded = choose(work.with_parallel(offload=True), hardware, global_batch_size)
    if offloaded and offloaded[0].fit == "fits":
        yield "parallel.offload", offloaded[0]


def _sizes(hardware: Hardware) -> Iterator[Hardware]:
    """Yield the hardware sizes to try: fractions of a node, then numbers of nodes.

    The numbers of nodes are powers of two and the midpoints between them.
    """
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


MIN_SHARE = 0.03
"""A cause of lost time is mentioned only if it takes at least this fraction of a step's time."""
DERIVED = -1
"""The config value that makes trainkit derive a parallelism degree from the other degrees."""


def reason(choice: Choice) -> str:
    """Describe the replicas and shards of a layout, and why its steps lose time."""
    return "; ".join([describe_layout(choice.work.layout), *_losses(choice)])


def headline(best: Choice) -> str:
    """Describe whether the model must be sharded, and why."""
    work, gpu = best.work, best.hardware.gpu
    state = state_bytes(work)
    what = f"weights, gradients and optimizer state take {size(state)}"
    if best.hardware.num_gpus == 1:
        return f"{what} of the {size(gpu.memory)} of one {gpu.name}"
    if state > gpu.usable:
        return f"{what}, more than the usable {size(gpu.usable)} of one {gpu.name}: they must be sharded"
    if work.shards * work.layout.tp * work.layout.pp == 1:
        return f"{what}, which fits into one {gpu.name}: replicas are simplest and exchange only gradients"
    return f"{what}, which fits into one {gpu.name}; sharding leaves more memory for activations"


def settings(choice: Choice, config: RunConfig) -> dict[str, object]:
    """Return the config keys to change for a layout choice, in a readable order."""
    work, layout = choice.work, choice.work.layout
    wanted: dict[str, object] = {
        "train.device_batch_size": work.device_batch_size,
        "parallel.dp_replicate": layout.dp_replicate,
        "parallel.dp_shard": layout.dp_shard,
        "parallel.tp": layout.tp,
        "parallel.pp": layout.pp,
        "parallel.cp": layout.cp,
        "parallel.ep": layout.ep,
        "parallel.zero": work.parallel.zero,
        "parallel.activation_checkpointing": work.parallel.activation_checkpointing,
        "parallel.offload": work.parallel.offload,
    }
    if config.train.global_batch_size is not None:
        wanted["train.global_batch_size"] = work.samples_per_step
    if layout.pp > 1:
        wanted["parallel.pp_microbatches"] = work.parallel.pp_microbatches
    if work.shards == 1:
        del wanted["parallel.zero"]  # without shards, ZeRO has no effect
    own = {key: attrgetter(key)(config) for key in wanted}
    return {key: value for key, value in wanted.items() if own[key] not in (value, DERIVED)}


def set_flags(values: dict[str, object]) -> list[str]:
    """Return the ``--set`` options for the config changes that `settings` returned."""
    return [f"--set {key}={yaml_text(value)}" for key, value in values.items()]


def _losses(choice: Choice) -> list[str]:
    """Return the reasons why a step loses time, largest loss first."""
    cost, node_size = choice.cost, choice.hardware.node_size
    far = cost.crossing(node_size)
    shares = {
        "recomputation": cost.recompute_s / cost.step_s,
        "pipeline bubble": cost.bubble * (1 - (cost.exposed_s["dp"] + cost.update_s) / cost.step_s),
        "orthogonalizing matrices": cost.update_s / cost.step_s,
    }
    names = {"dp": "parameters and gradients", "tp": "shards of matrices", "cp": "keys and values"}
    names |= {"ep": "rows of experts", "pp": "the next stage"}
    for kind, name in names.items():
        where = " over the network" if kind in far else ""
        shares[f"waiting for {name}{where}"] = cost.exposed_s[kind] / cost.step_s
    found = sorted(shares.items(), key=lambda item: -item[1])
    return [f"{share:.0%} {what}" for what, share in found if share >= MIN_SHARE]


HEADER = (
    "",
    "replicate",
    "shard",
    "tp",
    "pp",
    "cp",
    "ep",
    "zero",
    "recompute",
    "batch",
    "params",
    "grads",
    "optim",
    "activ",
    "other",
    "peak",
    "fits",
    "bubble",
    "sent",
    "time",
    "reason",
)
LEFT = ("recompute", "fits", "reason")
CONFIGURED = "*"
"""Marks the config's own layout in the table."""


def table_lines(
    choices: Sequence[Choice], configured: Choice | None, best: Choice | None, fit: int | None = None
) -> list[str]:
    """Return layout choices as the lines of a table.

    Memory is in GiB, the amount of sent data is in GiB per GPU and step, and time is relative to the best
    layout. The column ``ep`` is shown only for a model with experts.
    """
    rows = [HEADER, *(_row(choice, choice == configured, best) for choice in choices)]
    columns = list(zip(*rows, strict=True))
    if not any(choice.work.shape.moe for choice in choices):
        columns.pop(HEADER.index("ep"))
    numbers = [index for index, (name, *_) in enumerate(columns) if name not in LEFT]
    num_keys = 1 + sum(name in DEGREES for name, *_ in columns)
    rows = list(zip(*columns, strict=True))
    return table(rows, right=numbers, fit=fit, num_keys=num_keys).splitlines()


def _row(choice: Choice, is_configured: bool, best: Choice | None) -> tuple[str, ...]:
    work, layout, largest = choice.work, choice.work.layout, choice.memory.largest
    degrees = (getattr(layout, name) for name in DEGREES)
    kept = max(parts.activations + parts.loss for parts in choice.memory.phases.values())
    memory = (largest.params, largest.gradients, largest.optimizer, kept, largest.buffers)
    return (
        CONFIGURED if is_configured else "",
        *map(str, degrees),
        "-" if work.shards == 1 or layout.pp > 1 else str(work.parallel.zero),
        work.parallel.activation_checkpointing,
        f"{work.samples_per_pass} x {work.passes_per_step}",
        *map(_amount, (*memory, choice.memory.peak)),
        choice.fit,
        f"{choice.cost.bubble:.0%}",
        _amount(sum(choice.cost.sent.values())),
        f"{relative_time(choice, best):.2f}" if best is not None else "",
        reason(choice),
    )


def _amount(num_bytes: float) -> str:
    """Format a number of bytes for the table: in GiB, or in MiB with the suffix M if below one GiB."""
    return f"{num_bytes / GIB:.1f}" if num_bytes >= GIB or not num_bytes else f"{num_bytes / MIB:.0f}M"


def relative_time(choice: Choice, best: Choice) -> float:
    """Return the time per token of a layout choice, relative to the best layout choice."""
    mine, least = (item.cost.step_s / item.work.tokens_per_step for item in (choice, best))
    return mine / least


class _ChoiceJson(TypedDict):
    layout: Layout
    activation_checkpointing: str
    zero: int
    offload: bool
    device_batch_size: int
    accumulation_steps: int
    pp_schedule: str | None
    """The schedule of the pipeline; None without pipeline parallelism."""
    pp_microbatches: int | None
    fit: Literal["fits", "tight", "no"]
    """`tight` means that the peak is above the usable memory of a GPU but below the total memory."""
    peak_bytes: int
    worst_moment: str
    """The phase of a step that needs the most memory."""
    moments_bytes: dict[str, Parts]
    """Maps each phase of a step to the memory in use."""
    bubble: float
    """The fraction of the step during which a pipeline rank is idle."""
    recompute: float
    """The time for recomputing activations, relative to the compute time."""
    sent_bytes: dict[str, int]
    """The bytes that a GPU sends per step, keyed by kind of parallelism."""
    crosses_nodes: list[str]
    """The kinds of parallelism that communicate across nodes."""
    relative_time: float | None
    """The time of a step, relative to the recommended layout."""
    reason: str
    settings: dict[str, object]
    """The config keys to change for this layout."""


class ChoiceJson(_ChoiceJson, total=False):
    """A layout with its estimated memory use and cost."""

    what: str
    """The config change that makes the run fit; present only in `would_fit`."""
    num_gpus: int
    """The number of GPUs; present only in `would_fit`."""


class GpuJson(TypedDict):
    """The GPU for which the layouts are planned."""

    name: str
    memory_bytes: int
    usable_bytes: int


class LayoutsJson(TypedDict):
    """The layouts that are possible, best layout first."""

    gpu: GpuJson
    num_gpus: int
    gpus_per_node: int
    num_params: int
    """The number of parameters of the model."""
    headline: str | None
    """A description of the recommended layout; None if no layout fits."""
    choices: list[ChoiceJson]
    config: ChoiceJson | None
    """The layout of the config; None if the config's layout is impossible."""
    effective_time: EffectiveTime | None
    """The estimated fraction of a run's time that is spent on useful steps; None if it is unknown."""
    config_problems: list[str]
    would_fit: list[ChoiceJson]
    """Config changes that make the run fit into GPU memory, if no layout fits."""


def choice_dict(choice: Choice, config: RunConfig, best: Choice | None) -> dict[str, object]:
    """Return a layout choice as a JSON object, with all amounts in bytes."""
    work, memory, cost = choice.work, choice.memory, choice.cost
    return {
        "layout": asdict(work.layout),
        "activation_checkpointing": work.parallel.activation_checkpointing,
        "zero": work.parallel.zero,
        "offload": work.parallel.offload,
        "device_batch_size": work.device_batch_size,
        "accumulation_steps": work.accumulation_steps,
        "pp_schedule": work.parallel.pp_schedule if work.layout.pp > 1 else None,
        "pp_microbatches": work.parallel.pp_microbatches if work.layout.pp > 1 else None,
        "fit": choice.fit,
        "peak_bytes": memory.peak,
        "worst_moment": memory.worst_phase,
        "moments_bytes": {name: asdict(parts) for name, parts in memory.phases.items()},
        "bubble": cost.bubble,
        "recompute": cost.recompute_s / cost.compute_s,
        "sent_bytes": cost.sent,
        "crosses_nodes": list(cost.crossing(choice.hardware.node_size)),
        "relative_time": None if best is None else relative_time(choice, best),
        "reason": reason(choice),
        "settings": settings(choice, config),
    }
