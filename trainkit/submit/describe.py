"""A launch plan in words: what would run, and every derived value with its reason."""

from __future__ import annotations

from trainkit.plan.launch import LaunchPlan


def describe_plan(plan: LaunchPlan, name: str) -> str:
    """One line for what will run and one for each value that was derived, which its reason begins with."""
    nodes = f"{plan.num_nodes} node{'s' if plan.num_nodes > 1 else ''}"
    workers = f"{plan.workers_per_node} worker{'s' if plan.workers_per_node > 1 else ''}"
    spare = f", {plan.spare_nodes} spare" if plan.spare_nodes else ""
    lines = [f"{name}: {nodes} x {workers} on {plan.device}{spare}, {plan.backend} backend"]
    width = max((len(key) for key in plan.reasons), default=0)
    lines += [f"  {key:<{width}}  {reason}" for key, reason in plan.reasons.items()]
    return "\n".join(lines)
