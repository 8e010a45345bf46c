"""Tests that runs that cannot fit are refused before they start."""

from dataclasses import replace
from pathlib import Path

from planning import NO_GPU, plan_of, problems_of

from tests.support.said import said
from trainkit.cluster.machine import Machine
from trainkit.cluster.model import Cluster, NodeKind, Partition
from trainkit.cluster.target import LOCAL, Target
from trainkit.errors import Problem
from trainkit.plan.launch import LaunchPlan

LLAMA = ("model.preset=7b", "model.vocab_size=32000", "data.seq_len=4096", "train.global_batch_size=64")


def cluster(gpu_type: str, gpus: int = 8) -> Target:
    nodes = (NodeKind(16, cpus=128, gpus={gpu_type: gpus}),)
    return Target("sbatch", "", Cluster("big", partitions=(Partition("gpu", is_default=True, nodes=nodes),)))


def check(tmp_path: Path, target: Target, *overrides: str, machine: Machine = NO_GPU) -> LaunchPlan:
    return plan_of(*LLAMA, *overrides, machine=machine, target=target, folder=tmp_path)


def problem(tmp_path: Path, target: Target, *overrides: str, machine: Machine = NO_GPU) -> Problem:
    [found] = problems_of(*LLAMA, *overrides, machine=machine, target=target, folder=tmp_path)
    return found


def test_what_fits_is_reported(tmp_path):
    full = "parallel.activation_checkpointing=full"
    plan = check(tmp_path, cluster("h100"), "train.device_batch_size=1", full)
    said(plan.reasons["memory"])
    tight = check(tmp_path, cluster("h200"), "train.device_batch_size=4", "data.seq_len=6240")
    said(tight.reasons["memory"])


def test_what_is_too_large(tmp_path):
    said(problem(tmp_path, cluster("h100"), "train.device_batch_size=8").render())
    found = problem(tmp_path, cluster("a100-40gb"), "model.preset=70b", "train.device_batch_size=1")
    assert found.key == "parallel.dp_shard"
    said(found.message)
    machine = Machine(16, 1, ("NVIDIA L4",), "this machine has 1 x NVIDIA L4")
    found = problem(tmp_path, LOCAL, "train.device_batch_size=1", machine=machine)
    assert (found.key, found.origin) == ("parallel.dp_shard", "")


def test_silent_where_memory_is_not_known(tmp_path):
    unknown = [check(tmp_path, target) for target in (cluster("something-new"), cluster(""))]
    unknown += [check(tmp_path, target, "device=cpu") for target in (LOCAL, cluster("h100"))]
    assert not any("memory" in plan.reasons for plan in unknown)


def test_a_layout_that_the_model_does_not_allow(tmp_path):
    overrides = ("parallel.tp=8", "model.num_kv_heads=4", "train.device_batch_size=1")
    found = problem(tmp_path, cluster("h100"), *overrides)
    assert (found.key, found.origin) == ("parallel.tp", "--set parallel.tp=8")
    overrides = ("parallel.pp=8", "train.device_batch_size=2", "parallel.pp_microbatches=4")
    assert problem(tmp_path, cluster("h100"), *overrides).key == "parallel.pp_microbatches"


def test_a_model_that_is_larger_than_this_machine(tmp_path):
    small, large = (replace(NO_GPU, memory=size * 2**30) for size in (100, 101))
    options = ("device=cpu", "train.device_batch_size=1")
    found = problem(tmp_path, LOCAL, *options, machine=small)
    assert found.key == "model.preset"
    said(found.message)
    check(tmp_path, LOCAL, *options, machine=large)
    check(tmp_path, LOCAL, *options)
    # Each of several hosts stores a share of the copy.
    two = (*options, "resources.nodes=2")
    assert problem(tmp_path, LOCAL, *two, machine=small).key == "model.preset"
    check(tmp_path, Target("launcher", "two hosts", per="node"), *two, machine=small)


def test_no_memory_for_the_copies_that_are_saved_while_training_goes_on(tmp_path):
    """A copy needs 12 bytes for each of 6.7 billion parameters, once per node."""
    options = ("resources.nodes=2", "train.device_batch_size=1", "parallel.dp_replicate=2")
    found = problem(tmp_path, cluster("h200"), *options, "resources.mem=64G")
    said(found.render())
    check(tmp_path, cluster("h200"), *options, "resources.mem=96G")
    check(tmp_path, cluster("h200"), *options, "resources.mem=64G", "checkpoint.async=false")
    check(tmp_path, cluster("h200"), *options, 'resources.mem="0"')
    # The same holds on this machine.
    names = ("NVIDIA H200",) * 2
    machine = replace(NO_GPU, num_gpus=2, gpu_names=names, gpu_reason="two", memory=64 * 2**30)
    found = problem(tmp_path, LOCAL, "train.device_batch_size=1", machine=machine)
    assert found.key == "checkpoint.async"
    said(found.message)
