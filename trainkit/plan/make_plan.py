"""From a config and the place where it runs to the launch plan, every derived value with its reason."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.config.loaded import LoadedConfig
from trainkit.config.running import RequeueConfig
from trainkit.errors import ConfigError
from trainkit.plan.cluster import LOCAL, Cluster, Target
from trainkit.plan.draft import Draft
from trainkit.plan.launch import Batch, LaunchPlan, Layout, RequeuePolicy
from trainkit.plan.machine import Machine
from trainkit.plan.slurm_draft import SlurmDraft
from trainkit.plan.step_draft import StepDraft


def make_plan(
    loaded: LoadedConfig,
    machine: Machine,
    target: Target = LOCAL,
    command: Sequence[str] | None = None,
    launcher: str = "python",
) -> LaunchPlan:
    """What will run at the target; `machine` is the one that we are on.

    With a `command` in place of the built-in trainer, its layout and batch are its own business.
    Raises ConfigError with every problem.
    """
    draft = _draft(loaded, machine, target)
    config = loaded.config
    if target is not LOCAL:
        draft.reasons["backend"] = target.reason
    if target.cluster is not None:
        draft.reasons["cluster"] = target.cluster.reason
    device = draft.device()
    workers_per_node = draft.workers_per_node(device)
    sizes = target.node_sizes
    num_nodes = config.resources.nodes if sizes is None else len(sizes)
    world_size = num_nodes * workers_per_node if sizes is None else sum(sizes)
    if command is None:
        layout = draft.layout(world_size)
        batch = draft.batch(layout)
        lr = draft.lr(layout)
    else:
        layout, batch, lr = Layout(dp_shard=world_size), Batch(0, 0, 0, 0), 0.0
    draft.refuse_a_crowd(device, world_size)
    threads = draft.threads_per_worker(world_size)
    grace_s, slurm, per = config.requeue.grace_s, None, target.per or "node"
    if isinstance(draft, SlurmDraft):
        lead_s = draft.lead_s()
        grace_s = min(grace_s, lead_s)
        per = draft.per(launcher)
        slurm = draft.request(device, workers_per_node, threads, lead_s, per)
    if batch is None or draft.problems:
        raise ConfigError(draft.problems)
    return LaunchPlan(
        backend=target.backend,
        num_nodes=num_nodes,
        workers_per_node=workers_per_node,
        env=dict(config.launch.env),
        network=config.launch.network,
        requeue=_policy(config.requeue),
        spare_nodes=0 if slurm is None else config.resources.spare_nodes,
        per=per,
        device=device,
        layout=layout,
        batch=batch,
        lr=lr,
        threads_per_worker=threads,
        grace_s=grace_s,
        reasons=draft.reasons,
        command=None if command is None else tuple(command),
        launcher=launcher,
        slurm=slurm,
        node_sizes=None if sizes is None or len(set(sizes)) == 1 else sizes,
    )


def _draft(loaded: LoadedConfig, machine: Machine, target: Target) -> Draft:
    if target.node_sizes is not None:
        return StepDraft(loaded, machine, node_sizes=target.node_sizes)
    if target.backend == "local":
        return Draft(loaded, machine)
    return SlurmDraft(loaded, machine, cluster=target.cluster or Cluster("unknown"))


def _policy(requeue: RequeueConfig) -> RequeuePolicy:
    return RequeuePolicy(
        on=requeue.on,
        max=requeue.max,
        max_crashes=requeue.max_crashes,
        hang_factor=requeue.hang_factor,
        hang_min_s=requeue.hang_min_s,
    )
