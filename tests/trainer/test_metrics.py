"""Tests the records of a run, of its ranks and for TensorBoard."""

import json
import logging
import math
import re
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from tests.support.disks import fill, small_disk
from tests.support.models import ALONE
from tests.support.said import said
from trainkit.capability import Recorder
from trainkit.run.files import read_jsonl
from trainkit.run.rundir import RunDir
from trainkit.trainer import metrics
from trainkit.trainer.checkpoint.state import TrainingState
from trainkit.trainer.metrics import (
    SCALARS,
    LocalGradient,
    Metrics,
    RankRecords,
    TensorBoardLog,
    logs_written,
    write_pending,
)
from trainkit.trainer.step_sync import StepReport

PROMISED = {
    *("step", "time", "attempt", "loss", "grad_norm", "lr", "tokens", "tokens_per_s"),
    *("tokens_per_s_per_gpu", "mfu", "step_s", "data_wait_s", "mem_gib_peak", "samples_seen"),
}
LINE = "step loss grad_norm lr tokens_per_s mfu mem_gib data_wait_s step_s eta"
LINE_VALIDATED = "step loss val_loss grad_norm lr tokens_per_s mfu mem_gib data_wait_s step_s eta"


def report(**changes: Any) -> StepReport:
    values: dict[str, Any] = {"num_tokens": 1000, "loss": 2.5, "grad_norm": 0.5, "data_wait_s": 0.25}
    return StepReport(**{**values, "finite": True, "stop": False, "save": False, **changes})


def metrics_of(folder: Path) -> Metrics:
    return Metrics(
        RunDir(folder).attempt(3), ALONE, "fp32", total_steps=100, tensorboard=None, flops_per_sample=1e6
    )


def write(metrics: Metrics, step: int = 7, val_loss: float | None = None, **changes: Any) -> None:
    state = TrainingState(step=step, samples_seen=16 * step, tokens_seen=1000 * step)
    metrics.count(report(**changes), 16)
    metrics.write(state, report(**changes), 3e-4, None if val_loss is None else report(loss=val_loss))


def records(folder: Path) -> list[dict[str, Any]]:
    return list(read_jsonl(RunDir(folder).metrics_file))


def test_a_record_has_every_promised_key(tmp_path):
    write(metrics_of(tmp_path))
    (record,) = records(tmp_path)
    assert set(record) == PROMISED
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", record["time"])
    expected = {"step": 7, "attempt": 3, "loss": 2.5, "grad_norm": 0.5, "lr": 3e-4, "mfu": None}
    expected |= {"tokens": 7000, "samples_seen": 112, "data_wait_s": 0.25}
    assert expected.items() <= record.items()
    assert record["tokens_per_s"] == record["tokens_per_s_per_gpu"] > 0
    assert 0 < record["mem_gib_peak"] < 100


def test_how_values_are_written(tmp_path, caplog):
    """A loss is written to its last bit, other values as null, and only rank 0 writes."""
    caplog.set_level(logging.INFO)
    metrics = metrics_of(tmp_path)
    write(metrics, loss=1 / 3, val_loss=3.25)
    write(metrics, step=8, loss=float("nan"), grad_norm=float("inf"), finite=False)
    first, second = RunDir(tmp_path).metrics_file.read_text().splitlines()
    assert f'"loss": {1 / 3!r},' in first
    assert "NaN" not in second
    assert [json.loads(line).get("val_loss") for line in (first, second)] == [3.25, None]
    assert (json.loads(second)["loss"], json.loads(second)["grad_norm"]) == (None, None)
    assert "loss=not-finite grad_norm=not-finite" in caplog.messages[1]
    metrics.world = type(ALONE)(1, 2, ALONE.device, None, None)
    write(metrics, step=9)
    assert len(records(tmp_path)) == 2


def test_speed_is_of_the_interval_without_its_pauses(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr("trainkit.trainer.metrics.time.monotonic", lambda: now)
    metrics = metrics_of(tmp_path)
    metrics.start()
    for _ in range(3):
        metrics.count(report(), 16)
    now = 110.0
    metrics.exclude(4.0)
    write(metrics)
    now = 112.0
    write(metrics, step=8)
    first, second = records(tmp_path)
    assert (first["tokens_per_s"], first["step_s"]) == (round(4000 / 6, 2), 1.5)
    assert (second["tokens_per_s"], second["step_s"]) == (500, 2.0)


@pytest.mark.parametrize(("val_loss", "keys"), [(None, LINE), (3.25, LINE_VALIDATED)])
def test_the_line_is_greppable(tmp_path, caplog, val_loss, keys):
    with caplog.at_level(logging.INFO):
        write(metrics_of(tmp_path), val_loss=val_loss)
    pairs = dict(word.split("=", 1) for word in caplog.messages[0].split())
    assert " ".join(pairs) == keys
    shown = {"step": "7/100", "loss": "2.5000", "grad_norm": "0.500", "lr": "0.0003", "mfu": "n/a"}
    assert shown.items() <= pairs.items()
    assert re.fullmatch(r"\d+:\d\d:\d\d", pairs["eta"])


@pytest.mark.parametrize("ends", [False, True])
def test_a_full_disk_keeps_the_records_and_writes_them_later(tmp_path, caplog, ends):
    """The records are written with the next one, or after the last save of a training run."""
    with small_disk(tmp_path / "disk", "64k") as disk:
        metrics = metrics_of(disk)
        write(metrics, step=1)
        filler = fill(disk)
        step = 1
        while "2 records kept in memory" not in caplog.text:
            step += 1
            assert step < 200, "the rest of the last page is full by now"
            write(metrics, step=step)
        assert "metrics.jsonl" in caplog.text
        filler.unlink()
        if ends:
            metrics.flush()
        else:
            step += 1
            write(metrics, step=step)
        assert [record["step"] for record in records(disk)] == list(range(1, step + 1)), "in order, each once"


def test_the_metrics_of_a_users_task(tmp_path):
    """Values that are not finite are omitted, because JSON has none."""
    metrics = metrics_of(tmp_path)
    metrics.count(report(), 16)
    state = TrainingState(step=7)
    found = report(metrics={"accuracy": 0.5, "worst": float("inf")})
    metrics.write(state, found, 3e-4, report(metrics={"accuracy": 0.25}))
    (record,) = records(tmp_path)
    assert set(record) - PROMISED == {"accuracy", "val_loss", "val_accuracy"}
    assert (record["accuracy"], record["val_accuracy"]) == (0.5, 0.25)


def scalars(step: int, **changes: float | None) -> dict[str, float | None]:
    return {**dict.fromkeys(SCALARS, 1.0 + step), "mfu": None, **changes}


def tensorboard(folder: Path) -> EventAccumulator:
    reader = EventAccumulator(str(folder / "tensorboard"))
    reader.Reload()
    return reader


def curve(folder: Path, name: str = "loss") -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in tensorboard(folder).Scalars(name)]


def write_steps(run: Path, steps: range, first: int) -> None:
    """Write a loss of ten times `first` plus the step for each step of an attempt."""
    log = TensorBoardLog(RunDir(run), first)
    for step in steps:
        log.write(step, scalars(step, loss=10.0 * first + step))
    log.close()


def test_scalars_can_be_read_back(tmp_path):
    log = TensorBoardLog(RunDir(tmp_path), 1)
    for step in (1, 2, 3):
        log.write(step, scalars(step, loss=0.5 * step, val_loss=2.0 if step == 2 else None))
    log.close()
    assert curve(tmp_path) == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert curve(tmp_path, "val_loss") == [(2, 2.0)]
    assert set(tensorboard(tmp_path).Tags()["scalars"]) == set(SCALARS) - {"mfu"}


@pytest.fixture(autouse=True)
def ordered_event_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restart the counter that orders event files of one process and second: as text, 10 sorts before 9."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


def test_a_resume_hides_the_steps_that_are_done_again(tmp_path):
    write_steps(tmp_path, range(1, 6), 1)
    write_steps(tmp_path, range(4, 7), 4)
    assert curve(tmp_path) == [(1, 11.0), (2, 12.0), (3, 13.0), (4, 44.0), (5, 45.0), (6, 46.0)]


@pytest.mark.parametrize("first_step", [4, None])
def test_what_is_added_before_the_first_step_is_known_hides_nothing(tmp_path, first_step):
    write_steps(tmp_path, range(1, 6), 1)
    second = TensorBoardLog(RunDir(tmp_path), None)
    second.text("config", "lr 0.1", 0)
    if first_step is not None:
        second.begin(first_step)
    second.close()
    assert [step for step, _ in curve(tmp_path)] == ([1, 2, 3] if first_step else [1, 2, 3, 4, 5])
    assert [event.step for event in tensorboard(tmp_path).Tensors("config/text_summary")] == [0]


@pytest.mark.parametrize("first_step", [1, None])
def test_a_checkpoint_waits_for_the_scalars_and_media_logged_before_it(tmp_path, first_step):
    """A kill after the checkpoint loses none of them: a resume does not compute their steps again."""
    log = TensorBoardLog(RunDir(tmp_path), first_step)

    class Media(Recorder):
        def written(self) -> Callable[[], None]:
            return lambda: log.text("out", "x", 3)

    if first_step is None:
        log.text("config", "lr 0.1", 0)
        log.begin(1)
    for step in (1, 2, 3):
        log.write(step, scalars(step, loss=0.5 * step))
    logs_written(Media(), log)()
    assert curve(tmp_path) == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert [event.step for event in tensorboard(tmp_path).Tensors("out/text_summary")] == [3]
    log.close()


def test_without_tensorboard_one_line_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with caplog.at_level("INFO"):
        log = TensorBoardLog(RunDir(tmp_path), 1)
        for step in (1, 2, 3):
            log.write(step, scalars(step))
        log.close()
    [line] = caplog.records
    assert line.levelname == "INFO"
    said(line.getMessage())
    assert not (tmp_path / "tensorboard").exists()


def test_a_folder_is_made_for_values_only_and_not_again_after_a_move(tmp_path):
    """New files would be separate from the others until the run notices the move."""
    TensorBoardLog(RunDir(tmp_path), 1).close()
    write_steps(tmp_path / "moved away", range(1, 2), 1)
    pending = deque[dict[str, object]]([{"step": 1}])
    write_pending(tmp_path / "gone" / "metrics.jsonl", pending)
    assert len(pending) == 1
    assert list(tmp_path.iterdir()) == []


CPU = torch.device("cpu")


def checksum(*grads: torch.Tensor) -> float:
    gradient = LocalGradient()
    gradient.is_due = True
    gradient.add(grads)
    return float(gradient.take(CPU))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_flipped_bit_changes_the_checksum(dtype):
    grad = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = checksum(grad)
    assert before == checksum(grad[:300], grad[300:]), "however it is divided"
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[grad.element_size()]
    for bit in range(min(48, 8 * grad.element_size() - 1)):
        flipped = grad.clone()
        flipped.view(words)[7] ^= 1 << bit
        assert checksum(flipped) != before


def test_a_step_that_is_not_due_has_no_values(tmp_path):
    gradient = LocalGradient()
    records = RankRecords(RunDir(tmp_path).attempt(1), 0, "n0", gradient)
    records.begin_step(is_due=False)
    records.keep_loss(torch.ones(1))
    gradient.add([torch.ones(3)])
    records.keep_gradient(torch.ones(()), CPU)
    assert records.values == []
    records.begin_step(is_due=True)
    records.keep_loss(torch.ones(1))
    records.keep_gradient(torch.ones(()), CPU)
    loss, local, square_sum = (float(value) for value in records.values)
    assert (loss, square_sum) == (1.0, 1.0)
    assert math.isnan(local), "nothing was reduced"


def test_a_spike_is_written_at_once(attempt):
    records = RankRecords(attempt, 3, "n0", LocalGradient())
    file = attempt.rank_record(3)
    records.add(1, 1.0, (2.0, math.nan, 3.0))
    records.add(2, 1.5, (2.0, math.nan, 3.0))
    assert not file.exists()
    records.add(3, 30.0, (2.0, 4.0, 900.0))
    found = list(read_jsonl(file))
    assert [record["step"] for record in found] == [1, 2, 3]
    fields = {"host": "n0", "loss_sum": 2.0, "local_gradient": "nan", "square_sum": 3.0}
    assert found[0] == {"step": 1, **fields}
    records.add(4, math.nan, (math.nan, 4.0, math.inf))
    assert list(read_jsonl(file))[-1]["square_sum"] == "inf"


def test_each_turn_is_compared_with_its_own_norms(attempt):
    records = RankRecords(attempt, 0, "n0", LocalGradient())
    for step in (1, 2):
        records.add(step, 1.0, (2.0, 4.0, 3.0), 1, "d")
        records.add(step, 50.0, (2.0, 4.0, 3.0), 2, "g")
    assert not attempt.rank_record(0).exists(), "no turn has a spike"
    records.add(3, 10.0, (2.0, 4.0, 3.0), 1, "d")
    found = [(item["step"], item["turn"], item["optimizer"]) for item in read_jsonl(attempt.rank_record(0))]
    assert found == [(1, 1, "d"), (1, 2, "g"), (2, 1, "d"), (2, 2, "g"), (3, 1, "d")]


def test_the_file_keeps_its_newer_half(attempt, monkeypatch):
    monkeypatch.setattr(metrics, "MAX_BYTES", 2000)
    records = RankRecords(attempt, 0, "n0", LocalGradient())
    for step in range(1, 101):
        records.add(step, 1.0, (2.0, 4.0, 3.0))
        records.flush()
        assert attempt.rank_record(0).stat().st_size <= 2000 + 200
    steps = [json.loads(line)["step"] for line in attempt.rank_record(0).read_text().splitlines()]
    assert steps == list(range(steps[0], 101))
    assert len(steps) > 5


def test_a_folder_that_cannot_be_written_loses_nothing(tmp_path):
    attempt = RunDir(tmp_path).attempt(1)
    records = RankRecords(attempt, 0, "n0", LocalGradient())
    records.add(1, 1.0, (2.0, 4.0, 3.0))
    records.flush()
    attempt.path.mkdir(parents=True)
    records.flush()
    assert [record["step"] for record in read_jsonl(attempt.rank_record(0))] == [1]
