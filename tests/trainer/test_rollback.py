"""Tests that a run that goes back to a checkpoint, and leaves out samples, computes the same in every way."""

import shutil
from pathlib import Path

import pytest

from tests.support import tasks
from tests.support.runs import (
    events,
    fork_workers,
    log_text,
    losses,
    make_attempt,
    samples_seen,
    train,
    wait_until,
)
from trainkit.run.manifest import point_best_at, published
from trainkit.run.rollbacks import Rollback, SavedPosition, write_rollbacks
from trainkit.run.rundir import RunDir

pytestmark = [pytest.mark.slow(seconds=6), pytest.mark.xdist_group("rollback")]

OPTIONS = ["model.dropout=0.1", "train.steps=8", "checkpoint.every_steps=2", "checkpoint.keep_last=null"]
TASK = [f"task={Path(tasks.__file__)}:Classify", "optimizer.lr=0.01", "data.num_workers=1"]
BACK = Rollback(2, 4, 1, ((32, 64), (70, 75)))
"""Leaves out the samples of the steps 3 and 4, and some samples of a later step."""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that stopped after step 4."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    train(run, [*OPTIONS, "train.stop_at_step=4"], expect=75)
    return run


def rolled_back(run: Path, to: Path, *rollbacks: Rollback) -> Path:
    shutil.copytree(run, to, symlinks=True)
    write_rollbacks(RunDir(to), rollbacks)
    return to


def test_a_run_goes_back(stopped, tmp_path):
    whole = rolled_back(stopped, tmp_path / "whole", BACK)
    point_best_at(published(RunDir(whole).checkpoints_dir)[-1])
    attempt = train(whole, OPTIONS)
    assert "the run leaves out 37 samples (32-63, 70-74)" in log_text(attempt)
    assert events(whole, "training")[-1]["skipped"] == [[32, 64], [70, 75]]
    assert samples_seen(whole) == list(range(16, 129, 16)), "the samples that are left out do not count"
    assert losses(whole)[3] != losses(stopped)[3]
    names = sorted(path.name for path in RunDir(whole).checkpoints_dir.iterdir())
    assert names == sorted([*(f"step-0000000{step}" for step in (2, 4, 6, 8)), "step-00000004.rolled-back"])
    newest = published(RunDir(whole).checkpoints_dir)[-1]
    assert SavedPosition.of(newest) == SavedPosition(128, ((32, 64), (70, 75)), 1)

    # An interruption right after the record of the rollback, before or after the first new checkpoint, or in
    # the middle of the renames changes nothing.
    cut = rolled_back(stopped, tmp_path / "cut", BACK)
    for stop in (3, 5):
        train(cut, [*OPTIONS, f"train.stop_at_step={stop}"], expect=75)
    train(cut, OPTIONS)
    assert losses(cut) == losses(whole)
    assert samples_seen(cut) == samples_seen(whole)

    two = rolled_back(stopped, tmp_path / "two", BACK)
    train(two, OPTIONS, 2)
    assert losses(two) == pytest.approx(losses(whole), abs=1e-5)


def test_killed_at_the_first_steps_after_it_went_back(stopped, tmp_path):
    whole, cut = (rolled_back(stopped, tmp_path / name, BACK) for name in ("whole", "cut"))
    train(whole, OPTIONS, 2)
    for name in ("step-00000004.rolled-back", "step-00000006"):
        workers = fork_workers(make_attempt(cut, OPTIONS, 2), 2)
        wait_until((RunDir(cut).checkpoints_dir / name).exists)
        for worker in workers:
            worker.kill()
            worker.wait()
    train(cut, OPTIONS, 2)
    assert losses(cut) == losses(whole)


def test_a_damaged_checkpoint_leads_further_back(stopped, tmp_path):
    """The samples that are left out stay the same, and the steps before them are computed again."""
    run = rolled_back(stopped, tmp_path / "run", Rollback(4, 4, 1, ((64, 96),)))
    whole = rolled_back(stopped, tmp_path / "whole", Rollback(4, 4, 1, ((64, 96),)))
    train(whole, OPTIONS)
    (RunDir(run).checkpoint_dir(4) / "manifest.json").write_text("")
    train(run, OPTIONS)
    assert events(run, "resumed")[-1]["step"] == 2
    assert losses(run) == losses(whole)


def test_back_to_the_initial_weights(stopped, tmp_path):
    run = rolled_back(stopped, tmp_path / "run", Rollback(0, 4, 1))
    train(run, OPTIONS)
    whole = tmp_path / "whole"
    train(whole, OPTIONS)
    assert losses(run) == losses(whole)


def test_an_epoch_ends_early_without_the_samples(tmp_path):
    """The dataset of the task has 40 samples, of which the run leaves out 10 in each of the two epochs."""
    run = tmp_path / "run"
    options = [*TASK, "task_args.samples=40", "train.steps=null", "train.epochs=2", "data.val_fraction=0"]
    train(run, [*options, "train.stop_at_step=1"], expect=75)
    write_rollbacks(RunDir(run), [Rollback(1, 1, 1, ((20, 30), (60, 70)))])
    train(run, options)
    assert samples_seen(run) == [16, 32, 48, 60]
