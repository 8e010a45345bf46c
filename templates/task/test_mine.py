"""Tries the task with a few samples on this machine's CPU."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_a_few_samples():
    command = [sys.executable, "-m", "trainkit", "check", "mine.yaml", "--task-smoke"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
