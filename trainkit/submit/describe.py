"""A launch plan in words: what would run, and every derived value with its reason."""

from __future__ import annotations

from trainkit.plan.launch import LaunchPlan


def describe_plan(plan: LaunchPlan, name: str) -> str:
    """One line for what will run, one for each value that was derived."""
    batch, layout = plan.batch, plan.layout
    nodes = f"{plan.num_nodes} node{'s' if plan.num_nodes > 1 else ''}"
    lines = [f"{name}: {nodes} x {plan.workers_per_node} workers on {plan.device}, {plan.backend} backend"]
    values: dict[str, object] = {
        "batch": f"{batch.global_batch_size} = {batch.device_batch_size} x {layout.dp} data parallel "
        f"x {batch.accumulation_steps} accumulation, {batch.tokens_per_step:,} tokens a step",
        "lr": f"{plan.lr:g}",
        "layout": f"dp_replicate {layout.dp_replicate} x dp_shard {layout.dp_shard} x tp {layout.tp} "
        f"x pp {layout.pp} x cp {layout.cp}",
    }
    values.update({key: getattr(plan, key, "") for key in plan.reasons if key not in values})
    width = max(len(key) for key in values)
    for key, value in values.items():
        reason = plan.reasons.get(key)
        shown = "" if isinstance(value, (dict, list, tuple)) or value == "" else f"{value}"
        lines.append(f"  {key:<{width}}  " + " - ".join(part for part in (shown, reason) if part))
    return "\n".join(lines)
