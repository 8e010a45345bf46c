"""Tests `trainkit init` without Slurm. tests/on_slurm tests it on a cluster."""

import json
from pathlib import Path

import pytest

from tests.support.said import said
from trainkit.cli.main import main
from trainkit.cluster.machine import Machine
from trainkit.cluster.target import Target
from trainkit.config import load_config
from trainkit.plan.facts import Facts
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
