"""Tests the discovery of a cluster, and the parsers for the output of Slurm's commands."""

import pytest

from tests.support.fake_slurm import FakeSlurm
from trainkit.cluster.discovery import (
    discover_cluster,
    has_slurm,
    parse_accounts,
    parse_gpus,
    parse_nodes,
    parse_partitions,
)
from trainkit.cluster.model import Account, Cluster, NodeKind, Qos

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


H100 = (
    "CPUTot=128 AvailableFeatures=ib,h100 Gres=gpu:h100:8(S:0-1) RealMemory=1000000 State=IDLE Partitions=gpu"
)
NODES = f"""\
NodeName=c1 CPUEfctv=30 CPUTot=32 AvailableFeatures=(null) Gres=(null) RealMemory=128000 MemSpecLimit=8000 \
OS=Linux 6.1 #1 SMP State=DOWN+DRAIN Partitions=cpu Reason=Gres=gpu:8 [root@now]
NodeName=c2 CPUEfctv=30 CPUTot=32 Gres=(null) RealMemory=128000 MemSpecLimit=8000 Partitions=cpu
NodeName=g1 {H100}
NodeName=g2 CPUEfctv=64 CPUTot=64 AvailableFeatures=ib Gres=gpu:a100:2,gpu:a100:2,nvme:1 CoreSpecCount=4 \
RealMemory=500000 ThreadsPerCore=2 Partitions=gpu,all
NodeName=g3 {H100}
NodeName=new CPUTot=0 RealMemory=0 Partitions=odd
NodeName=spare CPUTot=8 RealMemory=1000
"""


def prints(fake: FakeSlurm, program: str, text: str, when: str = "") -> str:
    """Return shell code that prints a text under a condition."""
    (fake.folder / f"{program}{abs(hash(when))}").write_text(text)
    return f'{when} /bin/cat "$here/{program}{abs(hash(when))}"\n'


def discovered(fake: FakeSlurm, storage: str = "accounting_storage/slurmdbd", sacctmgr: str = "") -> Cluster:
    fake.add(
        "scontrol",
        prints(fake, "scontrol", CONFIG.format(storage=storage), '[ "$2" = config ] &&')
        + prints(fake, "scontrol", PARTITIONS, '[ "$2" = partition ] &&')
        + prints(fake, "scontrol", NODES, '[ "$2" = node ] &&')
        + "exit 0",
    )
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
    return cluster


def test_discover_cluster(fake):
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
    programs = ["sacctmgr", "sacctmgr", "sbatch", *4 * ["scontrol"], "srun"]
    assert sorted(fake.programs) == programs
    assert "name=me" in next(call for call in fake.calls if call[0] == "sacctmgr")


def test_partitions_and_nodes_that_are_alike():
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
    a100 = NodeKind(1, 56, 500000, {"a100": 4}, ("ib",))
    assert parse_nodes(NODES) == {
        "cpu": (NodeKind(2, 30, 120000),),
        "gpu": (NodeKind(2, 128, 1000000, {"h100": 8}, ("ib", "h100")), a100),
        "all": (a100,),
        "odd": (NodeKind(1),),
    }
    assert parse_accounts("") == ()


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:a100:4(S:0,1),gpu:h100:2(S:1)", {"a100": 4, "h100": 2}),
        ("nvme:2,gpu:1,shard:a:16", {"": 1}),
        ("gpu:a100:2(IDX:0,2),gpu:a100:1(IDX:3),tmpdisk:100G", {"a100": 3}),
        ("gpu:mi250_(mcm)_oam:8(S:0-1)", {"mi250_(mcm)_oam": 8}),
        ("gpu:kepler,bandwidth:lustre:no_consume:4G", {"kepler": 1}),
        ("gres/gpu:h100=4", {"h100": 4}),
        ("cpu=128,mem=1000000M,billing=128,gres/gpu=8,gres/gpu:a100=8,gres/shard=32", {"a100": 8}),
        ("gres/gpu=3,gres/gpu:a100=2", {"": 1, "a100": 2}),
        ("gres/gpumem=80G,gres/gpuutil=100", {}),
        ("", {}),
    ],
)
def test_gpus(gres, gpus):
    """The other forms are in test_sites.py."""
    assert parse_gpus(gres) == gpus


@pytest.mark.parametrize(
    ("storage", "sacctmgr"),
    [("(null)", ""), ("accounting_storage/none", ""), ("accounting_storage/slurmdbd", "echo no >&2; exit 1")],
)
def test_no_accounting(fake, storage, sacctmgr):
    cluster = discovered(fake, storage, sacctmgr)
    assert (cluster.accounts, cluster.qos) == (None, None)
    assert ("sacctmgr" in fake.programs) == bool(sacctmgr)


def test_a_cluster_whose_configuration_is_missing_exists(fake):
    """The other answers of sbatch are in test_choose_backend.py."""
    fake.add("sbatch", "echo 'sbatch: fatal: Could not establish a configuration source' >&2; exit 1")
    assert has_slurm()
