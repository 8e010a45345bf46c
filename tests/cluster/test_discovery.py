"""Discovery of a cluster, and the parsers of what Slurm's commands print."""

import pytest

from tests.support.fake_slurm import FakeSlurm
from trainkit.cluster.discovery import (
    discover_cluster,
    has_slurm,
    parse_accounts,
    parse_gpus,
    parse_nodes,
    parse_partitions,
    parse_usable,
    with_usable,
)
from trainkit.cluster.model import Account, Cluster, NodeKind, Qos
from trainkit.slurm.client import FIELD, RECORD

PARTITIONS = """\
PartitionName=cpu AllowGroups=staff,hpc AllowAccounts=a,b AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A \
DefaultTime=NONE DisableRootJobs=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 \
Nodes=c[1-2] PreemptMode=OFF State=DOWN TotalCPUs=64 TotalNodes=2
PartitionName=gpu AllowGroups=ALL DenyAccounts=guest AllowQos=normal,long AllocNodes=ALL Default=YES QoS=N/A \
DefaultTime=01:00:00 GraceTime=30 MaxNodes=16 MaxTime=2-00:00:00 Nodes=g[1-3] PreemptMode=REQUEUE State=UP \
TotalCPUs=384 TotalNodes=3 TRES=cpu=384,mem=3T,node=3,gres/gpu=24
"""
CONFIG = """\
AccountingStorageEnforce = associations,limits
AccountingStorageType   = {storage}
ClusterName             = west
SLURM_VERSION           = 23.11.4
"""


def node_line(*fields: str) -> str:
    return FIELD.join(fields) + f"{RECORD}\n"


NODES = (
    node_line("cpu", "2", "32", "128000", "c[1-2]", "(null)", "(null)")
    + node_line("gpu", "1", "128", "1000000", "g1", "gpu:h100:8(S:0-1)", "ib,h100")
    + node_line("gpu", "1", "128", "1000000", "g3", "gpu:h100:8(S:0-1)", "ib,h100")
    + node_line("gpu", "1", "64+", "500000", "g2", "gpu:a100:2,gpu:a100:2,nvme:1", "ib")
)


def prints(fake: FakeSlurm, program: str, text: str, when: str = "") -> str:
    """Shell that prints this, under a condition."""
    (fake.folder / f"{program}{abs(hash(when))}").write_text(text)
    return f'{when} /bin/cat "$here/{program}{abs(hash(when))}"\n'


def discovered(fake: FakeSlurm, storage: str = "accounting_storage/slurmdbd", sacctmgr: str = "") -> Cluster:
    fake.add(
        "scontrol",
        prints(fake, "scontrol", CONFIG.format(storage=storage), '[ "$2" = config ] &&')
        + prints(fake, "scontrol", PARTITIONS, '[ "$2" = partition ] &&')
        + "exit 0",
    )
    fake.add("sinfo", prints(fake, "sinfo", NODES))
    fake.add("sbatch")
    fake.add(
        "sacctmgr",
        sacctmgr
        or prints(fake, "sacctmgr", "normal||\nlong|7-00:00:00|PartitionTimeLimit\n", '[ "$4" = qos ] &&')
        + prints(fake, "sacctmgr", "a|a||normal,long\na|b|gpu|normal\n", '[ "$4" = user ] &&')
        + "exit 0",
    )
    fake.add("srun", "echo '      --container-image=[USER@][REGISTRY#]IMAGE   [pyxis] the image'")
    cluster = discover_cluster()
    assert cluster is not None
    return cluster


def test_discover_cluster(fake: FakeSlurm) -> None:
    fake.add("apptainer")
    fake.add("enroot")
    cluster = discovered(fake)
    assert (cluster.name, cluster.slurm_version) == ("west", (23, 11, 4))
    assert [partition.name for partition in cluster.partitions] == ["gpu", "cpu"]
    assert cluster.partition(None) is cluster.partition("gpu") is cluster.partitions[0]
    assert cluster.partition("nope") is None
    assert cluster.containers == ("pyxis", "apptainer", "enroot")
    assert cluster.accounts == (
        Account("a", True, None, ("normal", "long")),
        Account("b", False, ("gpu",), ("normal",)),
    )
    assert cluster.qos == (Qos("normal"), Qos("long", 604800, ("time",)))


def test_few_calls(fake: FakeSlurm) -> None:
    discovered(fake)
    assert sorted(fake.programs) == [
        *("sacctmgr", "sacctmgr", "sbatch", "scontrol", "scontrol", "scontrol", "sinfo", "srun")
    ]
    assert "name=me" in next(call for call in fake.calls if call[0] == "sacctmgr")


def test_partitions() -> None:
    cpu, gpu = parse_partitions(PARTITIONS, parse_nodes(NODES))
    assert (cpu.is_default, cpu.is_up, cpu.max_time_s, cpu.default_time_s, cpu.max_nodes) == (
        *(False, False, None, None, None),
    )
    assert cpu.allowed_qos is None
    assert (gpu.is_default, gpu.is_up, gpu.max_time_s, gpu.default_time_s, gpu.max_nodes) == (
        *(True, True, 172800, 3600, 16),
    )
    assert gpu.allowed_qos == ("normal", "long")
    assert [kind.num_gpus() for kind in (*cpu.nodes, *gpu.nodes)] == [0, 8, 4]
    assert (cpu.num_nodes, gpu.num_nodes) == (2, 3)


def test_nodes_that_are_alike_are_counted_together() -> None:
    kinds = parse_nodes(NODES)
    assert kinds["cpu"] == (NodeKind(2, 32, 128000),)
    assert kinds["gpu"] == (
        NodeKind(2, 128, 1000000, {"h100": 8}, ("ib", "h100")),
        NodeKind(1, 64, 500000, {"a100": 4}, ("ib",)),
    )
    # Not part of the comparison.
    assert [kind.hosts for kind in (*kinds["cpu"], *kinds["gpu"])] == ["c[1-2]", "g1,g3", "g2"]
    unknown = node_line("cpu", "1", "0", "0", "c1", "(null)", "(null)")
    assert parse_nodes(unknown)["cpu"] == (NodeKind(1),)


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", {}),
        ("gpu:4", {"": 4}),
        ("gpu:a100:4(S:0-1)", {"a100": 4}),
        ("gpu:a100:4(S:0,1),gpu:h100:2(S:1)", {"a100": 4, "h100": 2}),
        ("gpu:nvidia_a100_3g.20gb:2", {"nvidia_a100_3g.20gb": 2}),
        ("gpu:a100:no_consume:4", {"a100": 4}),
        ("nvme:2,gpu:1,shard:a:16", {"": 1}),
        ("fpgagpu:3,mps:gpu:400", {}),
    ],
)
def test_gpus(gres: str, gpus: dict[str, int]) -> None:
    assert parse_gpus(gres) == gpus


def test_a_user_without_accounts() -> None:
    assert parse_accounts("") == ()


@pytest.mark.parametrize(
    ("storage", "sacctmgr"),
    [("(null)", ""), ("accounting_storage/none", ""), ("accounting_storage/slurmdbd", "echo no >&2; exit 1")],
)
def test_no_accounting(fake: FakeSlurm, storage: str, sacctmgr: str) -> None:
    cluster = discovered(fake, storage, sacctmgr)
    assert (cluster.accounts, cluster.qos) == (None, None)
    assert ("sacctmgr" in fake.programs) == bool(sacctmgr)


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (None, False),
        ("echo slurm 22.05.8", True),
        (
            "echo 'sbatch: error: fetch_config: DNS SRV lookup failed' >&2;"
            "echo 'sbatch: fatal: Could not establish a configuration source' >&2; exit 1",
            False,
        ),
        ("echo 'sbatch: fatal: Could not establish a configuration source' >&2; exit 1", True),
    ],
)
def test_has_slurm(fake: FakeSlurm, body: str | None, answer: bool) -> None:
    if body is not None:
        fake.add("sbatch", body)
    assert has_slurm() is answer


USABLE = """\
NodeName=c1 CPUAlloc=0 CPUEfctv=30 CPUTot=32 RealMemory=128000 AllocMem=0 MemSpecLimit=8000 OS=Linux
NodeName=g1 CPUAlloc=0 CPUTot=128 RealMemory=1000000 AllocMem=0 State=IDLE
NodeName=g2 CPUEfctv=64 CPUTot=64 CoreSpecCount=4 ThreadsPerCore=2 RealMemory=500000
NodeName=down CPUTot=0 RealMemory=1
"""


def test_usable_resources_of_a_node() -> None:
    assert parse_usable(USABLE) == {"c1": (30, 120000), "g1": (128, 1000000), "g2": (56, 500000)}


def test_one_node_of_each_kind_is_queried(fake: FakeSlurm) -> None:
    fake.add("scontrol", prints(fake, "scontrol", USABLE))
    kinds = with_usable(parse_nodes(NODES), 10)
    assert [call[-1] for call in fake.calls] == ["c1,g1,g2"]
    assert [(kind.cpus, kind.mem_mib) for kind in kinds["cpu"]] == [(30, 120000)]
    assert [(kind.cpus, kind.mem_mib) for kind in kinds["gpu"]] == [(128, 1000000), (56, 500000)]


def test_without_an_answer_everything_is_usable(fake: FakeSlurm) -> None:
    fake.add("scontrol", "exit 1")
    kinds = parse_nodes(NODES)
    assert with_usable(kinds, 10) == kinds
    assert with_usable({}, 10) == {}
    assert len(fake.calls) == 1
