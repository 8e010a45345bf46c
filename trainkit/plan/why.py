"""Why a layout is what it is, and what has to be set to have it, in words. Pure."""

from __future__ import annotations

from trainkit.config.schema import RunConfig
from trainkit.plan.choices import Choice
from trainkit.plan.device_memory import gib
from trainkit.plan.state_size import state_bytes

WORTH_TELLING = 0.03
"""Share of a step from which on a reason names it."""
DERIVED = -1
"""A degree that takes what the others leave, which then is what is wanted."""


def reason(choice: Choice) -> str:
    """What a layout does, and where it loses time."""
    return "; ".join([_splits(choice), *_losses(choice)])


def headline(best: Choice) -> str:
    """Why the model has to be split at all, or need not be."""
    work, gpu = best.work, best.hardware.gpu
    state = state_bytes(work.shape, work.optimizer)
    what = f"weights, gradients and optimizer state take {gib(state)}"
    if best.hardware.num_gpus == 1:
        return f"{what} of the {gib(gpu.memory)} of one {gpu.name}"
    if state > gpu.usable:
        return f"{what}, more than one {gpu.name} can hold ({gib(gpu.usable)}): they have to be split"
    if work.shards * work.layout.tp * work.layout.pp == 1:
        return f"{what}, which one {gpu.name} holds: copies are simplest, and only gradients are exchanged"
    return f"{what}, which one {gpu.name} holds; what is split leaves room for activations"


def settings(choice: Choice, config: RunConfig) -> dict[str, object]:
    """The keys of a config that have to be set otherwise, in the order in which they are read."""
    work, layout = choice.work, choice.work.layout
    wanted: dict[str, object] = {
        "train.device_batch_size": work.device_batch_size,
        "parallel.dp_replicate": layout.dp_replicate,
        "parallel.dp_shard": layout.dp_shard,
        "parallel.tp": layout.tp,
        "parallel.pp": layout.pp,
        "parallel.cp": layout.cp,
        "parallel.zero": work.parallel.zero,
        "parallel.activation_checkpointing": work.parallel.activation_checkpointing,
        "parallel.offload": work.parallel.offload,
    }
    if layout.pp > 1:
        wanted["parallel.pp_microbatches"] = work.parallel.pp_microbatches
    if work.shards == 1:
        del wanted["parallel.zero"]  # there is nothing to gather
    return {key: value for key, value in wanted.items() if _asked(config, key) not in (value, DERIVED)}


def set_flags(values: dict[str, object]) -> list[str]:
    """What to type for `settings`."""
    return [
        f"--set {key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in values.items()
    ]


def _asked(config: RunConfig, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _splits(choice: Choice) -> str:
    layout, size = choice.work.layout, choice.hardware.node_size
    group = layout.tp * layout.pp * layout.cp
    holder = "GPU" if group == 1 else f"group of {group} GPUs"
    if layout.dp_shard > 1:
        near = layout.dp_shard * layout.cp * layout.tp <= size
        words = f"state split over {layout.dp_shard} {'GPUs' if group == 1 else 'groups'}"
        words += " of a node" if near else " across nodes"
        if layout.dp_replicate > 1:
            words += f", {layout.dp_replicate} copies"
    elif layout.dp_replicate > 1:
        words = f"a copy a {holder}"
    else:
        words = f"one {holder}"
    inside = []
    if layout.tp > 1:
        inside.append(f"every matrix over {layout.tp}")
    if layout.pp > 1:
        inside.append(f"{layout.pp} pipeline stages")
    if layout.cp > 1:
        inside.append(f"every sequence over {layout.cp}")
    return ", ".join([words, *inside])


def _losses(choice: Choice) -> list[str]:
    """What a step loses time with, the largest share first."""
    cost, node_size = choice.cost, choice.hardware.node_size
    far = cost.crossing(node_size)
    shares = {
        "computed again": cost.recompute_s / cost.step_s,
        "of bubble": cost.bubble * (1 - cost.exposed_s["dp"] / cost.step_s),
    }
    names = {"dp": "parameters and gradients", "tp": "parts of matrices", "cp": "keys and values"}
    names["pp"] = "the next stage"
    for kind, name in names.items():
        where = " over the network" if kind in far else ""
        shares[f"waiting for {name}{where}"] = cost.exposed_s[kind] / cost.step_s
    found = sorted(shares.items(), key=lambda item: -item[1])
    return [f"{share:.0%} {what}" for what, share in found if share >= WORTH_TELLING]
