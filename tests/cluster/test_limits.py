"""Tests the check of requests against a cluster: its messages, and that accepted requests fit."""

import re
from dataclasses import replace
from typing import Any

import pytest
import yaml

from tests.support.said import said
from tests.support.tables import messages
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


def test_what_fits() -> None:
    assert found() == []
    assert found(nodes=4, gpus_per_node=8, cpus_per_node=64, mem="500G", time="2-00:00:00") == []
    assert found(partition="cpu", gpus_per_node=None, cpus_per_node=96, workers_per_node=96) == []
    assert found(account="teaching", qos="normal") == []
    assert found(OTHERS["one hidden"], partition="cpu", gpus_per_node=None) == []
    assert found(OTHERS["account"], partition="debug", time="10") == []
    assert found(OTHERS["reservation"], reservation="maint") == []
    for overrides, number in ((("min_nodes",), 0), (("nodes",), 1)):
        cluster = replace(OTHERS["several nodes"], qos=(Qos("normal", overrides=overrides),))
        assert len(found(cluster, qos="normal")) == number


@pytest.mark.parametrize("parents", [None, ("bio", "root")])
def test_a_partition_accepts_the_accounts_below_its_own(parents: tuple[str, ...] | None) -> None:
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
PROBLEMS = """
where: no default
    resources.partition is not set, and west has no default partition
    hint: west has gpu and cpu
where: one hidden, partition: other
    resources.partition is other, but west has no such partition
    hint: west has gpu
where: account
    resources.partition is gpu, which account physics may not use
    hint: it may use cpu and debug
where: qos, qos: normal
    resources.qos is normal, which partition gpu does not accept
    hint: it accepts long
where: qos, qos: long, partition: cpu, gpus_per_node: null
    resources.qos is long, which partition cpu does not accept
where: less CPUs
    resources.cpus_per_gpu is 8: 4 x 8 = 32 CPUs per node, but the nodes of partition gpu have 24
where: several nodes
    resources.nodes is 1, but a job in partition gpu needs at least 2 nodes
    hint: --nodes 2 is enough
where: less memory, mem: 100G
    resources.mem is 100G, but a job in partition gpu can use at most 64000M of a node
where: memory per CPU, mem: 100G
    resources.mem is 100G, but a job in partition gpu can use at most 64000M of a node
where: accounts
    resources.account is physics, which partition gpu does not accept
    hint: it accepts teaching and bio
where: denied, account: bio
    resources.account is bio, which partition gpu does not accept
where: subaccount
    resources.account is physics, which partition gpu does not accept
where: subaccount, partition: cpu, gpus_per_node: null
    resources.account is physics, which partition cpu does not accept
    hint: it accepts bio
where: reservation
    resources.reservation is not set, but partition gpu accepts only jobs with a reservation
    hint: `scontrol show reservation` lists the reservations
where: groups
    resources.partition is gpu, which only members of ai or hpc may use
    hint: your groups: users and lab
where: profile, time: 3-0
    resources.time is 3-00:00:00, but partition gpu allows at most 2-00:00:00
    hint: --time 2-00:00:00 fits; west.yaml says so
partition: gqu
    resources.partition is gqu, but west has no such partition
    hint: did you mean gpu? west has gpu, cpu and debug
time: 2-00:00:01
    resources.time is 2-00:00:01, but partition gpu allows at most 2-00:00:00
    hint: --time 2-00:00:00 fits
time: '0'
    resources.time sets no limit, but partition gpu allows at most 2-00:00:00
    hint: --time 2-00:00:00 fits
partition: debug
    resources.time is 01:00:00, but partition debug allows at most 00:30:00
    hint: --time 00:30:00 fits
partition: debug, time: '10', nodes: 3
    resources.nodes is 3, but a job in partition debug can have at most 2 nodes
nodes: 5, workers_per_node: 8, gpus_per_node: 8, cpus_per_node: 64
    resources.nodes is 5, but partition gpu has 4 nodes with 8 GPUs and 64 CPUs
gpus_per_node: 16, workers_per_node: 16
    resources.gpus_per_node is 16, but the nodes of partition gpu have at most 8 GPUs
    hint: request at most --gpus-per-node 8, and get the same total with more --nodes
partition: cpu
    resources.gpus_per_node is 4, but the nodes of partition cpu have no GPUs
cpus_per_node: 80
    resources.cpus_per_gpu is 20: 4 x 20 = 80 CPUs per node, but the nodes of partition gpu have 64
gpus_per_node: null, workers_per_node: 80, cpus_per_node: 80
    resources.gpus_per_node is 80, but the nodes of partition gpu have 64 CPUs, and every process needs one
mem: 501G
    resources.mem is 501G, but the nodes of partition gpu have 500G
gpu_type: h10
    resources.gpu_type is h10, but no node of partition gpu has such a GPU
    hint: did you mean h100? they have h100 and a100
constraint: ibb
    resources.constraint contains ibb, but no node of partition gpu has that feature
    hint: did you mean ib? they have ib, h100 and a100
gpu_type: h100, nodes: 5
    resources.nodes is 5, but partition gpu has 4 nodes with 4 GPUs of type h100 and 32 CPUs
constraint: ib&a100, nodes: 9
    resources.nodes is 9, but partition gpu has 8 nodes with 4 GPUs, 32 CPUs, feature ib and feature a100
constraint: h100&a100
    resources.constraint is h100&a100, but no node of partition gpu has all of these features
constraint: h100, gpu_type: a100
    resources.constraint is h100, but no node of partition gpu with a100 GPUs has all of these features
account: phisics
    resources.account is phisics, but you have no such account on west
    hint: did you mean physics? your accounts: physics and teaching
qos: lang
    resources.qos is lang, but west has no such QOS
    hint: did you mean long? west has normal, long and brief
qos: long, account: teaching
    resources.qos is long, which account teaching may not use
    hint: it may use normal
where: no accounts, qos: brief, time: '11', account: other
    resources.time is 00:11:00, but QOS brief allows at most 00:10:00
    hint: --time 00:10:00 fits
"""


@pytest.mark.parametrize(("changes", "problem"), messages(PROBLEMS))
def test_one_problem(changes: str, problem: str) -> None:
    values = yaml.safe_load(f"{{{changes}}}")
    cluster = OTHERS.get(values.pop("where", ""), WEST)
    [(key, message, hint)] = found(cluster, **values)
    assert f"{key} {message}" + (f"\n  hint: {hint}" if hint else "") == problem
    if (fits := re.match(r"--time (\S+) fits", hint)) is not None:
        assert found(cluster, **values | {"time": fits[1]}) == []


def test_all_problems_at_once() -> None:
    keys = [key for key, _, _ in found(nodes=11, time="3-0", gpus_per_node=9, workers_per_node=9, mem="1T")]
    assert keys == ["resources.time", "resources.nodes", "resources.gpus_per_node", "resources.mem"]


def test_one_of_several_partitions_has_to_fit() -> None:
    assert found(partition="debug,gpu") == []
    assert [key for key, _, _ in found(partition="debug,cpu")] == ["resources.time"]
    said("\n".join(message for _, message, _ in found(partition="gpu,nope")))


def test_a_qos_can_override_limits_of_the_partition() -> None:
    assert found(qos="long", time="30-0") == []
    lifted = replace(WEST, qos=(Qos("long", overrides=("nodes",)),))
    assert found(lifted, qos="long", nodes=11) == []
    assert [key for key, _, _ in found(lifted, qos="long", nodes=13)] == ["resources.nodes"]


def test_unknown_overrides_of_a_qos() -> None:
    unknown = replace(WEST, qos=(Qos("brief", 600, overrides=None),), accounts=None)
    assert found(unknown, qos="brief", partition="debug", time="10", nodes=2) == []
    assert found(replace(WEST, qos=None, accounts=None), qos="any", time="30-0") == []
    said("\n".join(message for _, message, _ in found(unknown, qos="brief", time="30-0")))


def test_accounting_knows_no_capitals() -> None:
    assert found(account="Physics", qos="LONG", time="30-0") == []


def test_nothing_is_refused_where_nothing_is_known() -> None:
    assert found(Cluster("unknown"), partition="any", nodes=10**6, time="0", qos="any", account="any") == []
    bare = Cluster("bare", (Partition("gpu", is_default=True),))
    assert found(bare, nodes=10**6, mem="900T", constraint="any", gpu_type="any") == []


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
def test_features_of_a_constraint(constraint: str | None, names: tuple[str, ...]) -> None:
    assert features_of(constraint) == names


def test_with_an_or_any_node_may_do() -> None:
    assert found(constraint="h100|a100", nodes=9) == []
    assert found(constraint="[h100*2&a100*2]", nodes=10) == []


def test_the_reason_of_one_partition_for_the_table_of_all() -> None:
    [(key, message, _)] = partition_problems(request(WEST), WEST, CPU)
    assert key == "resources.gpus_per_node"
    said(message)


def test_a_misspelt_type_does_not_hide_that_there_are_too_few_gpus() -> None:
    keys = [
        key for key, _, _ in found(gpu_type="h10", constraint="ibb", gpus_per_node=16, workers_per_node=16)
    ]
    assert keys == ["resources.constraint", "resources.gpu_type", "resources.gpus_per_node"]
