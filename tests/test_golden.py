"""Compares output for an earlier version's run folders, and the scripts of "dry_runs.yaml", with records.

`python -m tests.golden` writes golden/expected/ again. A change in it is a change that users will see.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.golden.__main__ import HERE, unpack_run, write_text_file
from tests.support.programs import run_program

EXPECTED = HERE / "expected"
ROOT = HERE.parents[1]
TIMEOUT_S = 300
NAMES = sorted(str(path.relative_to(EXPECTED)) for path in EXPECTED.rglob("*.txt"))
LOSSES = (
    *(5.768434762954712, 5.7520363330841064, 5.7361321449279785, 5.71942400932312),
    *(5.705223083496094, 5.696863174438477, 5.67518424987793, 5.671050786972046),
    *(5.667846918106079, 5.653448104858398, 5.651200771331787, 5.652374505996704),
)
"""The losses of 12 steps of the run `cancelled`, if it had not ended after step 6."""

pytestmark = pytest.mark.xdist_group("golden")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the current texts, and return their folder."""
    folder = tmp_path_factory.mktemp("golden")
    done = run_program(sys.executable, "-m", "tests.golden", str(folder), cwd=ROOT, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_the_same_is_said(texts: Path, name: str) -> None:
    assert (texts / name).read_text() == (EXPECTED / name).read_text()


def test_every_text_is_compared(texts: Path) -> None:
    assert sorted(str(path.relative_to(texts)) for path in texts.rglob("*.txt")) == NAMES


@pytest.mark.slow(seconds=6)
def test_a_run_of_an_earlier_version_resumes(tmp_path: Path) -> None:
    write_text_file(tmp_path)
    run = unpack_run(HERE / "folders" / "cancelled", tmp_path, os.uname().nodename)
    done = run_program(
        *(sys.executable, "-m", "trainkit", "resume", str(run), "--follow"),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(record["attempt"], record["step"]) for record in records] == [
        (1 if step <= 6 else 2, step) for step in range(1, 13)
    ]
    assert [record["loss"] for record in records] == pytest.approx(LOSSES, rel=1e-5)
