"""Tests the query before a submission: a few commands that run in parallel."""

import pytest

from tests.support.fake_slurm import FakeSlurm
from trainkit.cluster.discovery import parse_assoc_mgr, parse_qos, query_cluster
from trainkit.cluster.model import Account, Qos

CONFIG = "ClusterName = west\nSLURM_VERSION = 23.11.4\nAccountingStorageEnforce = {enforce}\n"
PARTITIONS = (
    "PartitionName=gpu Default=YES Hidden=NO MaxTime=1-00:00:00 MaxCPUsPerNode=24 TotalNodes=2 State=UP\n"
    "PartitionName=secret Default=NO Hidden=YES MaxTime=UNLIMITED MaxCPUsPerNode=UNLIMITED State=UP\n"
)
NODES = 2 * "CPUTot=32 AvailableFeatures=(null) Gres=gpu:h100:4 RealMemory=128000 Partitions=gpu\n"
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


def slurm(
    fake: FakeSlurm, enforce: str = "associations,limits,qos", accounts: str = ASSOCIATIONS
) -> FakeSlurm:
    for name, text in (
        *(("config", CONFIG.format(enforce=enforce)), ("partition", PARTITIONS)),
        *(("node", NODES), ("assoc_mgr", accounts)),
    ):
        (fake.folder / name).write_text(text)
    # The argument that selects the output moves if an option precedes it.
    fake.add("scontrol", '[ "$1" = show ] && what=$2 || what=$3; /bin/cat "$here/$what"')
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
    slurm(fake)
    (fake.folder / "config").write_text(f"ClusterName = west\nSLURM_VERSION = {version}\n{setting}\n")
    (fake.folder / "partition").write_text("PartitionName=gpu AllowAccounts=bio State=UP\n")
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
