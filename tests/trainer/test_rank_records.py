"""The records of what a rank computed by itself."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from trainkit.run.files import read_jsonl
from trainkit.run.rundir import RunDir
from trainkit.trainer import metrics
from trainkit.trainer.metrics import LocalGradient, RankRecords

CPU = torch.device("cpu")


def checksum(*grads: torch.Tensor) -> float:
    gradient = LocalGradient()
    gradient.is_due = True
    gradient.add(grads)
    return float(gradient.take(CPU))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_flipped_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    grad = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = checksum(grad)
    assert before == checksum(grad[:300], grad[300:]), "however it is divided"
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[grad.element_size()]
    for bit in range(min(48, 8 * grad.element_size() - 1)):
        flipped = grad.clone()
        flipped.view(words)[7] ^= 1 << bit
        assert checksum(flipped) != before


def test_a_step_that_is_not_due_has_no_values(tmp_path: Path) -> None:
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


def test_a_spike_is_written_at_once(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).attempt(1)
    attempt.path.mkdir(parents=True)
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


def test_the_file_keeps_its_newer_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_BYTES", 2000)
    attempt = RunDir(tmp_path).attempt(1)
    attempt.path.mkdir(parents=True)
    records = RankRecords(attempt, 0, "n0", LocalGradient())
    for step in range(1, 101):
        records.add(step, 1.0, (2.0, 4.0, 3.0))
        records.flush()
        assert attempt.rank_record(0).stat().st_size <= 2000 + 200
    steps = [json.loads(line)["step"] for line in attempt.rank_record(0).read_text().splitlines()]
    assert steps == list(range(steps[0], 101))
    assert len(steps) > 5


def test_a_folder_that_cannot_be_written_loses_nothing(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).attempt(1)
    records = RankRecords(attempt, 0, "n0", LocalGradient())
    records.add(1, 1.0, (2.0, 4.0, 3.0))
    records.flush()
    attempt.path.mkdir(parents=True)
    records.flush()
    assert [record["step"] for record in read_jsonl(attempt.rank_record(0))] == [1]
