"""Tests that a resumed training run computes the same as an uninterrupted one."""

import random
import shutil
import time
from pathlib import Path

import pytest

from tests.support.runs import fork_workers, losses, make_attempt, samples_seen, train
from trainkit.run.manifest import find_damage, published
from trainkit.run.rundir import RunDir

pytestmark = [pytest.mark.slow(seconds=6), pytest.mark.xdist_group("resume")]

DROPOUT = "model.dropout=0.1"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a text of 50 samples, so that an epoch ends within a few steps of 16 samples."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    words = "".join(f"line {number} says {number * number}\n" for number in range(1000))
    path.write_text(words[: 64 * 50 + 1])
    return f"data.source={path}"


def assert_same_curve(expected: Path, found: Path) -> None:
    assert losses(found) == losses(expected)
    assert samples_seen(found) == samples_seen(expected)


def test_at_the_end_of_an_epoch(tmp_path, corpus):
    """An epoch has 49 samples and a step 16, so the fourth step crosses the end of the epoch."""
    options = [DROPOUT, corpus, "data.val_fraction=0", "train.steps=null", "train.epochs=2"]
    train(tmp_path / "whole", options)
    seen = samples_seen(tmp_path / "whole")
    assert seen[-1] % 2 == 0
    assert len(seen) == -(-seen[-1] // 16), "the last step takes what is left"
    for stop in (3, 4):
        train(tmp_path / "cut", [*options, f"train.stop_at_step={stop}"], expect=75)
    train(tmp_path / "cut", options)
    assert_same_curve(tmp_path / "whole", tmp_path / "cut")


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    train(tmp_path / "run", ["train.steps=2"])
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    train(tmp_path / "run", ["train.steps=2"])
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_validation_and_best_checkpoint_survive_a_cut(tmp_path):
    options = ["train.eval_every=2", "train.eval_batches=2", "checkpoint.keep_last=1", "train.steps=6"]
    train(tmp_path / "whole", options)
    train(tmp_path / "cut", [*options, "train.stop_at_step=3"], expect=75)
    train(tmp_path / "cut", options)
    manifests = [
        published(RunDir(tmp_path / name).checkpoints_dir)[-1].manifest() for name in ("whole", "cut")
    ]
    assert manifests[0].progress == manifests[1].progress
    assert manifests[0].progress["best_step"] == 6


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("stopped") / "run"
    train(run, ["train.steps=4", "train.stop_at_step=2"], expect=75)
    return run


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["data.seq_len=32"], "data.seq_len is"),
        (["seed=7"], "seed is"),
        (["data.shuffle=false"], "data.shuffle is"),
        (["model.dim=32"], "belongs to another model"),
        (["data.val_fraction=0"], "training data has changed: checkpoint step-00000002 cannot be resumed"),
    ],
)
def test_what_is_no_resume_of_a_run(stopped, corpus, tmp_path, changes, said):
    shutil.copytree(stopped, tmp_path / "run", symlinks=True)
    data = [corpus] if "data has changed" in said else []
    attempt = train(tmp_path / "run", ["train.steps=4", *data, *changes], expect=78)
    assert said in attempt.rank_log(0).read_text()
    assert [checkpoint.step for checkpoint in published(attempt.run.checkpoints_dir)] == [2]


@pytest.fixture
def mixture(tmp_path: Path) -> str:
    """Write two texts of 30 and 20 samples, which a run reads more than once."""
    for name, samples in (("a", 30), ("b", 20)):
        words = "".join(f"line {number} of {name}\n" for number in range(1000))
        (tmp_path / f"{name}.txt").write_text(words[: 64 * samples + 1])
    return f"data.source={{{tmp_path}/a.txt: 0.25, {tmp_path}/b.txt: 0.75}}"


def test_a_mixture(tmp_path, mixture):
    common = [mixture, DROPOUT, "data.val_fraction=0.2", "train.epochs=3", "train.eval_every=4"]
    whole = train(tmp_path / "whole", common)
    assert "25% " in whole.rank_log(0).read_text()
    train(tmp_path / "cut", [*common, "train.stop_at_step=3"], expect=75)
    train(tmp_path / "cut", common)
    assert_same_curve(tmp_path / "whole", tmp_path / "cut")


def test_killed_at_random_times_the_curve_stays_the_same(tmp_path):
    """Kills hit the start, steps and asynchronous saves. benchmarks/kill_campaign.py also kills agents."""
    options = [DROPOUT, "train.steps=60", "checkpoint.every_steps=5"]
    train(tmp_path / "whole", options, 2)
    chance = random.Random(54)
    for _ in range(3):
        workers = fork_workers(make_attempt(tmp_path / "cut", options, 2), 2)
        time.sleep(chance.uniform(0.5, 4.0))
        chance.choice(workers).kill()
        for worker in workers:  # a supervisor ends the others
            worker.kill()
            worker.wait()
    train(tmp_path / "cut", options, 2)
    assert_same_curve(tmp_path / "whole", tmp_path / "cut")
    assert [find_damage(found) for found in published(RunDir(tmp_path / "cut").checkpoints_dir)] == [""] * 3
