"""Tests the way from a config and a machine to a plan with reasons, or to all its problems."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from planning import plan_of, problems_of

from tests.support.runs import launch_plan
from tests.support.said import said
from trainkit.cluster.machine import Machine
from trainkit.cluster.target import LOCAL, Target
from trainkit.errors import UsageError
from trainkit.plan.launch import Batch, LaunchPlan, Layout, SlurmRequest, WorkerEnvironment
from trainkit.plan.workload import Workload

CPU = Machine(4, 0, (), "there is no NVIDIA driver on this machine")
ANY_BATCH = "train.global_batch_size=null"
GPUS = Machine(16, 4, ("A100",) * 4, "this machine has 4 x A100")


def plan(machine: Machine, *overrides: str, target: Target = LOCAL) -> LaunchPlan:
    return plan_of(*overrides, machine=machine, target=target)


def problems(machine: Machine, *overrides: str, target: Target = LOCAL) -> list[str]:
    return [problem.render() for problem in problems_of(*overrides, machine=machine, target=target)]


def test_whole_plan():
    made = plan(CPU, "resources.nodes=2", "optimizer.lr_scale=linear", "requeue.grace_s=30")
    said("\n".join(f"{key} = {reason}" for key, reason in made.reasons.items()))
    sizes = {"num_nodes": 2, "workers_per_node": 1, "threads_per_worker": 2, "grace_s": 30.0}
    plan_without_reasons = LaunchPlan(
        **{"backend": "local", "device": "cpu", "layout": Layout(1, 2), "batch": Batch(8, 2, 32, 8192)},
        **{"lr": 6e-4, "reasons": {}, **sizes},
    )
    assert replace(made, reasons={}) == plan_without_reasons


ONE_A_NODE = "1: a CPU node has one worker unless resources.gpus_per_node is set"


@pytest.mark.parametrize(
    ("machine", "overrides", "device", "workers", "reason"),
    [
        (GPUS, "", "cuda", 4, "4: 4 GPUs shared by 1 node"),
        (GPUS, "resources.nodes=2", "cuda", 2, "2: 4 GPUs shared by 2 nodes"),
        (GPUS, f"resources.nodes=3 {ANY_BATCH}", "cuda", 1, "1: 4 GPUs shared by 3 nodes, 1 left idle"),
        (GPUS, "resources.gpus_per_node=2", "cuda", 2, "resources.gpus_per_node: 2 was requested"),
        (GPUS, "device=cpu resources.nodes=8 train.device_batch_size=1", "cpu", 1, ONE_A_NODE),
        (CPU, "resources.gpus_per_node=4", "cpu", 4, "resources.gpus_per_node: 4 was requested"),
    ],
)
def test_workers(machine, overrides, device, workers, reason):
    made = plan(machine, *overrides.split())
    assert (made.device, made.workers_per_node, made.reasons["workers_per_node"]) == (device, workers, reason)


def test_threads():
    def threads(*overrides):
        made = plan(CPU, *overrides)
        return made.threads_per_worker, made.reasons["threads_per_worker"]

    assert threads() == (4, "4: 4 CPU cores for 1 worker")
    eight = threads("resources.nodes=8", "train.device_batch_size=1")
    assert eight == (1, "1: 4 CPU cores for 8 workers")
    assert threads("resources.cpus_per_gpu=3") == (3, "resources.cpus_per_gpu: 3 was requested")


def test_more_than_this_machine_has():
    found = problems(CPU, "device=cuda"), problems(CPU, "resources.nodes=1000", ANY_BATCH)
    both = problems(GPUS, "resources.nodes=2", "resources.gpus_per_node=4", "train.device_batch_size=4")
    nodes = problems(GPUS, "resources.nodes=8", "train.device_batch_size=4")
    said("\n".join(problem for each in (*found, both, nodes) for problem in each))


def test_the_ranks_of_another_launcher():
    """The ranks of one host run on this machine, and have started."""
    hosts = Target("launcher", "launcher: torchrun", node_sizes=(4, 4), per="gpu")
    made = plan(GPUS, target=hosts)
    assert (made.backend, made.world_size, made.per, made.slurm) == ("launcher", 8, "gpu", None)
    assert made.threads_per_worker is None
    said(made.reasons["threads_per_worker"])
    many = Target("launcher", "launcher: torchrun", node_sizes=(8, 8), per="gpu")
    [found] = problems(GPUS, target=many)
    said(found)


def test_all_problems_at_once():
    typed = ("train.global_batch_size=32", "train.device_batch_size=8")
    found = problems(CPU, "device=cuda", "resources.nodes=3", "parallel.dp_replicate=2", *typed)
    said("\n".join(found))


def test_thousands_of_nodes_are_nothing_special():
    begin = time.perf_counter()
    made = plan(replace(CPU, num_cpus=4096), "resources.nodes=4096", "resources.gpus_per_node=8", ANY_BATCH)
    assert (made.world_size, made.batch.global_batch_size) == (32768, 8 * 32768)
    assert time.perf_counter() - begin < 1.0


def test_what_only_slurm_knows_has_no_effect_without_it():
    made = plan(CPU, "resources.spare_nodes=2", "requeue.follow_ups=3", "resources.partition=gpu")
    assert (made.num_nodes, made.spare_nodes, made.slurm) == (1, 0, None)
    assert "spare_nodes" not in made.reasons


def test_a_step_that_binds_one_gpu_to_each_task():
    """The first task plans the run and sees only one GPU. The other ranks check their GPUs themselves."""
    one = replace(GPUS, num_gpus=1, gpu_names=("A100",))
    tasks = Target("srun", "srun: 8 tasks", node_sizes=(4, 4), per="gpu")
    overrides = ("resources.nodes=2", "resources.gpus_per_node=4", "train.global_batch_size=null")
    made = plan(one, *overrides, target=tasks)
    assert (made.device, made.workers_per_node, made.world_size) == ("cuda", 4, 8)
    [warning] = made.warnings
    said(warning)
    assert plan(GPUS, *overrides, target=tasks).warnings == ()
    for machine in (replace(one, num_gpus=2), replace(one, num_gpus=3)):
        [found] = problems(machine, *overrides, target=tasks)
        said(found)
    [found] = problems(one, *overrides, target=replace(tasks, per="node"))
    said(found)


def test_the_keys_of_records_lie_in_the_file_itself():
    environment = WorkerEnvironment({"A": "b"}, "debug", ("python", "-u"), "/venv", "pyxis")
    slurm = SlurmRequest({"nodes": 2}, gpu_types={"a": "h100"}, fills_nodes=True)
    made = launch_plan(workload=Workload(("x",), "torchrun", "TERM"), environment=environment, slurm=slurm)
    written = made.to_dict()
    assert list(written)[10:12] == ["env", "network"]
    flat = {"env": {"A": "b"}, "network": "debug", "python": ["python", "-u"], "venv": "/venv"}
    flat |= {"container_program": "pyxis", "gpu_types": {"a": "h100"}, "fills_nodes": True}
    flat |= {"command": ["x"], "launcher": "torchrun", "command_signal": "TERM"}
    assert written.items() >= flat.items()
    assert written["slurm"] == {"sbatch": {"nodes": 2}, "srun": {}, "version": []}
    assert not {"workload", "environment"} & written.keys()
    assert LaunchPlan.from_dict(json.loads(json.dumps(written))) == made


def test_a_damaged_plan_and_one_with_more_keys():
    made = launch_plan()
    written = made.to_dict()
    assert (written["world_size"], written["command"]) == (4, None)
    newer = {**json.loads(json.dumps(written)), "new": 1}
    newer["requeue"] = {**newer["requeue"], "new": 1}
    assert LaunchPlan.from_dict(newer) == made
    changes = {"layout": {"xp": 1}}, {"batch": 3}, {"slurm": {"sbatch": {}}}, {"workers_per_node": -1}
    damaged = [{**made.to_dict(), **change} for change in (*changes, {"node_sizes": [2, 0]})]
    for content in (*damaged, {"version": 1}, []):
        with pytest.raises(ValueError, match=r"plan\.json is damaged"):
            LaunchPlan.from_dict(content)
    with pytest.raises(UsageError, match=r"plan\.json has version 2, but this trainkit version supports 1"):
        LaunchPlan.from_dict({**made.to_dict(), "version": 2})


def test_the_default_betas_of_lion_are_shown():
    assert plan_of("optimizer.name=lion").reasons["betas"] == "[0.9, 0.99]: default of lion"
    for overrides in (("optimizer.name=lion", "optimizer.betas=[0.8, 0.9]"), ("optimizer.name=adamw",)):
        assert "betas" not in plan_of(*overrides).reasons
