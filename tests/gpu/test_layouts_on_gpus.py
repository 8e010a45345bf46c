"""Tests that layouts on two GPUs with nccl give the curve of one GPU.

Without GPUs, one layout runs on the CPU to check the test.
"""

import os
from pathlib import Path

import pytest
import torch

from tests.support.parity import Case, run_cases, worst_difference

pytestmark = [pytest.mark.slow, pytest.mark.gpu, pytest.mark.xdist_group("gpus")]

KIND = os.environ.get("TEST_DEVICE", "cpu")
LAYOUTS = {
    "shard": {"dp_shard": 2},
    "replicate": {"dp_replicate": 2},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "pp": {"pp": 2},
    "zbv": {"pp": 2, "pp_schedule": "zbv"},
}


@pytest.mark.skipif(KIND == "cuda" and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_one_curve(tmp_path: Path) -> None:
    names = list(LAYOUTS) if KIND == "cuda" else ["shard"]
    cases = [Case(name, 2, dict(LAYOUTS[name])) for name in names]
    common = [f"device={KIND}", "parallel.compile=false", "train.steps=4", "train.eval_every=2"]
    run_cases(tmp_path, [Case("alone", 1, {}), *cases], common)
    found = {name: worst_difference(tmp_path / name, tmp_path / "alone") for name in names}
    assert max(found.values()) < (1e-4 if KIND == "cuda" else 1e-5), found
