"""A run starts with the weights of another one, all or some of them, on any layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support import tasks
from tests.support.models import ALONE
from tests.support.parity import Case, run_cases
from tests.support.runs import log_text, train
from trainkit.cluster.target import LOCAL
from trainkit.config import LoadedConfig, load_config
from trainkit.config.training import ModelConfig
from trainkit.errors import ConfigError
from trainkit.plan.make_plan import make_plan
from trainkit.run.files import read_jsonl
from trainkit.run.manifest import published
from trainkit.run.rundir import RunDir
from trainkit.submit.plan_run import gather
from trainkit.trainer.checkpoint.loader import InitError, load_initial_weights

FILE = Path(tasks.__file__)
PHASE_1 = ["train.steps=4", "train.eval_every=4", "checkpoint.every_steps=4", "optimizer.lr=0.01"]
PHASE_2 = ["train.steps=2", "train.eval_every=2", "train.eval_at_start=true"]
LAYOUTS = [
    Case("alone", 1, {}),
    Case("fsdp", 2, {"dp_shard": 2}),
    Case("tp", 2, {"tp": 2}),
    Case("pp", 2, {"pp": 2}),
]


def val_losses(folder: Path) -> list[float]:
    return [
        event["val_loss"] for event in read_jsonl(RunDir(folder).events_file) if event["event"] == "evaluated"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["causal_lm", f"{FILE}:Classify"])
def test_phase_2_begins_where_phase_1_ended(tmp_path: Path, task: str) -> None:
    own = [f"task={task}"]
    run_cases(tmp_path, [Case("phase-1", 2, {"dp_shard": 2})], [*PHASE_1, *own])
    layouts = LAYOUTS if task == "causal_lm" else LAYOUTS[:2]
    run_cases(tmp_path, layouts, [*PHASE_2, *own, f"model.init_from={tmp_path / 'phase-1'}"])
    last = val_losses(tmp_path / "phase-1")[-1]
    for case in layouts:
        assert val_losses(tmp_path / case.name)[0] == pytest.approx(last, rel=1e-5), case.name
    run_cases(tmp_path, [Case("new", 1, {})], [*PHASE_2, *own])
    assert abs(val_losses(tmp_path / "new")[0] - last) > 1e-3


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run with a checkpoint after two steps."""
    train(tmp_path / "first", ["train.steps=2", "checkpoint.every_steps=1"])
    return tmp_path / "first"


def test_what_fits_and_what_does_not(saved: Path) -> None:
    newest = published(RunDir(saved).checkpoints_dir)[-1]
    norm = {"model.norm.weight": torch.zeros(64)}
    for source in (saved, newest.path):
        for include in (("norm.*",), ("n?rm.weight", "nothing.*")):
            config = ModelConfig(init_from=str(source), init_include=include)
            norm["model.norm.weight"].zero_()
            load_initial_weights({**norm, "optimizer.norm.weight.exp_avg": torch.zeros(64)}, config, ALONE)
            assert norm["model.norm.weight"].mean() == pytest.approx(1.0, abs=0.1)
    refused = {
        "only in the checkpoint: model.blocks.0": (norm, ()),
        "not in the checkpoint: model.norm.bias": ({**norm, "model.norm.bias": torch.zeros(64)}, ("norm.*",)),
        "different shape: model.norm.weight": ({"model.norm.weight": torch.zeros(3)}, ("norm.*",)),
        "no parameter matches": (norm, ("head.*",)),
    }
    for message, (tensors, include) in refused.items():
        with pytest.raises(InitError, match=message) as error:
            load_initial_weights(tensors, ModelConfig(init_from=str(saved), init_include=include), ALONE)
        assert error.value.exit_code == 78


def loaded_with(*overrides: str) -> LoadedConfig:
    return load_config("quickstart", overrides=overrides, environ={})


def test_a_damaged_or_missing_checkpoint_is_refused(saved: Path, tmp_path: Path) -> None:
    newest = published(RunDir(saved).checkpoints_dir)[-1].path
    file = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(InitError, match="is damaged: "):
        load_initial_weights({}, ModelConfig(init_from=str(newest)), ALONE)
    with pytest.raises(InitError, match="has no intact checkpoint"):
        load_initial_weights({}, ModelConfig(init_from=str(tmp_path)), ALONE)
    absent = loaded_with(f"model.init_from={tmp_path / 'nowhere'}")
    with pytest.raises(ConfigError, match="neither a run folder nor a checkpoint"):
        make_plan(absent, gather(absent, target=LOCAL))
    with pytest.raises(ConfigError, match=r"model.init_include: is set, but model.init_from is null"):
        loaded_with("model.init_include=['norm.*']")


def test_a_resume_does_not_start_again(saved: Path, tmp_path: Path) -> None:
    """The run has its own checkpoints then."""
    source = tmp_path / "moved"
    saved.rename(source)
    options = ["train.steps=4", "checkpoint.every_steps=1", f"model.init_from={source}"]
    attempt = train(tmp_path / "second", [*options, "train.stop_at_step=2"], expect=75)
    assert "started from" in log_text(attempt)
    again = train(tmp_path / "second", options)
    assert "resumed from step-00000002" in log_text(again)
    assert "started from" not in log_text(again)
