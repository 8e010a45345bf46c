"""`make gpu` without a GPU: every bench at tiny sizes, and what it says without `--device cpu`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *args],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_without_a_gpu() -> None:
    done = bench()
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no NVIDIA GPU here: torch ")
    assert "hint: " in done.stderr


@pytest.mark.slow
def test_every_bench_on_a_cpu(tmp_path: Path) -> None:
    parts = ("350m", "8b", "save", "profile")
    done = bench("--device", "cpu", "--out", str(tmp_path), "--only", *parts)
    assert done.returncode == 0, done.stderr
    [file] = tmp_path.glob("*.json")
    record = json.loads(file.read_text())
    assert list(record["parts"]) == list(parts)
    loops = [row["loop"] for row in record["parts"]["8b"]["rows"]]
    assert loops == ["trainkit", "trainkit, eager", "hand-written"]
    assert all(row["tokens/s"] > 0 for name in parts[:2] for row in record["parts"][name]["rows"])
    assert all(row["blocked s"] > 0 for row in record["parts"]["save"]["rows"])
    assert sum(row["ms per step"] for row in record["parts"]["profile"]["rows"]) > 0
    [table] = tmp_path.glob("*.md")
    assert table.read_text() == done.stdout
    assert "CPU, tiny sizes: no figure counts" in done.stdout
