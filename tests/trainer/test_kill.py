"""The short, seeded part of the kill campaign that CI runs; the long one is a command of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[2] / "benchmarks" / "kill_campaign.py"


@pytest.mark.slow(seconds=20)
def test_killed_at_random_times_the_curve_stays_the_same(tmp_path: Path) -> None:
    # This seed kills one rank.
    argv = [sys.executable, str(CAMPAIGN), "--rounds", "1", "--seed", "54", "--keep", str(tmp_path / "runs")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "1 of 1 equal"
