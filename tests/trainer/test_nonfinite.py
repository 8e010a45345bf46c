"""Losses and gradients that are not finite: skipped, said, and after too many in a row the end."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.models import ALONE
from tests.support.runs import log_text, train
from trainkit.config.training import PrecisionConfig
from trainkit.errors import EXIT_NO_RESTART, DivergedError
from trainkit.manifest import BEST_LINK, published
from trainkit.rundir import AttemptDir, RunDir, read_jsonl, read_metrics
from trainkit.trainer.batches import StepBatch
from trainkit.trainer.checkpoint.state import TrainingState
from trainkit.trainer.loop import Trainer
from trainkit.trainer.precision import LossScale
from trainkit.trainer.progress import Progress
from trainkit.trainer.step_sync import StepReport

BATCH = StepBatch([], num_tokens=10, num_samples=4)
EXPLODES = ["optimizer.lr=1e30", "schedule.warmup_steps=0", "train.grad_clip=null", "train.steps=20"]
"""The first update makes the weights so large that no later loss is finite."""


def trainer(precision: PrecisionConfig, max_nonfinite_steps: int = 3) -> Trainer:
    """As much of a trainer as counting steps needs."""
    fields: dict[str, Any] = dict.fromkeys(
        (name for name in Trainer.__dataclass_fields__ if not name.startswith("_")), None
    )
    fields |= {
        "world": ALONE,
        "progress": Progress(),
        "state": TrainingState(),
        "metrics": SimpleNamespace(count=lambda report: None),
        "saver": SimpleNamespace(finish=lambda: None),
        "loss_scale": LossScale(precision, ALONE.device),
        "config": SimpleNamespace(train=SimpleNamespace(max_nonfinite_steps=max_nonfinite_steps)),
    }
    return Trainer(**fields)


def count(trainer: Trainer, marks: str) -> None:
    """Let steps pass: a `.` for a good one, a `!` for one that was not finite."""
    for mark in marks:
        report = StepReport(10, 2.0, 1.0, mark == ".", False, False, 0.0)
        trainer._update_state(BATCH, report)


FP32 = PrecisionConfig(dtype="fp32")


@pytest.mark.parametrize("marks", ["!!!", ".!!!", "!!.!!.!!!", "!.!!!"])
def test_the_limit_counts_steps_in_a_row(marks: str) -> None:
    found = trainer(FP32)
    count(found, marks[:-1])
    with pytest.raises(DivergedError, match=f"3 consecutive steps, up to step {len(marks)}") as caught:
        count(found, marks[-1])
    assert caught.value.exit_code == EXIT_NO_RESTART
    assert "lower optimizer.lr" in caught.value.hint


def test_a_good_step_in_between_starts_the_count_anew() -> None:
    found = trainer(FP32)
    count(found, "!!." * 20)
    assert (found.state.step, found.state.nonfinite_in_a_row) == (60, 0)


def test_a_skipped_step_is_said_and_its_data_counts_as_read(caplog: pytest.LogCaptureFixture) -> None:
    found = trainer(FP32)
    with caplog.at_level(logging.WARNING):
        count(found, ".!.")
    assert caplog.messages == ["step=2 skipped: loss or gradient is not finite"]
    state = found.state
    assert (state.step, state.samples_seen, state.tokens_seen) == (3, 12, 30)


def test_the_count_goes_on_after_a_resume() -> None:
    found = trainer(FP32)
    found.state = TrainingState.from_dict(cast(dict[str, Any], TrainingState(nonfinite_in_a_row=2).to_dict()))
    with pytest.raises(DivergedError):
        count(found, "!")


def test_overflow_of_fp16_is_no_divergence_while_the_scale_can_fall() -> None:
    found = trainer(PrecisionConfig(dtype="fp16", init_loss_scale=4.0))
    count(found, "!" * 10)
    found.loss_scale.value.fill_(1.0)
    with pytest.raises(DivergedError):
        count(found, "!!!")


def shard_hashes(attempt: AttemptDir) -> dict[int, list[str]]:
    """The hashes of the tensors' files of each checkpoint, by step."""
    return {
        checkpoint.step: [
            value["sha256"]
            for name, value in checkpoint.manifest()["files"].items()
            if name.endswith(".distcp")
        ]
        for checkpoint in published(attempt.run.checkpoints_dir)
    }


@pytest.mark.slow
@pytest.mark.parametrize("num_procs", [1, 2])
def test_divergence_ends_all_ranks_and_skipped_steps_change_no_bit(tmp_path: Path, num_procs: int) -> None:
    options = [
        *EXPLODES,
        "checkpoint.every_steps=1",
        "checkpoint.keep_last=99",
        "train.max_nonfinite_steps=4",
    ]
    attempt = train(tmp_path / "run", options, num_procs, expect=78)
    for rank in range(num_procs):
        error = json.loads(attempt.rank_error(rank).read_text())
        assert (error["type"], error["rank"], error["step"]) == ("DivergedError", rank, 5)
        assert error["final"]
        assert "not finite in 4 consecutive steps, up to step 5" in error["message"]
        assert "lower optimizer.lr" in error["hint"]
    for step in (2, 3, 4, 5):
        assert f"step={step} skipped: loss or gradient is not finite" in attempt.rank_log(0).read_text()
    records = read_metrics(attempt.run)
    assert [record["loss"] is None for record in records] == [False, True, True, True]
    assert [record["samples_seen"] for record in records] == [16, 32, 48, 64]
    hashes = shard_hashes(attempt)
    assert set(hashes) == {1, 2, 3, 4}
    assert hashes[2] == hashes[3] == hashes[4] == hashes[1]


@pytest.mark.slow
def test_a_validation_loss_that_is_not_finite_is_said_and_never_the_best(tmp_path: Path) -> None:
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
@pytest.mark.parametrize("num_procs", [1, 2])
def test_a_loss_scale_that_is_much_too_high_comes_down(tmp_path: Path, num_procs: int) -> None:
    """More skipped steps in a row than would end the run in fp32, then training as if they had not been."""
    options = [
        "precision.dtype=fp16",
        "precision.init_loss_scale=268435456.0",
        "train.max_nonfinite_steps=2",
    ]
    options += ["train.steps=28", "checkpoint.every_steps=1", "checkpoint.keep_last=99"]
    attempt = train(tmp_path / "run", options, num_procs)
    finite = [record["grad_norm"] is not None for record in read_metrics(attempt.run)]
    num_skipped = finite.index(True)
    assert num_skipped > 5
    assert sum(finite[num_skipped:]) >= 0.7 * (28 - num_skipped), "once found, the scale is seldom too high"
    assert log_text(attempt).count("skipped: loss or gradient is not finite") == finite.count(False)
    hashes = shard_hashes(attempt)
    assert all(hashes[step] == hashes[1] for step in range(1, num_skipped + 1))
    assert hashes[num_skipped + 1] != hashes[1]
    state = published(attempt.run.checkpoints_dir)[-1].manifest()["progress"]
    assert state["loss_scale"]["value"] == 2**28 / 2 ** finite.count(False)
    assert state["nonfinite_in_a_row"] == 0
