"""Plans a run whose job may get any number of nodes of a range."""

from __future__ import annotations

from dataclasses import replace

from trainkit.config.load import with_values
from trainkit.config.loaded import LoadedConfig
from trainkit.errors import ConfigError
from trainkit.plan.facts import Facts
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.make_plan import make_plan
from trainkit.plan.slurm_request import Options
from trainkit.plan.workload import TRAINER, Workload

KEY = "resources.nodes"
FULL_RANGES = (24, 11)
"""A version of Slurm that takes a list, ``--nodes=2,4``, and gives a job with tasks as many nodes as it has.

22.05 takes a range only, and counts nodes by tasks: with ``--ntasks-per-node`` it gives the fewest.
"""


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
    return _joined(plans, refused, is_old=(facts.target.cluster.slurm_version or ()) < FULL_RANGES)


def _with(loaded: LoadedConfig, num_nodes: int, global_batch_size: int | None) -> LoadedConfig:
    origin = f"{loaded.origins.get(KEY, KEY)}: {num_nodes} nodes"
    batch = {} if global_batch_size is None else {"train.global_batch_size": global_batch_size}
    return with_values(loaded, {KEY: num_nodes, **batch}, origin)


def _joined(plans: list[LaunchPlan], refused: dict[int, ConfigError], *, is_old: bool) -> LaunchPlan:
    """The first plan, with what changes in it for the other numbers of nodes."""
    sizes = [plan.num_nodes for plan in reversed(plans)]
    is_range = is_old or sizes == list(range(sizes[0], sizes[-1] + 1))
    nodes = f"{sizes[0]}-{sizes[-1]}" if is_range else ",".join(map(str, sizes))
    note = f"{', '.join(map(str, sizes))}: as many as Slurm has"
    if refused:
        why = refused[max(refused)].problems[0]
        note += f"; not {', '.join(map(str, sorted(refused)))}: {why.key} {why.message}"
    from trainkit.run.group import difference  # as in `LaunchPlan.at`

    if len(plans) == 1:
        return replace(plans[0], reasons={"nodes": note, **plans[0].reasons})
    own, *others = (_in_job(plan, nodes, plans[0], note, is_old) for plan in plans)
    base = own.to_dict()
    return replace(own, sizes={str(one.num_nodes): difference(base, one.to_dict()) for one in others})


def _in_job(plan: LaunchPlan, nodes: str, first: LaunchPlan, note: str, is_old: bool) -> LaunchPlan:
    """The plan as that of the job which requests all of `nodes`."""
    assert plan.slurm is not None
    # The job survives the loss of a node, and the run continues on the others.
    sbatch: Options = {**plan.slurm.sbatch, "nodes": nodes, "no-kill": True}
    srun = plan.slurm.srun
    if is_old:
        tasks, cpus = int(sbatch.pop("ntasks-per-node")), int(sbatch.get("cpus-per-task", 1))
        sbatch["cpus-per-task"], srun = tasks * cpus, {**srun, "cpus-per-task": cpus}
    reasons = {"nodes": note, **plan.reasons}
    if "lr" in reasons:
        reasons["lr"] = first.reasons["lr"]
    return replace(plan, slurm=replace(plan.slurm, sbatch=sbatch, srun=srun), lr=first.lr, reasons=reasons)
