"""Tests that a run whose batch size grows computes the same on every layout and after every interruption."""

from pathlib import Path

import pytest

from tests.support import tasks
from tests.support.runs import events, log_text, losses, samples_seen, train
from trainkit.run.events import read_metrics
from trainkit.run.rollbacks import Rollback, write_rollbacks
from trainkit.run.rundir import RunDir

pytestmark = [pytest.mark.slow(seconds=6), pytest.mark.xdist_group("batch-warmup")]

OPTIONS = [
    "model.dropout=0.1",
    "train.steps=8",
    "train.device_batch_size=2",
    "train.batch_warmup=[{steps: 3, global_batch_size: 4}, {steps: 2, global_batch_size: 8}]",
    "checkpoint.keep_last=null",
]
SEEN = [4, 8, 12, 20, 28, 44, 60, 76]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    attempt = train(run, OPTIONS, 2)
    assert "after a warm-up" in log_text(attempt)
    return run


def test_samples_and_tokens_are_counted(whole):
    assert samples_seen(whole) == SEEN
    records = read_metrics(RunDir(whole))
    assert [record["tokens"] for record in records] == [64 * seen for seen in SEEN]
    for before, record in zip([0, *SEEN], records, strict=False):
        tokens = 64 * (record["samples_seen"] - before)
        assert record["tokens_per_s"] == pytest.approx(tokens / record["step_s"], rel=0.01)


def test_an_interrupted_run_has_the_same_losses(whole, tmp_path):
    run = tmp_path / "run"
    for stop in (2, 3, 4, 6):
        train(run, [*OPTIONS, f"train.stop_at_step={stop}"], 2, expect=75)
    train(run, OPTIONS, 2)
    assert losses(run) == losses(whole)
    assert samples_seen(run) == SEEN


@pytest.mark.parametrize("options", [[], ["parallel.dp_replicate=2", "parallel.dp_shard=1"]])
def test_other_layouts_have_the_same_losses(whole, tmp_path, options):
    run = tmp_path / "run"
    train(run, [*OPTIONS, *options], 2 if options else 1)
    assert losses(run) == pytest.approx(losses(whole), abs=1e-5)
    assert samples_seen(run) == SEEN


def test_epochs_end_with_the_last_sample(tmp_path):
    """The dataset has 30 samples, so two epochs have 60; a rollback leaves out 7 of them."""
    run = tmp_path / "run"
    task = [f"task={Path(tasks.__file__)}:Classify", "data.num_workers=1", "task_args.samples=30"]
    options = [*OPTIONS, *task, "train.steps=null", "train.epochs=2"]
    train(run, options)
    assert samples_seen(run) == [4, 8, 12, 20, 28, 44, 60]
    assert events(run, "training")[0]["total_steps"] == 7
    cut = tmp_path / "cut"
    train(cut, [*options, "train.stop_at_step=4"], expect=75)
    write_rollbacks(RunDir(cut), [Rollback(4, 4, 1, ((21, 28),))])
    train(cut, options)
    assert samples_seen(cut) == [4, 8, 12, 20, 28, 44, 53]
