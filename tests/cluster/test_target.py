"""Tests which facts about the cluster of a run are known, and when Slurm is queried for them."""

from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from tests.support.fake_slurm import FakeSlurm
from tests.support.said import said
from trainkit.capabilities.init.init_files import profile_text, write_new
from trainkit.cluster.bad_nodes import note_failure
from trainkit.cluster.discovery import discover_cluster, gpu_option
from trainkit.cluster.model import Account, Cluster, NodeKind, Partition, Qos
from trainkit.cluster.profile import known_cluster, user_folder
from trainkit.config import LoadedConfig, load_config
from trainkit.errors import ConfigError, UsageError

ANSWERS = {
    "config": "ClusterName = west\nSLURM_VERSION = 23.11.4\nAccountingStorageEnforce = associations\n"
    "AccountingStorageType = accounting_storage/slurmdbd\nSelectType = select/linear\n",
    "partition": "PartitionName=gpu Default=YES MaxTime=01:00:00 MaxNodes=1 TotalNodes=2 State=UP\n",
    "node": 2 * "CPUTot=32 AvailableFeatures=ib Gres=gpu:h100:4 RealMemory=128000 Partitions=gpu\n",
    "assoc_mgr": "ClusterName=west Account=physics UserName=me(0) Partition= DefAssoc=Yes\n"
    "QOS=long(1) MaxWallPJ=\n",
}
GPU = Partition(
    *("gpu", True), max_time_s=3600, max_nodes=1, nodes=(NodeKind(2, 32, 128_000, {"h100": 4}, ("ib",)),)
)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "slurm")
    (fake.folder / "bin").mkdir(parents=True)
    monkeypatch.setattr("getpass.getuser", lambda: "me")
    fake.shows(**ANSWERS)
    fake.add("sbatch", "echo slurm 23.11.4")
    fake.add("srun", "echo --container-image")
    fake.add(
        "sacctmgr",
        'case "$*" in *qos*Flags*) echo "long||PartitionTimeLimit";; *) echo "physics|physics||long";; esac',
    )
    (fake.folder / "slurm.conf").write_text("ClusterName=west\n")
    monkeypatch.setenv("PATH", fake.environ["PATH"])
    monkeypatch.setenv("SLURM_CONF", str(fake.folder / "slurm.conf"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(fake.folder))
    monkeypatch.chdir(fake.folder)
    return fake


def known(slurm: FakeSlurm, *overrides: str) -> Cluster:
    loaded: LoadedConfig = load_config(None, overrides=overrides, environ={}, cwd=slurm.folder)
    return known_cluster(loaded)


def test_from_slurm(slurm):
    found = known(slurm)
    said(found.reason)
    assert replace(found, reason="") == Cluster("west", (GPU,), gpu_option="gres", slurm_version=(23, 11, 4))
    assert slurm.programs == ["scontrol"] * 3


def test_accounts_only_where_one_is_named(slurm):
    found = known(slurm, "resources.account=physics")
    assert found.accounts == (Account("physics", True),)
    assert found.qos == (Qos("long", None, None),)
    assert "sacctmgr" not in slurm.programs


def test_what_a_qos_overrides_is_queried_only_where_it_decides(slurm):
    assert known(slurm, "resources.qos=long").qos == (Qos("long", None, None),)
    assert "sacctmgr" not in slurm.programs
    assert known(slurm, "resources.qos=long", "resources.time=2-0").qos == (Qos("long", None, ("time",)),)
    assert known(slurm, "resources.qos=long", "resources.nodes=2").qos == (Qos("long", None, ("time",)),)
    assert slurm.programs.count("sacctmgr") == 2


def test_clusters_that_a_job_can_be_sent_to(slurm):
    """Only the first cluster is queried. Names of hosts are not checked for several clusters."""
    slurm.add("sacctmgr", "echo west; echo east")
    slurm.add("scontrol", 'shift; [ "$1" = show ] || shift; /bin/cat "$here/$2"')
    (slurm.folder / "config").write_text(ANSWERS["config"].replace("west", "east"))
    note_failure("east", "g1", "died", "lost", run="/runs/small", attempt=2)
    for names in (["east"], ["east", "west"]):
        found = known(slurm, f"resources.clusters={','.join(names)}")
        assert bool(found.bad_nodes) == (len(names) == 1)
    assert {call[1] for call in slurm.calls if call[0] == "scontrol"} == {"--clusters=east"}


WITHOUT = "You are not running a supported accounting_storage plugin"


@pytest.mark.parametrize(
    ("names", "sacctmgr", "variable", "message", "hint"),
    [
        ("west,esat", "echo west; echo east", None, "contains esat, which Slurm's accounting does", "east"),
        ("east", f"echo {WITHOUT} >&2; exit 1", None, f"other clusters: sacctmgr: {WITHOUT}", "remove"),
        ("east", "echo east", "SLURM_CONF", "no slurm.conf contains the name of this cluster", "SLURM_CONF"),
        *(
            ("east", "echo east", name, "while the environment names several clusters: a,b", f"unset {both}")
            for both in ["SLURM_CLUSTERS SBATCH_CLUSTERS"]
            for name in both.split()
        ),
    ],
)
def test_clusters_that_it_cannot(slurm, monkeypatch, names, sacctmgr, variable, message, hint):
    slurm.add("sacctmgr", sacctmgr)
    if variable is not None:
        monkeypatch.setenv(variable, "/dev/null" if variable == "SLURM_CONF" else "a,b")
    with pytest.raises(ConfigError) as caught:
        known(slurm, f"resources.clusters={names}")
    (problem,) = caught.value.problems
    assert problem.key == "resources.clusters"
    assert message in problem.message
    assert hint in problem.hint
    assert slurm.programs == ["sacctmgr"]


def test_slurm_that_is_away(slurm):
    slurm.add("scontrol", "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1")
    found = known(slurm)
    assert found.partitions == ()
    said(found.error)
    said(found.reason)


@pytest.mark.parametrize("with_profile", [True, False])
@pytest.mark.parametrize("away", [True, False])
def test_hosts_that_failed_here_are_known(slurm, tmp_path, monkeypatch, with_profile, away):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "my state"))
    if with_profile:
        text = profile_text(Cluster("West", (GPU,)), date(2026, 1, 2))
        write_new(user_folder() / "west.yaml", text)
    if away:
        slurm.add("scontrol", "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1")
    for cluster, host in (("west", "g1"), ("east", "g2")):
        note_failure(cluster, host, "died", "lost", run="/runs/small", attempt=2)
    found = known_cluster(load_config(None, environ={}, cwd=slurm.folder))
    [(host, reason)] = found.bad_nodes.items()
    assert (host, reason.partition(",")[0]) == ("g1", "lost (small")
    file = tmp_path / "my state/trainkit/bad_nodes/west.json"
    said(found.forget_hint)
    file.unlink()
    found = known_cluster(load_config(None, environ={}, cwd=slurm.folder))
    assert (found.bad_nodes, found.forget_hint) == ({}, "")


def test_with_a_profile_slurm_is_not_queried(slurm):
    write_new(user_folder() / "west.yaml", profile_text(Cluster("west", (GPU,)), date(2026, 1, 2)))
    assert known(slurm).partitions == (GPU,)
    assert slurm.calls == []


def test_a_profile_without_partitions_is_filled_in(slurm):
    write_new(user_folder() / "west.yaml", "name: west\naccounts: {chem: null}\ngpu_option: gres\n")
    found = known(slurm, "resources.account=chem")
    assert found.partitions == (GPU,)
    assert found.accounts == (Account("chem"),)
    assert found.qos == (Qos("long", None, None),)
    said(found.reason)


@pytest.mark.parametrize(
    ("select", "option"),
    [("select/cons_tres", "gpus-per-node"), ("select/linear", "gres"), ("select/cons_res", "gres")],
)
def test_gpu_option(select, option):
    assert gpu_option({"SelectType": select}) == option


def test_the_expedited_requeue_is_offered_where_the_site_has_it(slurm):
    found = discover_cluster()
    assert found.expedited_requeue is None
    assert "expedited" not in profile_text(found, date(2026, 1, 2))
    (slurm.folder / "config").write_text(
        "ClusterName = west\nSLURM_VERSION = 25.11.1\nMaxArraySize = 1001\nJobRequeue = 1\n"
        "SlurmctldParameters = enable_expedited_requeue\n"
    )
    found = discover_cluster()
    assert found.expedited_requeue is False
    assert "\nexpedited_requeue: false\n" in profile_text(found, date(2026, 1, 2))


def test_a_new_file_replaces_nothing(tmp_path):
    path = tmp_path / "deep" / "a b.yaml"
    assert write_new(path, "one\n")
    assert not write_new(path, "two\n")
    assert path.read_text() == "one\n"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    assert not write_new(link, "three\n")
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        write_new(tmp_path / "file" / "x.yaml", "")
    with pytest.raises(UsageError, match=r"cannot write /proc/x\.yaml: "):
        write_new(Path("/proc/x.yaml"), "")
