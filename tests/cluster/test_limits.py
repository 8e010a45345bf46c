"""What a job asks for against what a cluster has and allows: every sentence that can come of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainkit.cluster.limits import partition_troubles, troubles
from trainkit.cluster.model import Account, Cluster, NodeKind, Partition, Qos
from trainkit.cluster.resource_request import ResourceRequest, features_of

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
ONE = ResourceRequest(nodes=1, workers_per_node=4, gpus_per_node=4, cpus_per_node=32, time="01:00:00")


def found(
    cluster: Cluster = WEST, asked: ResourceRequest = ONE, **changes: object
) -> list[tuple[str, str, str]]:
    return list(troubles(replace(asked, **changes), cluster))  # type: ignore[arg-type]


def test_what_fits() -> None:
    assert found() == []
    assert found(nodes=4, gpus_per_node=8, cpus_per_node=64, mem="500G", time="2-00:00:00") == []
    assert found(partition="cpu", gpus_per_node=None, cpus_per_node=96, workers_per_node=96) == []
    assert found(account="teaching", qos="normal") == []


@pytest.mark.parametrize(
    ("changes", "trouble"),
    [
        (
            {"partition": "gqu"},
            (
                *("resources.partition", "is gqu, and west has no such partition"),
                "did you mean gpu? there is gpu, cpu and debug",
            ),
        ),
        (
            {"time": "2-00:00:01"},
            (
                *("resources.time", "is 2-00:00:01, but partition gpu allows at most 2-00:00:00"),
                "--time 2-00:00:00 fits",
            ),
        ),
        (
            {"time": "0"},
            (
                *("resources.time", "asks for no limit, but partition gpu allows at most 2-00:00:00"),
                "--time 2-00:00:00 fits",
            ),
        ),
        (
            {"partition": "debug"},
            (
                *("resources.time", "is 01:00:00, but partition debug allows at most 00:30:00"),
                "--time 00:30:00 fits; partition gpu can take it as it is",
            ),
        ),
        (
            {"partition": "debug", "time": "10", "nodes": 3},
            (
                *("resources.nodes", "is 3, but a job in partition debug has at most 2"),
                "partition gpu can take it as it is",
            ),
        ),
        (
            {"nodes": 5, "gpus_per_node": 8, "cpus_per_node": 64},
            ("resources.nodes", "is 5, but partition gpu has 4 nodes with 8 GPUs and 64 CPUs", ""),
        ),
        (
            {"gpus_per_node": 16, "workers_per_node": 16},
            (
                *("resources.gpus_per_node", "is 16, but the nodes of partition gpu have at most 8 GPUs"),
                "--nodes 2 --gpus-per-node 8 has as many",
            ),
        ),
        (
            {"gpus_per_node": 12, "workers_per_node": 12},
            ("resources.gpus_per_node", "is 12, but the nodes of partition gpu have at most 8 GPUs", ""),
        ),
        (
            {"partition": "cpu"},
            (
                *("resources.gpus_per_node", "is 4, but the nodes of partition cpu have no GPU"),
                "partition gpu can take it as it is",
            ),
        ),
        (
            {"cpus_per_node": 80},
            (
                "resources.cpus_per_gpu",
                "is 20: 4 x 20 = 80 CPUs a node, but the nodes of partition gpu have 64",
                "",
            ),
        ),
        (
            {"gpus_per_node": None, "workers_per_node": 80, "cpus_per_node": 80},
            (
                "resources.gpus_per_node",
                "is 80, but the nodes of partition gpu have 64 CPUs, and every process needs one",
                "partition cpu can take it as it is",
            ),
        ),
        (
            {"mem": "501G"},
            ("resources.mem", "is 501G, but the nodes of partition gpu have 500G", ""),
        ),
        (
            {"gpu_type": "h10"},
            (
                *("resources.gpu_type", "is h10, and no node of partition gpu has such a GPU"),
                "did you mean h100? they have h100 and a100",
            ),
        ),
        (
            {"constraint": "ibb"},
            (
                *("resources.constraint", "names ibb, and no node of partition gpu has that feature"),
                "did you mean ib? they have ib, h100 and a100",
            ),
        ),
        (
            {"gpu_type": "h100", "nodes": 5},
            (
                "resources.nodes",
                "is 5, but partition gpu has 4 nodes with 4 GPUs of type h100 and 32 CPUs",
                "",
            ),
        ),
        (
            {"constraint": "ib&a100", "nodes": 9},
            (
                "resources.nodes",
                "is 9, but partition gpu has 8 nodes with 4 GPUs and 32 CPUs and ib and a100",
                "",
            ),
        ),
        (
            {"account": "phisics"},
            (
                *("resources.account", "is phisics, and you have no such account on west"),
                "did you mean physics? you have physics and teaching",
            ),
        ),
        (
            {"qos": "lang"},
            (
                "resources.qos",
                "is lang, and west has no such QOS",
                "did you mean long? there is normal, long and brief",
            ),
        ),
        (
            {"qos": "long", "account": "teaching"},
            ("resources.qos", "is long, which account teaching may not use", "it may use normal"),
        ),
        (
            {"qos": "brief", "time": "11", "account": "other"},
            ("resources.time", "is 11, but QOS brief allows at most 00:10:00", "--time 00:10:00 fits"),
        ),
    ],
)
def test_one_thing_that_is_wrong(changes: dict[str, object], trouble: tuple[str, str, str]) -> None:
    cluster = replace(WEST, accounts=None) if changes.get("account") == "other" else WEST
    assert found(cluster, **changes) == [trouble]


def test_everything_at_once() -> None:
    keys = [key for key, _, _ in found(nodes=11, time="3-0", gpus_per_node=9, workers_per_node=9, mem="1T")]
    assert keys == ["resources.time", "resources.nodes", "resources.gpus_per_node", "resources.mem"]


def test_no_default_partition() -> None:
    cluster = replace(WEST, partitions=(replace(GPU, is_default=False), CPU))
    assert found(cluster) == [
        ("resources.partition", "is not set, and west has no default partition", "there is gpu and cpu")
    ]


def test_hidden_partitions_can_be_named_and_are_not_told() -> None:
    cluster = replace(WEST, partitions=(GPU, replace(CPU, is_hidden=True)))
    assert found(cluster, partition="cpu", gpus_per_node=None) == []
    assert found(cluster, partition="other")[0][2] == "there is gpu"


def test_of_several_partitions_one_has_to_fit() -> None:
    assert found(partition="debug,gpu") == []
    assert [key for key, _, _ in found(partition="debug,cpu")] == ["resources.time"]
    assert [message for _, message, _ in found(partition="gpu,nope")] == [
        "is nope, and west has no such partition"
    ]


def test_a_qos_can_lift_limits_of_the_partition() -> None:
    assert found(qos="long", time="30-0") == []
    lifted = replace(WEST, qos=(Qos("long", overrides=("nodes",)),))
    assert found(lifted, qos="long", nodes=11) == []
    assert [key for key, _, _ in found(lifted, qos="long", nodes=13)] == ["resources.nodes"]


def test_what_a_qos_lifts_is_not_guessed() -> None:
    unknown = replace(WEST, qos=(Qos("brief", 600, overrides=None),), accounts=None)
    assert found(unknown, qos="brief", partition="debug", time="10", nodes=2) == []
    assert found(replace(WEST, qos=None, accounts=None), qos="any", time="30-0") == []
    assert [message for _, message, _ in found(unknown, qos="brief", time="30-0")] == [
        "is 30-0, but QOS brief allows at most 00:10:00"
    ]


def test_who_may_use_a_partition() -> None:
    cluster = replace(WEST, partitions=(replace(GPU, allowed_accounts=("chem",)), CPU))
    assert found(cluster) == [
        ("resources.partition", "is gpu, which account physics may not use", "accounts that may: chem")
    ]
    assert found(cluster, account="teaching") == [
        ("resources.account", "is teaching, which may not use partition gpu", "accounts that may: chem")
    ]
    denied = replace(WEST, partitions=(replace(GPU, denied_accounts=("physics",)), CPU))
    assert [key for key, _, _ in found(denied)] == ["resources.partition"]
    assert found(denied, account="teaching") == []


def test_from_23_02_on_accounts_below_an_allowed_one_may_too() -> None:
    cluster = replace(WEST, partitions=(replace(GPU, allowed_accounts=("science",)), CPU))
    assert found(replace(cluster, slurm_version=(22, 5, 8))) != []
    assert found(replace(cluster, slurm_version=(23, 2, 0))) == []
    assert found(replace(cluster, slurm_version=())) == []


def test_an_account_of_one_partition() -> None:
    accounts = (Account("physics", True, ("cpu",)), Account("physics", True, ("debug",)))
    cluster = replace(WEST, accounts=accounts)
    assert found(cluster) == [
        ("resources.partition", "is gpu, which account physics may not use", "it may use cpu and debug")
    ]
    assert found(cluster, partition="debug", time="10") == []


def test_which_qos_a_partition_takes() -> None:
    cluster = replace(
        WEST, partitions=(replace(GPU, allowed_qos=("long",)), replace(CPU, denied_qos=("long",)))
    )
    assert found(cluster, qos="normal") == [
        ("resources.qos", "is normal, which partition gpu does not take", "it takes long")
    ]
    assert [key for key, _, _ in found(cluster, qos="long", partition="cpu", gpus_per_node=None)] == [
        "resources.qos"
    ]


def test_accounting_knows_no_capitals() -> None:
    assert found(account="Physics", qos="LONG", time="30-0") == []


def test_where_it_is_known_from_is_said() -> None:
    cluster = replace(WEST, out_of_date_hint="west.yaml says so")
    assert found(cluster, time="3-0")[0][2] == "--time 2-00:00:00 fits; west.yaml says so"


def test_nothing_known_nothing_wrong() -> None:
    assert found(Cluster("unknown"), partition="any", nodes=10**6, time="0", qos="any", account="any") == []
    bare = Cluster("bare", (Partition("gpu", is_default=True),))
    assert found(bare, nodes=10**6, mem="900T", constraint="any", gpu_type="any") == []


def test_cpus_that_the_partition_keeps_back() -> None:
    cluster = replace(WEST, partitions=(replace(GPU, max_cpus_per_node=24),))
    assert found(cluster)[0][1] == "is 8: 4 x 8 = 32 CPUs a node, but the nodes of partition gpu have 24"


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
    [(key, message, _)] = partition_troubles(ONE, WEST, CPU)
    assert (key, message) == ("resources.gpus_per_node", "is 4, but the nodes of partition cpu have no GPU")
