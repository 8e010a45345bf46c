"""Tests the plan of a Slurm job: the requested resources, and the values derived from the nodes."""

import time
from dataclasses import replace

import pytest
from planning import plan_of

from tests.support.said import said
from trainkit.cluster.model import Cluster, NodeKind, Partition
from trainkit.cluster.target import Target
from trainkit.errors import ConfigError, SlurmError
from trainkit.plan.launch import LaunchPlan

GPU = Partition(
    "gpu",
    is_default=True,
    max_time_s=86400,
    default_time_s=600,
    nodes=(NodeKind(2, 64, 512_000, {"h100": 8}), NodeKind(6, 30, 128_000, {"a100": 4})),
)
CPU = Partition("cpu", max_time_s=3600, nodes=(NodeKind(20, 96, 256_000),))
WEST = Cluster("west", (GPU, CPU), slurm_version=(24, 5, 2), reason="west: somebody said so")


def plan(*overrides: str, cluster: Cluster = WEST, per: str = "gpu") -> LaunchPlan:
    given = ["train.global_batch_size=null", f"launch.per={per}", *overrides]
    return plan_of(*given, target=Target("sbatch", "sbatch: it is there", cluster))


def problems(*overrides: str, cluster: Cluster = WEST, per: str = "gpu") -> list[str]:
    with pytest.raises(ConfigError) as error:
        plan(*overrides, cluster=cluster, per=per)
    return [problem.render() for problem in error.value.problems]


def test_everything_from_the_default_partition():
    made = plan()
    assert (made.device, made.workers_per_node, made.threads_per_worker, made.world_size) == ("cuda", 8, 8, 8)
    assert made.slurm.version == (24, 5, 2)
    asked = {"gpus-per-node": "8", "cpus-per-task": 8, "ntasks-per-node": 8}
    assert asked.items() <= made.slurm.sbatch.items()
    names = ("cluster", "device", "workers_per_node", "threads_per_worker")
    said("\n".join(f"{name} = {made.reasons[name]}" for name in names))


@pytest.mark.parametrize(
    ("resource", "workers", "threads"),
    [
        ("nodes=2", 8, 8),
        ("nodes=2 resources.spare_nodes=1", 4, 7),  # only two nodes have eight GPUs
        *(("nodes=3", 4, 7), ("gpu_type=a100", 4, 7), ("gpu_type=h100", 8, 8)),
        ("gpus_per_node=2", 2, 7),  # this is the number of cores per GPU of the smallest node
        *(("gpus_per_node=6", 6, 8), ("cpus_per_gpu=3", 8, 3)),
    ],
)
def test_gpus_and_their_cores(resource, workers, threads):
    made = plan(*f"resources.{resource}".split())
    assert (made.workers_per_node, made.threads_per_worker) == (workers, threads)


def test_an_exclusive_job_uses_all_cpus_unless_their_number_is_given():
    def fills(*overrides):
        return plan("resources.extra={exclusive: true}", *overrides).slurm.fills_nodes

    assert fills()
    # Other jobs of the same user may run on the node.
    resources = ("extra.exclusive=false", "extra={exclusive: user}", "cpus_per_gpu=3", "partition=cpu")
    assert not any(fills(f"resources.{one}") for one in resources)
    assert not any(fills(f"launch.srun_extra={{{one}}}") for one in ("cpus-per-task: 2", "gpus-per-task: 1"))


def test_a_partition_without_gpus():
    made = plan("resources.partition=cpu", "resources.gpus_per_node=4")
    assert (made.device, made.workers_per_node, made.threads_per_worker) == ("cpu", 4, None)
    said(made.reasons["device"])
    assert not {"gpus-per-node", "gres", "cpus-per-task"} & set(made.slurm.sbatch)


def test_the_default_time_of_the_partition():
    made = plan("resources.time=null", "requeue.grace_s=200")
    said(made.reasons["time"])
    said(made.reasons["notice"])
    assert made.grace_s == 150
    assert "time" not in made.slurm.sbatch
    longest = plan("resources.time=null", "resources.partition=cpu")
    said(longest.reasons["time"])
    # No limit at all needs no earlier notice.
    free = replace(WEST, partitions=(replace(GPU, max_time_s=None),))
    made = plan("resources.time='0'", cluster=free)
    assert ("notice" in made.reasons, made.grace_s) == (False, 120)


def test_what_no_node_has():
    said("\n".join(problems("device=cuda", "resources.partition=cpu")))
    asked = ("resources.partition=cpu", "resources.gpus_per_node=97", "train.device_batch_size=1")
    said(problems(*asked)[0])
    assert plan(*asked, per="node").workers_per_node == 97  # the single task gets one core from Slurm
    assert plan(*asked, "resources.extra={overcommit: true}").workers_per_node == 97


def test_a_cluster_of_which_nothing_is_known():
    unknown = Cluster("unknown", reason="unknown: nobody said anything")
    said("\n".join(problems(cluster=unknown)))
    [found] = problems("device=cuda", cluster=unknown)
    said(found)
    made = plan("device=cuda", "resources.gpus_per_node=4", "resources.nodes=999", cluster=unknown)
    assert (made.world_size, made.threads_per_worker) == (3996, None)


@pytest.mark.parametrize("overrides", [(), ("device=cuda",)])
def test_slurm_that_does_not_answer_is_not_the_fault_of_the_config(overrides):
    away = Cluster("unknown", error="Slurm did not answer (connect failure)")
    with pytest.raises(SlurmError, match=r"is auto, .* is unknown: Slurm did not answer") as error:
        plan(*overrides, cluster=away)
    assert error.value.exit_code == 3
    said(error.value.hint)
    assert plan("device=cpu", cluster=away).device == "cpu"


def test_thousands_of_kinds_of_nodes():
    kinds = tuple(NodeKind(1, 64, 512_000, {"h100": 8}, (f"rack{number}",)) for number in range(4096))
    cluster = replace(WEST, partitions=(replace(GPU, nodes=kinds),))
    begin = time.process_time()
    made = plan("resources.nodes=4096", cluster=cluster)
    assert made.world_size == 32768
    assert time.process_time() - begin < 0.5


def test_spare_nodes_count_against_the_limits():
    cluster = replace(WEST, partitions=(GPU, Partition("small", max_nodes=2, nodes=CPU.nodes)))
    for typed in ("nodes=6 spare_nodes=3", "nodes=9 spare_nodes=3", "partition=small spare_nodes=2"):
        given = [f"resources.{word}" for word in (*typed.split(), "gpus_per_node=1")]
        said("\n".join(problems(*given, "train.device_batch_size=1", cluster=cluster)))


def test_what_says_how_many_nodes_says_spare_nodes_by_their_own_key():
    of_job = [f'tres-per-task: "{value}"' for value in ("gres/gpu:2", "cpu=4,gres/gpu:h100=2", "gpu")]
    asked = [f"resources.extra={{{one}}}" for one in ("no-kill: true", "clusters: east", *of_job)]
    asked += [f"launch.srun_extra={{{one}}}" for one in ("nodelist: h1", "export: NONE")]
    said("\n".join("\n".join(problems(one)) for one in asked))
    plan("resources.extra={tres-per-task: 'license/matlab:1'}")


def test_what_is_unusual_of_a_partition_is_said():
    mixed = replace(
        GPU, is_up=False, nodes=(NodeKind(2, 64, 512_000, {"h100": 2, "h100_1g.10gb": 6, "": 1}),)
    )
    made = plan("train.device_batch_size=1", cluster=replace(WEST, partitions=(mixed, CPU)))
    said(made.reasons["workers_per_node"])
    [not_up] = [warning for warning in made.warnings if warning not in plan().warnings]
    said(not_up)
    one = plan("resources.gpu_type=h100", cluster=replace(WEST, partitions=(mixed, CPU)))
    said(one.reasons["workers_per_node"])


def test_slurm_starts_a_job_again_only_where_that_is_wanted():
    def restarts(on):
        sbatch = plan(f"requeue.on={on}").slurm.sbatch
        return {name: sbatch[name] for name in ("requeue", "no-requeue") if name in sbatch}

    for on in ("[preempted, timeout, node_fail, crash, hang]", "[preempted]", "[node_fail, crash]"):
        assert restarts(on) == {"requeue": True}
    assert restarts("[timeout, crash, hang]") == restarts("[]") == {"no-requeue": True}
    for wanted, value in ((True, "expedite"), (False, True), (None, True)):
        assert plan(cluster=replace(WEST, expedited_requeue=wanted)).slurm.sbatch["requeue"] == value


BAD = {"h3": "lost (small, attempt 2)", "h1": "GPU 3 is gone (big, attempt 1)"}


@pytest.mark.parametrize(("nodes", "left_out"), [(1, "h3,h1"), (7, "h3"), (8, None)])
def test_bad_nodes_are_left_out_as_long_as_enough_are_left(nodes, left_out):
    cluster = replace(WEST, bad_nodes=BAD, forget_hint="`rm x` forgets that")
    given = (f"resources.nodes={nodes}", "resources.gpus_per_node=1", "train.device_batch_size=1")
    made = plan(*given, cluster=cluster)
    assert made.slurm.sbatch.get("exclude") == left_out
    said(made.reasons["exclude"])


def test_bad_nodes_and_those_that_the_config_names():
    cluster = replace(WEST, bad_nodes=BAD)

    def excluding(*overrides):
        return plan(*overrides, "resources.gpus_per_node=1", cluster=cluster)

    made = excluding("resources.extra.nodelist=h[2-3]")
    assert made.slurm.sbatch["exclude"] == "h1"
    said(made.reasons["exclude"])
    assert excluding("resources.extra.nodelist=false").slurm.sbatch["exclude"] == "h3,h1"
    assert excluding("resources.exclude=h[5-6]").slurm.sbatch["exclude"] == "h[5-6],h3,h1"
    unknown = plan("device=cpu", cluster=Cluster("west", bad_nodes=BAD))
    assert unknown.slurm.sbatch["exclude"] == "h3,h1"  # Slurm refuses hosts that do not exist


def test_bindings_that_leave_a_rank_without_a_gpu_of_its_own():
    bound = {
        "node": ("gpus-per-task: 1", "gpu-bind: single:4", "gpu-bind: per_task:2"),
        "gpu": ("gpus-per-task: 2", "gpus-per-task: h100:4", "ntasks-per-gpu: 2"),
    }
    for per, options in bound.items():
        for option in options:
            [problem] = problems(f"launch.srun_extra={{{option}}}", per=per)
            said(problem)


def test_what_nccl_may_lose_where_a_task_sees_one_gpu_is_said():
    bound = "launch.srun_extra={gpus-per-task: 1}"
    made = plan(bound)
    assert made.slurm.srun["gpus-per-task"] == 1
    [warning] = made.warnings
    said(warning)
    assert LaunchPlan.from_dict(made.to_dict()) == made
    [warning] = plan("resources.extra={gpu-bind: single:1}").warnings
    said(warning)
    srun = "gpus-per-task: 1, gpu-bind: none", "gpu-bind: mask_gpu:0xF"
    for fine in (*(f"launch.srun_extra={{{one}}}" for one in srun), "resources.partition=cpu"):
        assert plan(*([] if "srun" in fine else [bound]), fine).warnings == (), fine
    assert plan(bound, "resources.gpus_per_node=1").warnings == ()
