"""The choices of a plan as a table to read and as one JSON value. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trainkit.config.schema import RunConfig
from trainkit.plan.choices import Choice
from trainkit.plan.device_memory import GIB
from trainkit.plan.why import reason, settings

HEADER = (
    *("", "replicate", "shard", "tp", "pp", "cp", "zero", "recompute", "batch"),
    *("params", "grads", "optim", "activ", "other", "peak", "fits", "bubble", "sent", "time", "why"),
)
LEFT = ("recompute", "fits", "why")
OWN = "*"
"""Marks the layout of the config."""


def table_lines(choices: Sequence[Choice], own: Choice | None, best: Choice | None) -> list[str]:
    """A line for every choice: GiB of memory, GiB that a GPU sends in a step, time next to the best one."""
    rows = [HEADER, *(_row(choice, choice == own, best) for choice in choices)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if name in LEFT else cell.rjust(width)
            for cell, width, name in zip(row, widths, HEADER, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _row(choice: Choice, is_own: bool, best: Choice | None) -> tuple[str, ...]:
    work, layout, largest = choice.work, choice.work.layout, choice.memory.largest
    degrees = (layout.dp_replicate, layout.dp_shard, layout.tp, layout.pp, layout.cp)
    kept = max(parts.activations + parts.loss for parts in choice.memory.moments.values())
    memory = (largest.params, largest.gradients, largest.optimizer, kept, largest.buffers)
    return (
        OWN if is_own else "",
        *map(str, degrees),
        "-" if work.shards == 1 or layout.pp > 1 else str(work.parallel.zero),
        work.parallel.activation_checkpointing,
        f"{work.samples_at_once} x {work.passes_per_step}",
        *(f"{part / GIB:.1f}" for part in (*memory, choice.memory.peak)),
        choice.fit,
        f"{choice.cost.bubble:.0%}",
        f"{sum(choice.cost.sent.values()) / GIB:.1f}",
        f"{relative_time(choice, best):.2f}" if best is not None else "",
        reason(choice),
    )


def relative_time(choice: Choice, best: Choice) -> float:
    """Time for a token next to that of the best choice."""
    mine, least = (item.cost.step_s / item.work.tokens_per_step for item in (choice, best))
    return mine / least


def choice_dict(choice: Choice, config: RunConfig, best: Choice | None) -> dict[str, Any]:
    """One choice as JSON; amounts in bytes."""
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
        "worst_moment": memory.worst,
        "moments_bytes": {name: asdict(parts) for name, parts in memory.moments.items()},
        "bubble": cost.bubble,
        "recompute": cost.recompute_s / cost.compute_s,
        "sent_bytes": cost.sent,
        "crosses_nodes": list(cost.crossing(choice.hardware.node_size)),
        "relative_time": None if best is None else relative_time(choice, best),
        "reason": reason(choice),
        "settings": settings(choice, config),
    }
