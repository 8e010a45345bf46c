"""The commands in benchmarks/: each starts as its own first lines say."""

from __future__ import annotations

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
