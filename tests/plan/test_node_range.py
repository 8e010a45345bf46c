"""Tests jobs with as many nodes as Slurm has: a plan per number, with one batch and learning rate."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.said import said
from trainkit.cluster.machine import Machine
from trainkit.cluster.model import Cluster, NodeKind, Partition
from trainkit.cluster.target import LOCAL, Target
from trainkit.config import load_config
from trainkit.data.checks import DataFacts
from trainkit.errors import ConfigError
from trainkit.plan.facts import Facts
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.make_plan import make_plan
from trainkit.plan.node_range import plan_nodes
from trainkit.plan.workload import TRAINER, Workload

LOGIN = Machine(2, 0, (), "there is no NVIDIA driver on this machine")
NODES = Partition("gpu", is_default=True, max_nodes=8, nodes=(NodeKind(8, 32, 256_000, {"a100": 4}),))
WEST = Cluster("west", (NODES,), slurm_version=(22, 5, 8))


def plan(*overrides, target=None, workload=TRAINER, before=None):
    given = ["train.device_batch_size=2", "train.global_batch_size=null", *overrides]
    loaded = load_config(None, overrides=given, environ={}, cwd=Path("/nowhere"))
    return plan_nodes(loaded, Facts(LOGIN, target or Target("sbatch", "a test", WEST)), workload, before)


def test_every_number_has_the_batch_and_the_learning_rate_of_the_largest():
    made = plan("resources.nodes=2-8", "optimizer.lr_scale=linear", "optimizer.lr=1e-3")
    assert (made.num_nodes, [*made.sizes], made.fewest_nodes) == (8, ["4", "2"], 2)
    said(made.reasons["nodes"])
    for given, size, accumulation in ((8, 8, 1), (7, 4, 2), (4, 4, 2), (3, 2, 4), (1, 2, 4)):
        here = made.at(given)
        assert (here.num_nodes, here.batch.accumulation_steps) == (size, accumulation)
        assert (here.batch.global_batch_size, here.layout.dp, here.lr) == (64, 4 * size, made.lr)
        assert (here.slurm.sbatch["nodes"], here.slurm.sbatch["no-kill"]) == ("2-8", True)
        assert (here.slurm.srun["nodes"], here.slurm.srun["ntasks"]) == (size, 4 * size)
        # Each plan leads to all others, also after it was written to a file.
        there = LaunchPlan.from_dict(json.loads(here.to_text()))
        assert there == here
        assert there.at(8) == made.at(8)
    assert made.at(9) is made


def test_numbers_on_which_it_does_not_fit_in_memory_are_named():
    given = ["model.preset=13b", "data.seq_len=4096", "train.device_batch_size=1", "resources.nodes='1,2,4'"]
    loaded = load_config(None, overrides=given, environ={}, cwd=Path("/nowhere"))
    made = plan_nodes(loaded, Facts(LOGIN, Target("sbatch", "a test", WEST), DataFacts(vocab_size=128256)))
    assert (made.num_nodes, [*made.sizes]) == (4, ["2"])
    said(made.reasons["nodes"])


def test_what_is_asked_of_slurm():
    newer = Target("sbatch", "a test", replace(WEST, slurm_version=(24, 11, 5)))
    for target, nodes in ((None, "2-8"), (newer, "2,4,8")):
        made = plan("resources.nodes=2-8", "resources.extra={exclusive: true}", target=target)
        request = made.slurm
        assert request.sbatch["nodes"] == nodes
        assert request.fills_nodes == (target is not None)
        # Both have the same tasks and CPUs, requested in different ways.
        old = target is None
        assert request.sbatch.get("ntasks-per-node") == (None if old else 4)
        cpus = request.sbatch["cpus-per-task"], request.srun.get("cpus-per-task")
        assert cpus == ((32, 8) if old else (8, None))
        assert request.srun["ntasks-per-node"] == 4
    # The nodes are a list, for which Slurm 22.05 gets a range.
    for target, nodes in ((None, "2-8"), (newer, "2,8")):
        made = plan("resources.nodes='8,2,2'", target=target)
        assert (made.slurm.sbatch["nodes"], made.num_nodes, [*made.sizes]) == (nodes, 8, ["2"])
        assert [made.at(count).num_nodes for count in (9, 8, 7, 4, 1)] == [8, 8, 2, 2, 2]
        said(made.reasons["nodes"])
    # The range exceeds the limit of the partition, or has only one possible number.
    for asked, nodes in (("2-16", "2-8"), ("3-7", "4"), ("8-9", "8")):
        made = plan(f"resources.nodes={asked}", "train.global_batch_size=64")
        assert str(made.slurm.sbatch["nodes"]) == nodes
        assert made.may_lose_nodes == (nodes == "2-8")


def test_bad_nodes_are_left_out_as_long_as_the_fewest_can_be_had():
    bad = {"n3": "failed", "n4": "died"}
    target = Target("sbatch", "a test", replace(WEST, bad_nodes=bad, slurm_version=(24, 11)))
    for nodes, excluded in (("2-8", "n3,n4"), ("'4,8'", "n3,n4"), ("7-8", "n3"), ("8", None)):
        made = plan(f"resources.nodes={nodes}", "train.global_batch_size=448", target=target)
        assert made.slurm.sbatch.get("exclude") == excluded
        shown = made.at(1).reasons["exclude"]
        assert [f"not {host}" in shown for host in bad] == [host not in (excluded or "") for host in bad]


def test_a_command_has_no_batch():
    made = plan("resources.nodes=1-3", workload=Workload(("python", "train.py"), "python"))
    assert [made.at(count).world_size for count in (1, 2, 3)] == [4, 8, 12]
    assert "lr" not in made.reasons


def test_workers_and_batch_stay_on_nodes_of_several_kinds_and_after_a_resume():
    kinds = (NodeKind(2, 64, 512_000, {"a100": 8}), NodeKind(6, 32, 256_000, {"a100": 4}))
    mixed = replace(NODES, nodes=kinds)
    target = Target("sbatch", "a test", Cluster("west", (mixed,), slurm_version=(24, 11)))
    made = plan("resources.nodes=2-8", target=target)
    for size in (2, 4, 8):
        here = made.at(size)
        assert (here.workers_per_node, here.batch.global_batch_size) == (4, 64)
        assert here.slurm.sbatch == made.slurm.sbatch
    # Fewer nodes are possible at that time.
    small = Target("sbatch", "a test", replace(WEST, partitions=(replace(NODES, max_nodes=4),)))
    given = ("resources.nodes=2-8", "optimizer.lr_scale=linear")
    again = plan(*given, target=small, before=replace(made, lr=0.5))
    assert (again.num_nodes, again.batch.global_batch_size, again.lr, again.at(2).lr) == (4, 64, 0.5, 0.5)


def test_what_a_launcher_gets_must_not_depend_on_it():
    for launcher, words in (("lightning", ("{lr}",)), ("accelerate", ())):
        workload = Workload(("train.py", *words), launcher)
        assert plan("resources.nodes=1-2", "precision.dtype=bf16", workload=workload).fewest_nodes == 1
    workload = Workload(("train.py", "{lr}"), "lightning")
    with pytest.raises(ConfigError) as error:
        plan("resources.nodes=1-2", "optimizer.lr_scale=linear", workload=workload)
    said(error.value.render())


def test_on_this_machine_there_are_as_many_as_one_asks_for():
    made = plan("resources.nodes=2-4", target=LOCAL)
    assert (made.num_nodes, made.sizes) == (4, {})
    said(made.reasons["nodes"])
    made = plan("resources.nodes=1-3", "train.global_batch_size=4", target=LOCAL)
    said(made.reasons["nodes"])


def test_one_number_is_the_plan_that_it_always_was():
    loaded = load_config(None, overrides=["resources.nodes=2"], environ={}, cwd=Path("/nowhere"))
    facts = Facts(LOGIN, Target("sbatch", "a test", WEST))
    assert plan_nodes(loaded, facts) == make_plan(loaded, facts)


REFUSED = """\
nodes=4-2
nodes=2-4 resources.spare_nodes=1
nodes='3,3'
nodes=2..4
nodes=9-12
nodes=1-2000
nodes=2-3 train.global_batch_size=7
""".splitlines()


def test_what_is_refused():
    """The value is refused before its largest number is used."""
    for line in REFUSED:
        with pytest.raises(ConfigError) as error:
            plan(*f"resources.{line}".split())
        said(error.value.render())
