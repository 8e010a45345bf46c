"""Tests the average of the weights against a loop in Python, on all layouts, and its way through checkpoints."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import train

pytestmark = pytest.mark.slow(seconds=8)

def test_try(tmp_path):
    a = train(tmp_path / "run", ["train.steps=4", "ema.decay=0.9", "train.eval_every=2", "train.eval_batches=1"], 2)
    print((tmp_path/"run"/"metrics.jsonl").read_text())
    print(a.rank_log(0).read_text())
    print(a.plan_file.read_text())
