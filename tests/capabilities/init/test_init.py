"""Tests `trainkit init` without Slurm, and the first run config; tests/on_slurm tests it on a cluster."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.said import said
from trainkit.capabilities.init.init_files import first_partition, first_run_text
from trainkit.cli.main import main
from trainkit.cluster.machine import Machine
from trainkit.cluster.model import Account, Cluster, NodeKind, Partition
from trainkit.cluster.target import Target
from trainkit.config import load_config
from trainkit.plan.facts import Facts
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.make_plan import make_plan


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder on a machine that has neither Slurm's commands nor its files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def test_a_run_config_only(folder, capsys):
    assert main(["init"]) == 0
    out, err = capsys.readouterr()
    assert out == "first-run.yaml\n"
    said(err)
    assert sorted(path.name for path in folder.iterdir()) == ["first-run.yaml"]
    assert main(["check", "first-run.yaml"]) == 0


def test_json(folder, capsys):
    assert main(["init", "--dir", "a b", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"cluster": None, "written": ["a b/first-run.yaml"], "kept": []}
    said(err)


def test_nothing_is_overwritten_or_made_up(folder, capsys):
    assert main(["init", "--cluster", "west"]) == 2
    said(capsys.readouterr().err)
    assert list(folder.iterdir()) == []
    (folder / "first-run.yaml").write_text("name: mine\n")
    assert main(["init"]) == 2
    said(capsys.readouterr().err)
    assert (folder / "first-run.yaml").read_text() == "name: mine\n"


@pytest.mark.parametrize("num_gpus", [1, 2, 4, 8, 16, 64])
def test_a_task_trains_on_any_number_of_gpus(folder, num_gpus):
    assert main(["init", "--task", "ring"]) == 0
    loaded = load_config("ring.yaml", environ={}, cwd=folder)
    machine = Machine(64, 0, (), "its GPUs are simulated")
    target = Target("local", "simulated", node_sizes=(num_gpus,))
    batch = make_plan(loaded, Facts(machine, target)).batch
    assert batch.global_batch_size == 128
    assert batch.device_batch_size * batch.accumulation_steps * num_gpus == 128


LOGIN = Machine(2, 0, (), "there is no NVIDIA driver on this machine")
CPU = Partition("cpu", is_default=True, nodes=(NodeKind(9, 96),))
GPU = Partition("gpu", max_time_s=86400, nodes=(NodeKind(2, 64, gpus={"h100": 8}),))
WEST = Cluster("west", (CPU, GPU))


def planned(cluster: Cluster, tmp_path: Path) -> LaunchPlan:
    """Return the plan of the config. Raise ConfigError if the text does not fit the cluster."""
    file = tmp_path / "first-run.yaml"
    file.write_text(first_run_text(cluster))
    loaded = load_config(file, environ={}, cwd=tmp_path)
    assert loaded.config.data.source == "stdlib"
    return make_plan(loaded, Facts(LOGIN, Target("sbatch", "", cluster)))


def test_text():
    accounts = (Account("physics", is_default=True), Account("chem"))
    said(first_run_text(replace(WEST, accounts=accounts)))


@pytest.mark.parametrize(
    ("gpus", "said"),
    [(0, "one process per node without GPUs"), (1, "the GPU of a node"), (2, "all 2 GPUs of a node")],
)
def test_what_all_gpus_are(gpus, said):
    partition = replace(GPU, nodes=(NodeKind(2, 64, gpus={"": gpus}),))
    assert f"auto           # {said}\n" in first_run_text(replace(WEST, partitions=(partition,)))


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 6, 7, 8, 12, 16])
def test_it_fits_any_number_of_gpus(gpus, tmp_path):
    partition = replace(GPU, nodes=(NodeKind(2, 64, gpus={"": gpus}),))
    made = planned(replace(WEST, partitions=(partition,)), tmp_path)
    assert (made.device, made.workers_per_node) == ("cuda", gpus)
    assert made.batch.global_batch_size == {6: 36, 12: 36, 3: 36, 7: 28}.get(gpus, 32)


def test_the_plan_fits_the_cluster(tmp_path):
    made = planned(replace(WEST, partitions=(CPU,)), tmp_path)
    assert (made.device, made.world_size) == ("cpu", 1)
    made = planned(replace(WEST, partitions=(replace(GPU, max_time_s=600),)), tmp_path)
    assert made.slurm.sbatch["time"] == "00:10:00"
    made = planned(replace(WEST, accounts=(Account("chem"), Account("physics"))), tmp_path)
    assert made.slurm.sbatch["account"] == "chem"
    file = tmp_path / "first-run.yaml"
    file.write_text(first_run_text(None))
    loaded = load_config(file, environ={}, cwd=tmp_path)
    assert (loaded.config.name, loaded.config.resources.partition) == ("first-run", None)
    assert make_plan(loaded, Facts(LOGIN)).device == "cpu"


@pytest.mark.parametrize(
    ("partitions", "name"),
    [
        ((CPU, GPU), "gpu"),
        ((CPU, replace(GPU, name="other"), replace(GPU, is_default=True)), "gpu"),
        ((CPU, replace(GPU, is_up=False)), "cpu"),
        ((CPU, replace(GPU, is_hidden=True)), "cpu"),
        ((CPU, replace(GPU, max_time_s=60)), "cpu"),
        ((replace(GPU, is_up=False),), "gpu"),
        ((), None),
    ],
)
def test_partition(partitions, name):
    cluster = replace(
        WEST, partitions=partitions, accounts=(Account("physics", True),), slurm_version=(22, 5)
    )
    found = first_partition(cluster)
    assert (None if found is None else found.name) == name
