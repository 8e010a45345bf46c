"""Plans a run whose job may be allocated any number of nodes in a range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trainkit.backend import backend_named
from trainkit.config.load import with_values
from trainkit.config.loaded import LoadedConfig
from trainkit.errors import ConfigError
from trainkit.formats import spans
from trainkit.plan.facts import Facts
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.make_plan import make_plan
from trainkit.plan.workload import TRAINER, Workload
from trainkit.run.files import difference
from trainkit.shipped import load

if TYPE_CHECKING:  # Runs on this machine do not need cluster information.
    from trainkit.cluster.model import Cluster

KEY = "resources.nodes"
BATCH = "train.global_batch_size"
MOST_SIZES = 1000
"""Maximum number of node counts to plan; planning all of them takes less than a second."""


def plan_nodes(
    loaded: LoadedConfig, facts: Facts, workload: Workload = TRAINER, before: LaunchPlan | None = None
) -> LaunchPlan:
    """Return the plan for a config, including a plan for each possible node count if `nodes` is a range.

    The top-level plan is for the largest node count. Plans for all node counts use the global batch size and
    learning rate of the largest count (or of the plan `before`), so that the loss curve does not depend on
    how many nodes the job is allocated. Raises ConfigError with all problems if no node count is possible.
    """
    resources = loaded.config.resources
    if resources.fewest_nodes == resources.most_nodes:
        return make_plan(loaded, facts, workload)
    values: dict[str, object] = {}
    if (
        before is not None
        and before.batch.global_batch_size
        and loaded.config.train.global_batch_size is None
    ):
        values[BATCH] = before.batch.global_batch_size
    counts, origin = resources.node_counts, loaded.origins.get(KEY, KEY)
    if len(counts) > MOST_SIZES:
        message = (
            f"is {resources.nodes}: {len(counts):,} node counts, but at most {MOST_SIZES:,} can be planned"
        )
        raise ConfigError([loaded.problem(KEY, message, "use a smaller range")])
    plans: list[LaunchPlan] = []
    refused: dict[int, ConfigError] = {}
    for num_nodes in reversed(counts):
        try:
            sized = with_values(loaded, {KEY: num_nodes, **values}, f"{origin}: {num_nodes} nodes")
            plans.append(make_plan(sized, facts, workload))
        except ConfigError as error:
            refused[num_nodes] = error
            continue
        # This machine can simulate any number of nodes, so only the largest node count is planned.
        if facts.target.cluster is None:
            break
        if len(plans) == 1:
            values["resources.gpus_per_node"] = plans[0].workers_per_node
            if plans[0].batch.global_batch_size:
                values[BATCH] = plans[0].batch.global_batch_size
    if not plans:
        raise refused[resources.fewest_nodes]
    first = plans[0] if before is None else replace(plans[0], lr=before.lr)
    if facts.target.cluster is None:
        note = f"{first.num_nodes}: the maximum of {resources.nodes}, which this machine simulates"
        return replace(first, reasons={"nodes": note + _not_possible(refused), **first.reasons})
    if any(_given(plan) != _given(first) for plan in plans):
        message = (
            f"is {resources.nodes}, but the values for {workload.launcher} depend on the number of nodes"
        )
        hint = "set a single number of nodes, or write the values into the command"
        raise ConfigError([loaded.problem(KEY, message, hint)])
    return _joined(first, plans, refused, facts.target.cluster)


def _given(plan: LaunchPlan) -> list[object]:
    """Return the values passed to the command that must be equal for every number of nodes."""
    return [load(name).size_independent(plan) for name in plan.parts]


def _joined(
    first: LaunchPlan, plans: Sequence[LaunchPlan], refused: Mapping[int, ConfigError], cluster: Cluster
) -> LaunchPlan:
    """Return the first plan, extended with the values that differ for other node counts."""
    sizes = spans([plan.num_nodes for plan in reversed(plans)])
    note = f"{sizes}: as many nodes as Slurm can allocate{_not_possible(refused)}"
    if len(plans) == 1:
        return replace(first, reasons={"nodes": note, **first.reasons})
    joined = backend_named(first.backend).in_one_job(plans, cluster)
    own, *others = (_alike(plan, first, plans[-1], note) for plan in joined)
    base = own.to_dict()
    return replace(own, sizes={str(one.num_nodes): difference(base, one.to_dict()) for one in others})


def _alike(plan: LaunchPlan, first: LaunchPlan, least: LaunchPlan, note: str) -> LaunchPlan:
    """Return `plan` with values of `first`, the plan with most nodes, and `least`, the plan with fewest."""
    reasons = {"nodes": note, **plan.reasons}
    for key, of in (("lr", first), ("exclude", least)):
        if key in reasons:
            reasons[key] = of.reasons[key]
    return replace(plan, lr=first.lr, reasons=reasons)


def _not_possible(refused: Mapping[int, ConfigError]) -> str:
    if not refused:
        return ""
    why = refused[min(refused)].problems[0]
    return f"; not {spans(sorted(refused))}: {why.key} {why.message}"
