"""Tests damage between two attempts and full disks during one: noticed, reported and survived."""

from pathlib import Path

import pytest

from tests.support.disks import fill, flip, small_disk
from tests.support.runs import (
    events,
    fork_workers,
    log_text,
    losses,
    make_attempt,
    samples_seen,
    train,
    wait_for,
)
from trainkit.job.rank_env import NONCE_VARIABLE, store_file
from trainkit.run.manifest import best_step, find_damage, published
from trainkit.run.rundir import RunDir

pytestmark = [pytest.mark.slow(seconds=3), pytest.mark.xdist_group("faults")]

OPTIONS = ["model.dropout=0.1", "train.steps=6", "checkpoint.every_steps=2"]


def checkpoints(run_dir: Path) -> Path:
    return RunDir(run_dir).checkpoints_dir


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "run"
    train(path, OPTIONS)
    return path


def test_ranks_share_the_reading_and_agree(tmp_path, whole):
    """Whichever rank finds the damage, all ranks go back. `test_loader.py` tests other damage."""
    run = tmp_path / "run"
    train(run, [*OPTIONS, "train.stop_at_step=5"], 2, expect=75)
    files = sorted((checkpoints(run) / "step-00000005").glob("*.distcp"))
    assert len(files) == 2
    flip(files[1])
    attempt = train(run, OPTIONS, 2)
    [event] = events(run, "checkpoint_rejected")
    assert (event["step"], event["set_aside"]) == (5, "step-00000005.rejected")
    assert "__1_0.distcp" in event["reason"]
    assert event["reason"] in log_text(attempt)
    assert events(run, "resumed")[-1]["step"] == 4
    assert losses(run) == pytest.approx(losses(whole), abs=1e-5)
    assert samples_seen(run) == samples_seen(whole)


class TestFullDisk:
    def test_a_disk_without_a_free_byte(self, whole, tmp_path):
        """The run, whose files are all on the disk, continues to its end."""
        options = [*OPTIONS, "checkpoint.every_steps=1", "logging.tensorboard=true"]
        options += ["train.eval_every=2", "train.eval_batches=1"]
        with small_disk(tmp_path / "disk", "64m") as disk:
            train(disk / "run", [*options, "train.stop_at_step=2"], 2, expect=75)
            attempt = make_attempt(disk / "run", options, 2)
            for rank in range(2):
                attempt.rank_log(rank).symlink_to(tmp_path / f"rank-{rank}.log")
            for path in (RunDir(disk / "run").events_file, RunDir(disk / "run").metrics_file):
                with path.open("a") as stream:  # to the end of its last page
                    stream.write(" " * (-path.stat().st_size % 4096 - 1) + "\n")
            filler = fill(disk)
            nonce = str(tmp_path)
            codes = wait_for(fork_workers(attempt, 2, {NONCE_VARIABLE: nonce}))
            if (store := store_file(nonce)) is not None:
                store.unlink(missing_ok=True)
            filler.unlink()
            words = log_text(attempt)
            for step in (3, 4, 5, 6):
                assert f"step={step}/6 loss=" in words, words
                assert f"checkpoint step={step} could not" in words
            assert "write metrics.jsonl" in words
            assert "after step 6 could" in words
            assert codes == [1, 1]
            assert [c.step for c in published(checkpoints(disk / "run"))] == [1, 2]
            assert all(find_damage(c) == "" for c in published(checkpoints(disk / "run")))
            train(disk / "run", options, 2)
            assert losses(disk / "run") == pytest.approx(losses(whole), abs=1e-5)

    def test_a_log_that_cannot_be_written(self, whole, tmp_path):
        attempt = make_attempt(tmp_path / "run", OPTIONS)
        attempt.rank_log(0).symlink_to("/dev/full")
        assert wait_for(fork_workers(attempt)) == [0]
        assert losses(tmp_path / "run") == losses(whole)


def test_the_best_link_names_the_state_that_was_best(tmp_path):
    """A validation that an attempt makes up for at its start belongs to the checkpoint that it resumed."""
    options = ["train.steps=8", "train.eval_batches=2", "checkpoint.keep_last=9"]
    train(tmp_path / "run", [*options, "train.stop_at_step=4"], expect=75)
    train(tmp_path / "run", [*options, "train.eval_every=4", "train.stop_at_step=6"], expect=75)
    assert best_step(checkpoints(tmp_path / "run")) == 4
    newest = published(checkpoints(tmp_path / "run"))[-1]
    assert newest.manifest().progress["best_step"] == 4
    assert [c.step for c in published(checkpoints(tmp_path / "run"))] == [4, 6]
