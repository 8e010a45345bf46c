"""Tests the discovery of a cluster, the query before a submission, and the parsers of their output."""

import pytest

from tests.support.fake_slurm import FakeSlurm
from trainkit.cluster.discovery import (
    discover_cluster,
    has_slurm,
    parse_accounts,
    parse_assoc_mgr,
    parse_gpus,
    parse_nodes,
    parse_partitions,
    parse_qos,
    query_cluster,
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


def discovered(fake: FakeSlurm, storage: str = "accounting_storage/slurmdbd", sacctmgr: str = "") -> Cluster:
    fake.shows(config=CONFIG.format(storage=storage), partition=PARTITIONS, node=NODES)
    fake.add("sbatch")
    accounting = r"""case $4 in
        qos) printf 'normal||\nlong|7-00:00:00|PartitionTimeLimit\n' ;;
        user) printf 'a|a||normal,long\na|b|gpu|normal\n' ;;
    esac"""
    fake.add("sacctmgr", sacctmgr or accounting)
    fake.add("srun", "echo '      --container-image=[USER@][REGISTRY#]IMAGE   [pyxis] the image'")
    return discover_cluster()


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


SOME_PARTITIONS = (
    "PartitionName=gpu Default=YES Hidden=NO MaxTime=1-00:00:00 MaxCPUsPerNode=24 TotalNodes=2 State=UP\n"
    "PartitionName=secret Default=NO Hidden=YES MaxTime=UNLIMITED MaxCPUsPerNode=UNLIMITED State=UP\n"
)
SOME_NODES = 2 * "CPUTot=32 AvailableFeatures=(null) Gres=gpu:h100:4 RealMemory=128000 Partitions=gpu\n"
ASSOCIATIONS = """\
Current Association Manager state
Association Records
ClusterName=west Account=root UserName= Partition= ID=1 ParentAccount= Lft=1 DefAssoc=No GrpJobs=N(0)
ClusterName=west Account=science UserName= Partition= ID=2 ParentAccount=root(1) Lft=2 DefAssoc=No
ClusterName=west Account=physics UserName= Partition= ID=3 ParentAccount=science(2) Lft=3 DefAssoc=No
ClusterName=west Account=physics UserName=me(1000) Partition= ID=5 ParentAccount= Lft=4 DefAssoc=Yes
ClusterName=west Account=chem UserName=me(1000) Partition=gpu ID=6 ParentAccount= Lft=7 DefAssoc=No
ClusterName=west Account=chem UserName=me(1000) Partition=big ID=8 ParentAccount= Lft=9 DefAssoc=No
ClusterName=west Account=chem UserName=meagre(1001) Partition=gpu ID=7 ParentAccount= Lft=7 DefAssoc=Yes
QOS Records
QOS=normal(1) UsageRaw=0.000000 GrpJobs=N(0) MaxWallPJ= MaxTRESPJ= Account Limits physics MaxJobsPA=N(0)
QOS=brief(2) UsageRaw=0.000000 GrpJobs=N(0) MaxWallPJ=10 MaxTRESPJ=
"""


def slurm(fake: FakeSlurm, enforce: str = "associations,limits,qos") -> FakeSlurm:
    """Add the commands of a cluster that only `query_cluster` asks."""
    config = f"ClusterName = west\nSLURM_VERSION = 23.11.4\nAccountingStorageEnforce = {enforce}\n"
    fake.shows(config=config, partition=SOME_PARTITIONS, node=SOME_NODES, assoc_mgr=ASSOCIATIONS)
    return fake


def test_without_accounts(fake):
    slurm(fake)
    cluster = query_cluster()
    gpu, secret = cluster.partitions
    found = [(one.max_time_s, one.max_cpus_per_node, one.is_hidden) for one in (gpu, secret)]
    assert found == [(86400, 24, False), (None, None, True)]
    assert (cluster.slurm_version, cluster.accounts, cluster.qos) == ((23, 11, 4), None, None)
    assert sorted(call[2] for call in fake.calls) == ["config", "node", "partition"]


def test_with_accounts(fake):
    slurm(fake)
    cluster = query_cluster(with_accounts=True)
    # The account chem itself is hidden, as with PrivateData=usage.
    physics = Account("physics", True, parents=("science", "root"))
    assert cluster.accounts == (physics, Account("chem", False, ("gpu", "big")))
    assert cluster.qos == (Qos("normal", None, None), Qos("brief", 600, None))
    assert len(fake.calls) == 4


@pytest.mark.parametrize(
    ("version", "setting", "applies"),
    [
        # 22.05 checks the accounts by name, whatever the setting is
        ("22.05.8", "AccountingStorageEnforce = none", True),
        ("23.02.0", "AccountingStorageEnforce = none", False),
        ("24.11.1", "AccountingStorageEnforce = limits", False),
        ("24.11.1", "AccountingStorageEnforce = associations,limits", True),
        ("24.11.1", "", True),
    ],
)
def test_a_list_of_accounts_that_slurm_does_not_check(fake, version, setting, applies):
    config = f"ClusterName = west\nSLURM_VERSION = {version}\n{setting}\n"
    slurm(fake).shows(config=config, partition="PartitionName=gpu AllowAccounts=bio State=UP\n")
    [partition] = query_cluster(with_accounts=True).partitions
    assert partition.allowed_accounts == (("bio",) if applies else None)


def test_accounts_that_are_not_known(fake, monkeypatch):
    slurm(fake, enforce="none")
    cluster = query_cluster(with_accounts=True)
    assert (cluster.accounts, cluster.qos is None) == (None, False)
    slurm(fake).add("scontrol", '[ "$1" = show ] || exit 1; /bin/cat "$here/$2"')
    cluster = query_cluster(with_accounts=True)
    assert (cluster.name, cluster.accounts, cluster.qos) == ("west", None, None)
    monkeypatch.setattr("getpass.getuser", lambda: "you")
    slurm(fake)
    assert query_cluster(with_accounts=True).accounts is None


def test_the_commands_run_in_parallel(fake, monkeypatch):
    monkeypatch.setattr("trainkit.cluster.discovery.CLUSTER_TIMEOUT_S", 90.0)
    meet = (
        'what=$2; : > "$here/began.$$"; tries=0; set -- "$here"/began.*; while [ $# -lt 3 ]; do '
        'tries=$((tries+1)); [ $tries -lt 600 ] || exit 1; /bin/sleep 0.1; set -- "$here"/began.*; done; '
    )
    slurm(fake).add("scontrol", meet + '/bin/cat "$here/$what"')
    assert query_cluster().name == "west"


def test_qos():
    text = "normal||\nlong|7-00:00:00|DenyOnLimit,PartitionTimeLimit\nwide||PartitionMaxNodes\n"
    assert parse_qos(text) == (Qos("normal"), Qos("long", 604800, ("time",)), Qos("wide", None, ("nodes",)))
    both = Qos("any", None, ("nodes", "min_nodes"))
    assert parse_qos("any||PartitionMinNodes,PartitionMaxNodes\n") == (both,)
    assert parse_assoc_mgr(ASSOCIATIONS.splitlines()[0], "me") == ((), ())
