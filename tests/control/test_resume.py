"""A resume that cannot work is refused before it leaves a trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.config import LoadedConfig, load_config
from trainkit.control.resume import changes, refuse_incompatible
from trainkit.data.checks import DataFacts
from trainkit.errors import ConfigError
from trainkit.run.files import write_json
from trainkit.run.manifest import MANIFEST_VERSION
from trainkit.run.rundir import RunDir


def load(folder: Path, *overrides: str) -> LoadedConfig:
    config = folder / "test.yaml"
    config.write_text("name: test\n")
    return load_config(config, overrides=overrides, environ={}, cwd=folder)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run whose newest checkpoint, of step 100, was trained with the defaults."""
    run = RunDir(tmp_path / "run")
    folder = run.checkpoint_dir(100)
    folder.mkdir(parents=True)
    config = load(tmp_path).config
    manifest = {
        "version": MANIFEST_VERSION,
        "step": 100,
        "files": {},
        "data": {"fingerprint": "x", "data.seq_len": 256, "data.shuffle": True, "seed": 0},
        "model": config.model.model_dump(mode="json"),
    }
    write_json(folder / "manifest.json", manifest)
    return run


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.steps=100"],
        ["train.steps=400", "optimizer.lr=0.1", "model.dropout=0.2"],
        ["model.dim=128"],  # what the preset says anyway
        ["resources.nodes=2", "train.device_batch_size=4"],
        ["model.architecture=llama"],
    ],
)
def test_what_may_change(run: RunDir, tmp_path: Path, overrides: list[str]) -> None:
    refuse_incompatible(run, load(tmp_path, *overrides), DataFacts())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=7", "seed: is 7, but step-00000100 was trained with 0"),
        ("data.seq_len=64", "data.seq_len: is 64, but step-00000100 was trained with 256"),
        (
            "model.architecture=mine.py:Mine",
            "model.architecture: is Mine, but step-00000100 was trained with llama",
        ),
        ("model.preset=nano", "model: differs in shape from the model of step-00000100"),
        (
            "optimizer.name=adamw_8bit",
            "optimizer.name: is adamw_8bit, but step-00000100 was trained with adamw",
        ),
        ("train.steps=99", "train.steps: is 99, but the run is already at step-00000100"),
    ],
)
def test_what_may_not(run: RunDir, tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_incompatible(run, load(tmp_path, override), DataFacts())
    assert [f"{problem.key}: {problem.message}" for problem in caught.value.problems] == [message]


def test_a_run_without_checkpoints_takes_anything(tmp_path: Path) -> None:
    refuse_incompatible(RunDir(tmp_path / "new"), load(tmp_path, "seed=7", "model.preset=nano"), DataFacts())


def test_a_damaged_manifest_is_left_to_the_trainer(run: RunDir, tmp_path: Path) -> None:
    (run.checkpoint_dir(100) / "manifest.json").write_text("{")
    refuse_incompatible(run, load(tmp_path, "seed=7"), DataFacts())


def test_changes_are_listed_key_by_key(tmp_path: Path) -> None:
    before, after = load(tmp_path).config, load(tmp_path, "optimizer.lr=0.1", "seed=7").config
    assert list(changes(before, after)) == ["optimizer.lr: 0.0003 -> 0.1", "seed: 0 -> 7"]
