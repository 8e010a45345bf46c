"""Plans a run whose job may get any number of nodes of a range."""

from __future__ import annotations

from dataclasses import replace

from trainkit.config.load import with_values
from trainkit.config.loaded import LoadedConfig
from trainkit.errors import ConfigError
from trainkit.plan.facts import Facts
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.make_plan import make_plan
from trainkit.plan.workload import TRAINER, Workload
from trainkit.run.group import difference

KEY = "resources.nodes"


def plan_nodes(loaded: LoadedConfig, facts: Facts, workload: Workload = TRAINER) -> LaunchPlan:
    """The plan of a config, which for a range of nodes has one for each number that is possible.

    Its own number is the largest. Global batch and learning rate are those of the largest too, so that the
    curve does not depend on what the job gets. Raises ConfigError with every problem if no number is
    possible.
    """
    resources = loaded.config.resources
    if resources.fewest_nodes == resources.most_nodes:
        return make_plan(loaded, facts, workload)
    if facts.target.cluster is None:  # here there are as many nodes as one asks for
        plan = make_plan(_with(loaded, resources.most_nodes, None), facts, workload)
        note = f"{plan.num_nodes}: the most of {resources.nodes}, which this machine simulates"
        return replace(plan, reasons={"nodes": note, **plan.reasons})
    plans: list[LaunchPlan] = []
    refused: dict[int, ConfigError] = {}
    for num_nodes in range(resources.most_nodes, resources.fewest_nodes - 1, -1):
        batch = plans[0].batch.global_batch_size if plans else None
        try:
            plans.append(make_plan(_with(loaded, num_nodes, batch or None), facts, workload))
        except ConfigError as error:
            refused[num_nodes] = error
    if not plans:
        raise refused[resources.most_nodes]
    return _joined(plans, refused)


def _with(loaded: LoadedConfig, num_nodes: int, global_batch_size: int | None) -> LoadedConfig:
    origin = f"{loaded.origins.get(KEY, KEY)}: {num_nodes} nodes"
    batch = {} if global_batch_size is None else {"train.global_batch_size": global_batch_size}
    return with_values(loaded, {KEY: num_nodes, **batch}, origin)


def _joined(plans: list[LaunchPlan], refused: dict[int, ConfigError]) -> LaunchPlan:
    """The first plan, with what changes in it for the other numbers of nodes."""
    first, last = plans[0], plans[-1]
    nodes = f"{last.num_nodes}-{first.num_nodes}" if len(plans) > 1 else str(first.num_nodes)
    note = f"{', '.join(str(plan.num_nodes) for plan in reversed(plans))}: as many as Slurm has"
    if refused:
        why = refused[max(refused)].problems[0]
        note += f"; not {', '.join(map(str, sorted(refused)))}: {why.key} {why.message}"
    own, *others = (_in_job(plan, nodes, first, note) for plan in plans)
    base = own.to_dict()
    return replace(own, sizes={str(one.num_nodes): difference(base, one.to_dict()) for one in others})


def _in_job(plan: LaunchPlan, nodes: str, first: LaunchPlan, note: str) -> LaunchPlan:
    """The plan as that of the job which requests all of `nodes`."""
    assert plan.slurm is not None
    # The job survives the loss of a node, and the run continues on the others.
    options = {"nodes": nodes} | ({"no-kill": True} if "-" in nodes else {})
    reasons = {"nodes": note, **plan.reasons, "lr": first.reasons.get("lr", "")}
    slurm = replace(plan.slurm, sbatch={**plan.slurm.sbatch, **options})
    return replace(plan, slurm=slurm, lr=first.lr, reasons=reasons)
