"""Starts a run in an existing Slurm step, for ``srun … trainkit run``."""

from __future__ import annotations

import os

from trainkit.cluster.target import Target
from trainkit.config import RunConfig, dump_effective
from trainkit.control.run_registry import register
from trainkit.errors import UsageError
from trainkit.job.node.slurm_step import SlurmTask
from trainkit.plan.launch import LaunchPlan
from trainkit.run.events import log_event
from trainkit.run.lock import run_lock
from trainkit.run.record import AttemptRecord, add_slurm_attempt, claim_entry, open_attempt, read_job
from trainkit.run.rundir import RunDir


def step_target(task: SlurmTask, num_procs: int | None) -> Target:
    """The step as a target: each task is one rank or, with `num_procs`, the agent of one node.

    Raises UsageError for `num_procs` with several tasks on a node.
    """
    if num_procs is None:
        reason = f"srun: {task.num_tasks} tasks in step {task.job_id}.{task.step_id}, each one rank"
        return Target("srun", reason, node_sizes=task.tasks, per="gpu")
    if set(task.tasks) != {1}:
        raise UsageError(
            f"--procs {num_procs} starts {num_procs} ranks in each task, but this step has {task.num_tasks} "
            f"tasks on {task.num_nodes} nodes",
            hint="use srun --ntasks-per-node=1 … --procs N, or one task per rank without --procs",
        )
    reason = f"srun: one task per node in step {task.job_id}.{task.step_id}, each with {num_procs} ranks"
    return Target("srun", reason, node_sizes=(num_procs,) * task.num_nodes, per="node")


def step_shape(task: SlurmTask, target: Target) -> dict[str, tuple[str, object]]:
    """The shape of the step as config values with their origin, by dotted key."""
    assert target.node_sizes is not None
    most = max(target.node_sizes)
    return {
        "resources.nodes": (f"srun, {task.num_nodes} nodes", task.num_nodes),
        "resources.gpus_per_node": (f"srun, {most} per node", most),
    }


def start_step_attempt(run: RunDir, config: RunConfig, plan: LaunchPlan, task: SlurmTask) -> AttemptRecord:
    """Open the first attempt of a run for the step; returns its job.json entry."""
    with run_lock(run):
        attempt = open_attempt(run, dump_effective(config), plan.to_text())
        entry = add_slurm_attempt(run, attempt.number, task.job_id, "run", "srun", step_id=task.step_id)
        claim_entry(run, attempt.number, os.getpid())
    log_event(run, attempt.number, "submitted", job_id=task.job_id, reason="run")
    log_event(run, attempt.number, "started", world_size=plan.world_size, nodes=plan.num_nodes)
    register(run, read_job(run).name)
    return entry
