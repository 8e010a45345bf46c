"""A rank that is alone with itself does what it would do among others, and holds what it would hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import make_attempt

pytestmark = pytest.mark.slow


def simulate(tmp_path: Path, num_procs: int, *options: str, rank: int = 0) -> dict[str, Any]:
    attempt = make_attempt(
        tmp_path / "run", ["model.num_layers=8", "data.num_workers=0", *options], num_procs
    )
    argv = [str(attempt.config_file), str(attempt.plan_file), str(rank)]
    done = subprocess.run(
        [sys.executable, "-m", "trainkit.trainer.simulate", *argv],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_shard_of_512(tmp_path: Path) -> None:
    batch = ("train.device_batch_size=1", "train.global_batch_size=512")
    whole = simulate(tmp_path, 1, *batch)
    shard = simulate(tmp_path, 32, *batch, "train.global_batch_size=32")
    assert whole["num_params"] == pytest.approx(32 * shard["num_params"], rel=0.2)
    assert shard["collectives"] == {"all_gather": 1, "all_reduce": 1, "reduce_scatter": 1}


def test_every_rank_of_a_pipeline_has_its_stages(tmp_path: Path) -> None:
    options = ("parallel.pp=2", "parallel.tp=2", "train.device_batch_size=4")
    found = [simulate(tmp_path, 4, *options, rank=rank) for rank in (0, 2)]
    # Both ends have as many layers; the last one has a norm more.
    assert found[1]["num_params"] == found[0]["num_params"] + 64
    assert found[0]["peak_bytes"]["total"] > found[1]["peak_bytes"]["act"] > 0


def test_recomputing_holds_less(tmp_path: Path) -> None:
    kept = simulate(tmp_path, 2, "data.seq_len=256")
    recomputed = simulate(tmp_path, 2, "data.seq_len=256", "parallel.activation_checkpointing=full")
    assert recomputed["peak_bytes"]["total"] < 0.7 * kept["peak_bytes"]["total"]


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b", "zbv", "dualpipe_v"])
def test_schedules(tmp_path: Path, schedule: str) -> None:
    options = ("parallel.pp=2", f"parallel.pp_schedule={schedule}", "train.device_batch_size=8")
    found = simulate(tmp_path, 2, *options, "parallel.pp_microbatches=8")
    assert found["collectives"]["all_reduce"] == 1
