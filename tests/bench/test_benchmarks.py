"""The commands in benchmarks/: each starts as its own first lines say; `make gpu` runs without a GPU."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = re.compile(r"^ {4}(?:.*\bor: )?python (-m benchmarks\.\w+|benchmarks/\w+\.py)", re.MULTILINE)
FILES = [path for path in sorted((ROOT / "benchmarks").glob("*.py")) if "def main(" in path.read_text()]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_starts_as_its_docstring_says(file: Path) -> None:
    found = COMMAND.search(file.read_text())
    assert found is not None
    argv = shlex.split(found[1])
    assert file.stem in argv[-1]
    done = subprocess.run(
        [sys.executable, *argv, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


def test_the_fault_campaign_knows_why_trainkit_gives_up() -> None:
    """It takes these reasons for a stop that faster failures than checkpoints explain."""
    flight = (ROOT / "benchmarks" / "flight.py").read_text()
    decision = (ROOT / "trainkit" / "job" / "decision.py").read_text()
    reasons = re.search(r"^BRAKES = \((.*)\)$", flight, re.MULTILINE)
    assert reasons is not None
    found = re.findall(r'"([^"]+)"', reasons[1])
    assert found
    assert [reason for reason in found if reason not in decision] == []


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
