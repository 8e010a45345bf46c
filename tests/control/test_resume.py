"""Tests that a resume that cannot work is refused before it writes anything."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.golden.__main__ import HERE, unpack_run
from trainkit.config import LoadedConfig, RunConfig, load_config, read_effective
from trainkit.control.changed_config import (
    RunSoFar,
    changes,
    expected_time_s,
    learning_rate_change,
    refuse_incompatible,
    share_left,
)
from trainkit.data.checks import DataFacts
from trainkit.errors import ConfigError
from trainkit.plan.launch import Batch, LaunchPlan, Layout
from trainkit.run.files import append_jsonl, write_json
from trainkit.run.manifest import MANIFEST_VERSION, published
from trainkit.run.record import JobRecord
from trainkit.run.rundir import RunDir


def load(folder: Path, *overrides: str) -> LoadedConfig:
    config = folder / "test.yaml"
    config.write_text("name: test\n")
    return load_config(config, overrides=overrides, environ={}, cwd=folder)


PLAN = LaunchPlan("local", 1, 2, "cpu", Layout(dp_shard=2), Batch(1, 1, 2, 2), 1e-3, 1, 20.0, {})


def so_far(run: RunDir, config: RunConfig | None = None, plan: LaunchPlan = PLAN) -> RunSoFar:
    config = config or load(run.path.parent).config
    return RunSoFar(run, JobRecord(), config, plan, None, published(run.checkpoints_dir))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Return a run whose newest checkpoint, after step 100, was trained with the defaults."""
    run = RunDir(tmp_path / "run")
    run.checkpoint_dir(100).mkdir(parents=True)
    data = {"fingerprint": "x", "data.seq_len": 256, "data.shuffle": True, "seed": 0}
    model = load(tmp_path).config.model.model_dump(mode="json")
    manifest = {"version": MANIFEST_VERSION, "step": 100, "files": {}, "data": data, "model": model}
    write_json(run.checkpoint_dir(100) / "manifest.json", manifest)
    return run


@pytest.mark.parametrize(
    "overrides",
    [
        *([], ["train.steps=100"], ["train.steps=400", "optimizer.lr=0.1", "model.dropout=0.2"]),
        ["model.dim=128"],  # the preset has the same value
        *(["resources.nodes=2", "train.device_batch_size=4"], ["model.architecture=llama"]),
    ],
)
def test_what_may_change(run, tmp_path, overrides):
    refuse_incompatible(so_far(run), load(tmp_path, *overrides), DataFacts())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=7", "is 7, but step-00000100 was trained with 0"),
        ("data.seq_len=64", "is 64, but step-00000100 was trained with 256"),
        ("model.architecture=mine.py:Mine", "is mine.py:Mine, but step-00000100 was trained with llama"),
        ("optimizer.name=adamw_8bit", "is adamw_8bit, but step-00000100 was trained with adamw"),
        ("train.steps=99", "is 99, but the run is already at step-00000100"),
        ("model.preset=nano", "has different dimensions from the model of step-00000100"),
    ],
)
def test_what_may_not(run, tmp_path, override, message):
    with pytest.raises(ConfigError) as caught:
        refuse_incompatible(so_far(run), load(tmp_path, override), DataFacts())
    key = override.partition("=")[0].replace(".preset", "")
    assert [(problem.key, problem.message) for problem in caught.value.problems] == [(key, message)]
    (run.checkpoint_dir(100) / "manifest.json").write_text("{")  # the trainer refuses a damaged manifest
    if not override.startswith("train"):
        refuse_incompatible(so_far(run), load(tmp_path, override), DataFacts())
    none = so_far(RunDir(tmp_path / "new"))
    refuse_incompatible(none, load(tmp_path, override), DataFacts())


@pytest.mark.parametrize(("steps", "share"), [(400, 0.75), (100, 0.0), (50, 0.0), (None, 1.0)])
def test_the_share_of_the_steps_that_is_left(run, steps, share):
    assert share_left(so_far(run), steps) == share
    assert share_left(so_far(RunDir(run.path / "none")), steps) == 1.0


def test_changes_are_listed_key_by_key(tmp_path):
    before, after = load(tmp_path).config, load(tmp_path, "optimizer.lr=0.1", "seed=7").config
    assert list(changes(before, after)) == ["optimizer.lr: 0.0003 -> 0.1", "seed: 0 -> 7"]


@pytest.mark.parametrize(
    ("overrides", "lr", "said"),
    [
        # Each case sets values of the run. Only some of them change the learning rate after step 6.
        (["train.steps=12"], 0.002, "0.0002 at step 6, 0.0011 at step 7: cosine over 12 steps"),
        (["train.steps=12", "schedule.name=constant"], 0.001, "0.0002 at step 6, 0.001 at step 7: constant"),
        (["train.steps=12", "schedule.warmup_steps=2", "schedule.min_lr_ratio=0.1"], 0.002, "0.0002 at step"),
        (["train.log_every=3"], 0.002, None),
        # the length is known only after the data was read
        (["train.steps=null", "train.epochs=2"], 0.002, None),
    ],
)
def test_what_the_learning_rate_does_where_a_run_resumes(tmp_path, overrides, lr, said):
    old = RunDir(unpack_run(HERE / "folders" / "finished", tmp_path, os.uname().nodename))
    before = read_effective(old.config_file)
    after = load_config(old.config_file, overrides=overrides, environ={}, layers=False).config
    found = learning_rate_change(so_far(old, before, LaunchPlan.read(old.plan_file)), after, lr)
    assert found == said or (found is not None and said is not None and found.startswith(said))


@pytest.mark.parametrize(
    ("steps", "layout", "expected_s"),
    [(140, Layout(dp_shard=2), 80.0), (60, Layout(dp_shard=2), 0.0), (140, Layout(dp_shard=4), None)],
)
def test_the_time_of_the_rest_is_what_was_measured(run, steps, layout, expected_s):
    assert expected_time_s(so_far(run), PLAN, steps) is None  # no step was measured
    step = published(run.checkpoints_dir)[-1].step
    for number, step_s in enumerate((9.0, 2.0, 2.0), step - 2):
        append_jsonl(run.metrics_file, {"step": number, "attempt": 1, "step_s": step_s})
    found = expected_time_s(so_far(run), replace(PLAN, layout=layout), steps)
    assert found == (expected_s and expected_s - 2.0 * (step - 100))
