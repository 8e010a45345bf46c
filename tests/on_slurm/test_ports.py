"""Tests that ranks started at the same time on the same hosts meet at separate, free ports."""

from __future__ import annotations

import json
import sys
from pathlib import Path

CAMPAIGN = Path(__file__).resolve().parents[2] / "benchmarks/port_clashes.py"


def test_two_jobs_and_two_steps_of_one_job_at_once(login):
    """Half of the ports are taken, as in the longer campaign in benchmarks/."""
    argv = [sys.executable, str(CAMPAIGN), "--starts", "3", "--seed", "7", "--folder", str(login.folder)]
    done = login.run(argv, timeout_s=150)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["sets_of_ranks"], figures["clashes"]) == (12, 0)
    assert done.stdout.count("13384 of 26768 ports are taken") == 2
