"""Tests losses and gradients that are not finite: skipped, reported, and fatal after too many in a row."""

import json
import re
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from tests.support.models import ALONE
from tests.support.runs import log_text, train
from tests.support.said import said
from trainkit.config.training import PrecisionConfig
from trainkit.errors import EXIT_NO_RESTART, EXIT_STOPPED, DivergedError
from trainkit.run.events import diverged_since, read_metrics
from trainkit.run.files import read_jsonl
from trainkit.run.manifest import BEST_LINK, published
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.trainer.causal_lm import StepBatch
from trainkit.trainer.checkpoint.state import TrainingState
from trainkit.trainer.loop import Trainer
from trainkit.trainer.precision import LossScale
from trainkit.trainer.progress import Progress
from trainkit.trainer.step_sync import StepReport

BATCH = StepBatch([], num_tokens=10, num_samples=4)
EXPLODES = ["optimizer.lr=1e30", "schedule.warmup_steps=0", "train.grad_clip=null", "train.steps=20"]
"""The first update makes the weights so large that no later loss is finite."""


def trainer(precision: PrecisionConfig, max_nonfinite_steps: int = 3) -> Trainer:
    """Return a trainer with only the attributes that counting steps needs."""
    fields = {
        "world": ALONE,
        "progress": Progress(),
        "state": TrainingState(),
        "metrics": SimpleNamespace(count=lambda report, num_samples: None),
        "saver": SimpleNamespace(finish=lambda: None),
        "loss_scale": LossScale(precision, ALONE.device),
        "config": SimpleNamespace(
            train=SimpleNamespace(max_nonfinite_steps=max_nonfinite_steps), precision=precision
        ),
    }
    found = object.__new__(Trainer)
    vars(found).update(fields)
    return found


def count(trainer: Trainer, marks: str) -> None:
    """Let steps pass. In `marks`, `.` is a good step, and `!` is a step that is not finite."""
    for mark in marks:
        report = StepReport(10, 2.0, 1.0, mark == ".", False, False, 0.0)
        trainer._update_state(BATCH, report)
        if trainer.state.nonfinite_in_a_row >= trainer.config.train.max_nonfinite_steps:
            trainer._refuse_divergence()


FP32 = PrecisionConfig(dtype="fp32")


@pytest.mark.parametrize("marks", ["!!!", ".!!!", "!!.!!.!!!", "!.!!!"])
def test_the_limit_counts_steps_in_a_row(marks):
    found = trainer(FP32)
    count(found, marks[:-1])
    with pytest.raises(DivergedError, match=f"step {len(marks)}") as caught:
        count(found, marks[-1])
    assert caught.value.exit_code == EXIT_NO_RESTART


def test_overflow_of_fp16_is_no_divergence_while_the_scale_can_fall():
    found = trainer(PrecisionConfig(dtype="fp16", init_loss_scale=4.0))
    count(found, "!" * 10)
    found.loss_scale.value.fill_(1.0)
    with pytest.raises(DivergedError):
        count(found, "!!!")


@pytest.mark.parametrize("marks", ["!.", ".!!", "!!.!"])
def test_one_step_that_was_applied_is_training(marks):
    found = trainer(FP32)
    count(found, marks)
    assert TrainingState.from_json(asdict(found.state)).has_updated_weights
    found._require_updated_weights()


def test_a_run_without_a_step_has_not_failed():
    trainer(FP32)._require_updated_weights()


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_run_that_has_only_skipped_steps_has_trained_nothing(dtype):
    found = trainer(PrecisionConfig(dtype=dtype), max_nonfinite_steps=9)
    count(found, "!!")
    with pytest.raises(DivergedError) as caught:
        found._require_updated_weights()
    assert caught.value.exit_code == EXIT_NO_RESTART
    said(f"{caught.value.message}\n{caught.value.hint}")


@pytest.mark.slow
def test_fp16_that_never_finds_its_scale_does_not_finish(tmp_path):
    options = ["precision.dtype=fp16", "precision.init_loss_scale=1e9", "train.max_nonfinite_steps=2"]
    options += ["checkpoint.every_steps=2", "train.steps=6"]
    attempt = train(tmp_path / "run", [*options, "train.stop_at_step=4"], expect=EXIT_STOPPED)
    [*_, newest] = published(attempt.run.checkpoints_dir)
    assert newest.manifest().progress["has_updated_weights"] is False
    attempt = train(tmp_path / "run", options, num_procs=2, expect=EXIT_NO_RESTART)
    for rank in range(2):
        error = json.loads(attempt.rank_error(rank).read_text())
        assert (error["type"], error["final"]) == ("DivergedError", True)
    said(f"{error['message']}\n{error['hint']}")
    assert published(attempt.run.checkpoints_dir)[-1].step == 4, "the untrained weights are not the result"
    assert "finished after step" not in log_text(attempt)
    # A few more steps are enough, because the scale halves with each of them.
    attempt = train(tmp_path / "run", [*options, "train.steps=24"])
    assert "finished after step 24" in log_text(attempt)
    assert published(attempt.run.checkpoints_dir)[-1].manifest().progress["has_updated_weights"] is True


def shard_hashes(attempt: AttemptDir) -> dict[int, list[str]]:
    return {
        checkpoint.step: [
            value["sha256"] for name, value in checkpoint.manifest().files.items() if name.endswith(".distcp")
        ]
        for checkpoint in published(attempt.run.checkpoints_dir)
    }


@pytest.mark.slow
def test_divergence_ends_all_ranks_and_skipped_steps_change_no_bit(tmp_path):
    options = [
        *EXPLODES,
        "checkpoint.every_steps=1",
        "checkpoint.keep_last=99",
        "train.max_nonfinite_steps=4",
        "train.log_every=100",
    ]
    attempt = train(tmp_path / "run", options, 2, expect=78)
    for rank in range(2):
        error = json.loads(attempt.rank_error(rank).read_text())
        assert (error["type"], error["rank"], error["step"]) == ("DivergedError", rank, 5)
        assert error["final"]
    said(f"{error['message']}\n{error['hint']}")
    said("\n".join(re.findall(r"step=\d+ skipped.*", attempt.rank_log(0).read_text())))
    records = read_metrics(attempt.run)
    assert [record["loss"] is None for record in records] == [False, True, True, True, True]
    assert [record["samples_seen"] for record in records] == [16, 32, 48, 64, 80]
    assert diverged_since(attempt.run, attempt.number) == 2
    hashes = shard_hashes(attempt)
    assert set(hashes) == {1, 2, 3, 4}
    assert hashes[2] == hashes[3] == hashes[4] == hashes[1]


@pytest.mark.slow
def test_a_validation_loss_that_is_not_finite_is_said_and_never_the_best(tmp_path):
    options = [*EXPLODES, "optimizer.lr=3e38", "train.eval_every=1"]
    options += ["train.eval_batches=1", "train.max_nonfinite_steps=2"]
    attempt = train(tmp_path / "run", options, expect=78)
    assert "step=1/20 val_loss=not-finite" in log_text(attempt)
    values = [e["val_loss"] for e in read_jsonl(attempt.run.events_file) if e["event"] == "evaluated"]
    assert values[0] is not None
    assert values[1:] == [None] * len(values[1:])
    assert len(values) > 1
    assert not (RunDir(tmp_path / "run").checkpoints_dir / BEST_LINK).is_symlink()
    assert all("val_loss" not in record for record in read_metrics(attempt.run))


@pytest.mark.slow
def test_a_loss_scale_that_is_much_too_high_comes_down(tmp_path):
    """More steps are skipped than would end the run in fp32.

    The run then trains as if they had not existed.
    """
    options = ["precision.dtype=fp16", "precision.init_loss_scale=268435456.0", "train.max_nonfinite_steps=2"]
    options += ["train.steps=22", "checkpoint.every_steps=1", "checkpoint.keep_last=99"]
    attempt = train(tmp_path / "run", options, 2)
    records = read_metrics(attempt.run)
    finite = [record["grad_norm"] is not None for record in records]
    assert all(record["loss"] is not None for record in records), "only the gradient overflows"
    num_skipped = finite.index(True)
    assert num_skipped > 5
    assert sum(finite[num_skipped:]) >= 0.7 * (22 - num_skipped), "once found, the scale is seldom too high"
    assert len(re.findall(r"step=\d+ skipped", log_text(attempt))) == finite.count(False)
    hashes = shard_hashes(attempt)
    assert all(hashes[step] == hashes[1] for step in range(1, num_skipped + 1))
    assert hashes[num_skipped + 1] != hashes[1]
    state = published(attempt.run.checkpoints_dir)[-1].manifest().progress
    assert state["loss_scale"]["value"] == 2**28 / 2 ** finite.count(False)
    assert state["nonfinite_in_a_row"] == 0
