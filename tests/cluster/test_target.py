"""Tests the profile of a cluster, the facts about a run's cluster, and when Slurm is queried for them."""

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
from trainkit.cluster.profile import FoundProfile, find_profile, known_cluster, user_folder
from trainkit.cluster.target import load_with_cluster, make_target
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


PARTITIONS = "partitions: {gpu: {default: true, nodes: [{count: 2, gpus: {h100: 8}}]}}\n"


class Place:
    """A folder to submit from, with a user's config folder and a slurm.conf."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cwd = folder / "project"
        self.cwd.mkdir()
        self.environ = {
            "XDG_CONFIG_HOME": str(folder / "xdg"),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": str(folder),
        }
        (folder / "sbatch").touch(mode=0o755)
        for name, value in self.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(self.cwd)
        self.cluster("west")

    def cluster(self, name: str | None) -> None:
        Path(self.environ["SLURM_CONF"]).write_text(f"ClusterName={name}\n" if name else "")

    def profile(self, stem: str, text: str, of_user: bool = True) -> Path:
        folder = user_folder() if of_user else self.cwd / "clusters"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{stem}.yaml").write_text(text)
        return folder / f"{stem}.yaml"

    def load(self, *overrides: str) -> LoadedConfig:
        return load_with_cluster(None, overrides=overrides)

    def find(self, *overrides: str) -> FoundProfile | None:
        return find_profile(load_config(None, overrides=overrides))

    def taken(self, *overrides: str) -> str:
        found = self.find(*overrides)
        return found.path.stem

    def refused(self, *overrides: str) -> str:
        with pytest.raises(ConfigError) as error:
            self.find(*overrides)
        [problem] = error.value.problems
        return problem.render()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


def test_the_one_of_the_cluster(place):
    assert place.find() is None
    place.profile("east", "name: east\n")
    assert place.find() is None, "it is that of another cluster, if the only one"
    place.profile("home", "name: WEST\n")
    found = place.find()
    assert found.path.stem == "home"
    said(found.reason)
    # The profile of the project is preferred to the user's.
    own = place.profile("ours", "name: west\n", of_user=False)
    found = place.find()
    assert (found.path, found.shown) == (own, "clusters/ours.yaml")


def test_the_only_one_where_no_file_names_the_cluster(place):
    place.cluster(None)
    place.profile("east", "name: east\n")
    assert place.taken() == "east"
    place.profile("north", "name: north\n")
    assert place.find() is None


def test_two_of_one_cluster(place):
    place.profile("big", "name: west\n")
    place.profile("small", "name: west\n")
    said(place.refused())
    assert place.taken("launch.cluster=small") == "small"
    place.profile("west", "name: west\n")
    assert place.taken() == "west"


def test_a_named_one(place, monkeypatch):
    place.profile("east", "name: east\n")
    said(place.refused("launch.cluster=eats"))
    said(place.refused("launch.cluster=../east"))
    place.profile("east", "name: east\ndefaults: {seed: 9}\n")
    found = place.find("launch.cluster=east")
    said(found.reason)
    assert place.taken("launch.cluster=example") == "example"
    monkeypatch.setenv("TRAINKIT_LAUNCH__CLUSTER", "east")
    assert place.load().config.seed == 9


def test_a_broken_one_is_reported_only_where_it_is_taken(place):
    place.profile("east", "name: [")
    place.profile("north", "nmae: north\n")
    assert place.find() is None
    place.profile("west", "name: west\nslrm_version: x\n")
    said(place.refused())


def test_a_profile_that_changes_is_read_again(place):
    file = place.profile("west", "name: west\n")
    assert place.taken() == "west"
    file.write_text("name: west\ngpu_option: gres\n")
    found = place.find()
    assert found.profile.gpu_option == "gres"


DEFAULTS = (
    "name: west\ndefaults:\n  seed: 5\n  launch:\n    network: ib\n    env: {A: '1', B: '1'}\n  resources:\n"
)


def test_defaults_lie_below_everything(place, monkeypatch):
    file = place.profile("west", DEFAULTS)
    loaded = place.load("launch.env={B: '2'}")
    assert (loaded.config.seed, loaded.config.launch.network) == (5, "ib")
    assert loaded.config.launch.env == {"A": "1", "B": "2"}
    assert loaded.origins["seed"] == f"{file}:3"
    assert loaded.origins["launch.env.A"] == f"{file}:6"
    (place.cwd / "trainkit.yaml").write_text("seed: 6\n")
    assert place.load().config.seed == 6
    monkeypatch.setenv("TRAINKIT_SEED", "7")
    assert place.load().config.seed == 7
    assert place.load("seed=8").config.seed == 8


def test_a_run_on_this_machine_has_no_cluster(place):
    place.profile("west", DEFAULTS)
    assert place.load("launch.backend=local").config.seed == 0
    (Path(place.environ["PATH"]) / "sbatch").unlink()
    assert place.load().config.seed == 0


def test_problems_of_defaults_have_their_place(place):
    place.profile("west", DEFAULTS.replace("seed", "sead").replace("network: ib", "network: 3"))
    with pytest.raises(ConfigError) as error:
        place.load()
    said("\n".join(problem.render() for problem in error.value.problems))


def test_target(place):
    place.profile("west", f"name: west\n{PARTITIONS}")
    target = make_target(place.load())
    assert target.backend == "sbatch"
    assert [item.name for item in target.cluster.partitions] == ["gpu"]
    said(target.cluster.reason)
    said(target.cluster.out_of_date_hint)
    assert make_target(place.load(), "local").cluster is None
    assert make_target(place.load("launch.backend=submitit"), None).backend == "submitit"


def test_a_named_cluster_is_meant_where_there_is_no_slurm_too(place, monkeypatch):
    place.profile("east", f"name: east\n{PARTITIONS}")
    monkeypatch.setenv("PATH", "/nowhere")
    target = make_target(place.load("launch.cluster=east"))
    assert target.backend == "sbatch"
    said(target.reason)
    said(make_target(place.load()).reason)
