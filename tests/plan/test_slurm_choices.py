"""Tests the choices that a job leaves to Slurm: run time within a total, partition, and GPU type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planning import NO_GPU, plan_of, problems_of

from tests.support.said import said
from trainkit.capabilities.layouts.choices import find_hardware
from trainkit.cluster.model import Cluster, NodeKind, Partition
from trainkit.cluster.target import LOCAL, Target
from trainkit.config import load_config
from trainkit.errors import ConfigError
from trainkit.plan.launch import LaunchPlan

HOUR = 3600
PARTITIONS = (
    Partition("h", is_default=True, max_time_s=12 * HOUR, nodes=(NodeKind(8, 64, 900_000, {"h100": 8}),)),
    Partition("a", max_time_s=24 * HOUR, nodes=(NodeKind(8, 24, 500_000, {"a100-40gb": 4}),)),
    Partition("mixed", nodes=(NodeKind(2, 32, None, {"a100-40gb": 8}), NodeKind(2, 32, None, {"v100": 8}))),
    Partition("cpu", nodes=(NodeKind(64, 64),)),
    Partition("debug", max_time_s=HOUR // 2, max_nodes=1, nodes=(NodeKind(1, 4, None, {"h100": 1}),)),
)
WEST = Target("sbatch", "a test", Cluster("west", PARTITIONS, slurm_version=(24, 11, 5)))


def plan(*overrides: str, target: Target = WEST) -> LaunchPlan:
    return plan_of(*overrides, target=target)


@pytest.mark.parametrize(
    ("times", "asked", "lead_s", "total_s"),
    [
        (["time=10:00:00"], {"time": "10:00:00"}, 120, None),
        (["time=3-00:00:00", "slice=4:00:00"], {"time": "4:00:00"}, 120, 72 * HOUR),
        (["time=10:00:00", "time_min=00:04:00"], {"time": "10:00:00", "time-min": "00:04:00"}, 60, None),
        (["time=01:00:00", "slice=20:00", "time_min=2:00"], {"time": "20:00", "time-min": "2:00"}, 30, HOUR),
    ],
)
def test_the_notice_fits_the_shortest_limit(times, asked, lead_s, total_s):
    made = plan(*(f"resources.{time}" for time in times))
    given = {name: made.slurm.sbatch[name] for name in ("time", "time-min") if name in made.slurm.sbatch}
    assert given == asked
    assert (made.slurm.sbatch["signal"], made.grace_s) == (f"USR2@{lead_s}", lead_s)
    assert made.requeue.total_s == total_s
    assert LaunchPlan.from_dict(json.loads(made.to_text())) == made
    # A run on this machine is no job, so it is not cut into slices.
    assert plan(*(f"resources.{time}" for time in times), target=LOCAL).requeue.total_s is None


TIMES = """\
time=null slice=01:00:00
time='0' slice=01:00:00
time=01:00:00 slice=90:00
time=2-0 slice=13:00:00
time=01:00:00 time_min=2:00:00
time=01:00:00 slice=10:00 time_min=20:00
time=null time_min=20:00
time_min=soon
time=13:00:00 time_min=01:00:00
""".splitlines()
"""Slurm would accept the last job, and run it for no longer than time_min."""


def refused(*resources, target=WEST):
    found = problems_of(*(f"resources.{one}" for one in resources), target=target)
    return "\n".join(problem.render() for problem in found)


def test_times_that_are_refused():
    said("\n".join(refused(*line.split()) for line in TIMES))
    with pytest.raises(ConfigError, match=r"is 10:00, but requeue\.on does not include timeout"):
        plan("resources.slice=10:00", "requeue.on=[crash]")


def test_a_job_for_several_partitions_fits_each_that_can_start_it():
    made = plan("resources.partition=debug,h,a", "resources.nodes=2", "resources.time=01:00:00")
    assert made.slurm.sbatch["partition"] == "debug,h,a"
    # The job gets the GPUs of the smallest node, and the cores of the slowest.
    assert (made.workers_per_node, made.threads_per_worker) == (4, 6)
    assert made.slurm.sbatch["gpus-per-node"] == "4"
    said(made.reasons["partition"])
    assert made.slurm.gpu_types == {"h": "h100", "a": "a100-40gb"}
    assert plan("resources.partition=a").slurm.gpu_types == {}


@pytest.mark.parametrize(
    ("overrides", "partitions"),
    [
        # debug has one of the types, but its limit is too short
        (["gpu_type=h100,a100-40gb", "time=01:00:00"], "h,a"),
        (["gpu_type='a100-40gb , h100'", "time=01:00:00"], "h,a"),
        (["gpu_type=h100,a100-40gb", "partition=a,mixed,cpu"], "a"),
        (["gpu_type=h100,b200", "nodes=1", "time=00:10:00", "gpus_per_node=1"], "h,debug"),
    ],
)
def test_gpu_types_choose_the_partitions(overrides, partitions):
    made = plan(*(f"resources.{override}" for override in overrides))
    assert made.slurm.sbatch["partition"] == partitions
    assert made.slurm.sbatch["gpus-per-node"] == str(made.workers_per_node)
    assert made.reasons["partition"].startswith("a (a100-40gb)" if partitions == "a" else "h (h100) or ")
    assert list(made.slurm.gpu_types) == partitions.split(",")


@pytest.mark.parametrize(
    ("overrides", "gpu"),
    [
        *((["gpu_type=h100,a100-40gb"], "A100 40GB"), (["gpu_type='h100, a100-40gb'"], "A100 40GB")),
        # No partition has the other GPUs, has only these, or can start the job.
        (["gpu_type=h100,v100,t4"], "H100 80GB"),
        (["gpu_type=h100,a100-40gb", "partition=h"], "H100 80GB"),
        (["gpu_type=h100,a100-40gb", "time=13:00:00"], "A100 40GB"),
        # the GPUs of this cluster are unknown, so all count
        (["gpu_type=h100,a100-40gb", "constraint=fast"], "A100 40GB"),
    ],
)
def test_memory_is_checked_for_the_smallest_type_that_the_job_may_get(overrides, gpu):
    given = [f"resources.{override}" for override in overrides]
    config = load_config(None, overrides=given, environ={}, cwd=Path("/nowhere")).config
    assert find_hardware(config, NO_GPU, WEST, None, None).gpu.name == gpu


def test_types_that_no_partition_has_alone():
    typed = ("resources.gpu_type=v100,a100-40gb", "resources.partition=mixed", "device=cuda")
    [found] = problems_of(*typed, target=WEST)
    said(found.render())
    unknown = Target("sbatch", "a test", Cluster("east"))
    given = ("resources.gpu_type=v100,h100", "device=cuda", "resources.gpus_per_node=2")
    with pytest.raises(ConfigError, match="the partitions, which decide the type, are unknown"):
        plan(*given, target=unknown)
    made = plan("resources.gpu_type=v100,h100", "device=cpu", target=unknown)  # the run needs no GPU
    assert "partition" not in made.slurm.sbatch
