"""Tests which profile is used, and that its defaults have a lower priority than everything typed."""

from pathlib import Path

import pytest

from tests.support.said import said
from trainkit.cluster.profile import FoundProfile, find_profile, user_folder
from trainkit.cluster.target import load_with_cluster, make_target
from trainkit.config import LoadedConfig, load_config
from trainkit.errors import ConfigError

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
