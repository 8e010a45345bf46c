"""Tests the check of requests against a cluster: its messages, and that accepted requests fit."""

import re
from dataclasses import replace
from typing import Any

import pytest
import yaml

from tests.support.said import cases, said
from trainkit.cluster.limits import ResourceRequest, limit_problems, partition_problems
from trainkit.cluster.model import Account, Cluster, NodeKind, Partition, Qos, features_of
from trainkit.config.running import ResourcesConfig

HOUR_S = 3600
BIG = NodeKind(4, cpus=64, mem_mib=512_000, gpus={"h100": 8}, features=("ib", "h100"))
SMALL = NodeKind(8, cpus=32, mem_mib=128_000, gpus={"a100": 4}, features=("ib", "a100"))
GPU = Partition("gpu", is_default=True, max_time_s=48 * HOUR_S, max_nodes=10, nodes=(BIG, SMALL))
CPU = Partition("cpu", max_time_s=96 * HOUR_S, nodes=(NodeKind(20, cpus=96, mem_mib=256_000),))
DEBUG = Partition("debug", max_time_s=HOUR_S // 2, max_nodes=2, nodes=(replace(BIG, count=2),))
WEST = Cluster(
    "west",
    (GPU, CPU, DEBUG),
    accounts=(
        Account("physics", is_default=True, qos=("normal", "long")),
        Account("teaching", qos=("normal",)),
    ),
    qos=(Qos("normal"), Qos("long", overrides=("time",)), Qos("brief", 600)),
    slurm_version=(22, 5, 8),
)
DERIVED = {"workers_per_node": 4, "gpus_per_node": 4, "cpus_per_node": 32}
"""Maps keys to the values that a plan adds to the section `resources`."""


def request(cluster: Cluster, **values: Any) -> ResourceRequest:
    section = ResourcesConfig(**{key: value for key, value in values.items() if key not in DERIVED})
    return replace(
        ResourceRequest.of(section, cluster), **{key: values.get(key, was) for key, was in DERIVED.items()}
    )


def found(cluster: Cluster = WEST, **values: Any) -> list[tuple[str, str, str]]:
    return list(limit_problems(request(cluster, **values), cluster))


def test_what_fits():
    assert found() == []
    assert found(nodes=4, gpus_per_node=8, cpus_per_node=64, mem="500G", time="2-00:00:00") == []
    assert found(partition="cpu", gpus_per_node=None, cpus_per_node=96, workers_per_node=96) == []
    assert found(account="teaching", qos="normal") == []
    assert found(account="Physics", qos="LONG", time="30-0") == [], "accounting knows no capitals"
    # With an or, any node may do.
    assert found(constraint="h100|a100", nodes=9) == []
    assert found(constraint="[h100*2&a100*2]", nodes=10) == []
    assert found(OTHERS["one hidden"], partition="cpu", gpus_per_node=None) == []
    assert found(OTHERS["account"], partition="debug", time="10") == []
    assert found(OTHERS["reservation"], reservation="maint") == []
    for overrides, number in ((("min_nodes",), 0), (("nodes",), 1)):
        cluster = replace(OTHERS["several nodes"], qos=(Qos("normal", overrides=overrides),))
        assert len(found(cluster, qos="normal")) == number
    # Nothing is refused where nothing is known.
    assert found(Cluster("unknown"), partition="any", nodes=10**6, time="0", qos="any", account="any") == []
    bare = Cluster("bare", (Partition("gpu", is_default=True),))
    assert found(bare, nodes=10**6, mem="900T", constraint="any", gpu_type="any") == []


@pytest.mark.parametrize("parents", [None, ("bio", "root")])
def test_a_partition_accepts_the_accounts_below_its_own(parents):
    """Slurm has accepted sub-accounts since 23.02. An account with unknown parents is accepted too."""
    account, partition = Account("physics", True, parents=parents), replace(GPU, allowed_accounts=("bio",))
    for version, number in (((23, 2), 0), ((22, 5), 1)):
        cluster = replace(WEST, slurm_version=version, accounts=(account,), partitions=(partition,))
        assert len(found(cluster)) == number


OTHERS = {
    "no accounts": replace(WEST, accounts=None),
    "no default": replace(WEST, partitions=(replace(GPU, is_default=False), CPU)),
    "one hidden": replace(WEST, partitions=(GPU, replace(CPU, is_hidden=True))),
    "account": replace(WEST, accounts=(Account("physics", True, ("cpu", "debug")),)),
    "qos": replace(
        WEST, partitions=(replace(GPU, allowed_qos=("long",)), replace(CPU, denied_qos=("long",)))
    ),
    "less CPUs": replace(WEST, partitions=(replace(GPU, max_cpus_per_node=24),)),
    "several nodes": replace(WEST, partitions=(replace(GPU, min_nodes=2),)),
    "less memory": replace(WEST, partitions=(replace(GPU, max_mem_mib=64_000),)),
    "memory per CPU": replace(WEST, partitions=(replace(GPU, max_mem_per_cpu_mib=1000),)),
    "accounts": replace(WEST, partitions=(replace(GPU, allowed_accounts=("teaching", "bio")),)),
    "denied": replace(WEST, accounts=None, partitions=(replace(GPU, denied_accounts=("Bio",)),)),
    "subaccount": replace(
        WEST,
        slurm_version=(23, 2),
        accounts=(Account("physics", True, parents=("science", "root")),),
        partitions=(replace(GPU, denied_accounts=("science",)), replace(CPU, allowed_accounts=("bio",))),
    ),
    "reservation": replace(WEST, partitions=(replace(GPU, needs_reservation=True),)),
    "groups": replace(
        WEST, groups=("users", "lab"), partitions=(replace(GPU, allowed_groups=("ai", "hpc")),)
    ),
    "profile": replace(WEST, out_of_date_hint="west.yaml says so"),
}


@pytest.mark.parametrize("changes", cases(__file__, "test_one_problem"))
def test_one_problem(changes):
    values = yaml.safe_load(f"{{{changes}}}")
    cluster = OTHERS.get(values.pop("where", ""), WEST)
    [(key, message, hint)] = found(cluster, **values)
    said(f"{key} {message}\nhint: {hint}")
    if (fits := re.match(r"--time (\S+) fits", hint)) is not None:
        assert found(cluster, **values | {"time": fits[1]}) == []


def test_several_problems_and_partitions():
    keys = [key for key, _, _ in found(nodes=11, time="3-0", gpus_per_node=9, workers_per_node=9, mem="1T")]
    assert keys == [f"resources.{name}" for name in ("time", "nodes", "gpus_per_node", "mem")]
    # A misspelt type does not hide that there are too few GPUs.
    misspelt = found(gpu_type="h10", constraint="ibb", gpus_per_node=16, workers_per_node=16)
    names = ("constraint", "gpu_type", "gpus_per_node")
    assert [key for key, _, _ in misspelt] == [f"resources.{name}" for name in names]
    assert found(partition="debug,gpu") == []
    assert [key for key, _, _ in found(partition="debug,cpu")] == ["resources.time"]
    said("\n".join(message for _, message, _ in found(partition="gpu,nope")))
    [(key, message, _)] = partition_problems(request(WEST), WEST, CPU)
    assert key == "resources.gpus_per_node"
    said(message)


def test_overrides_of_a_qos():
    assert found(qos="long", time="30-0") == []
    lifted = replace(WEST, qos=(Qos("long", overrides=("nodes",)),))
    assert found(lifted, qos="long", nodes=11) == []
    assert [key for key, _, _ in found(lifted, qos="long", nodes=13)] == ["resources.nodes"]
    unknown = replace(WEST, qos=(Qos("brief", 600, overrides=None),), accounts=None)
    assert found(unknown, qos="brief", partition="debug", time="10", nodes=2) == []
    assert found(replace(WEST, qos=None, accounts=None), qos="any", time="30-0") == []
    said("\n".join(message for _, message, _ in found(unknown, qos="brief", time="30-0")))


@pytest.mark.parametrize(
    ("constraint", "names"),
    [
        (None, ()),
        ("a", ("a",)),
        ("a&b", ("a", "b")),
        ("[r1*2&r2*4]", ("r1", "r2")),
        ("(a|b)&c,d", ("a", "b", "c", "d")),
    ],
)
def test_features_of_a_constraint(constraint, names):
    assert features_of(constraint) == names
