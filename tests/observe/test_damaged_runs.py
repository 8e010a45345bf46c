"""Commands that read runs, after one value of a file was changed; `benchmarks.damaged_runs` changes all."""

import random
from pathlib import Path

import pytest

from benchmarks.damaged_runs import DEEP, LONG, VALUES, Change, changes, make_project, tried

FOUND = (
    ("sweep", "sweep.json", None, ("plan", "batch"), DEEP),
    ("sweep", "sweep.json", None, ("config", "seed"), LONG),
    ("sweep", "sweep.json", None, ("config", "optimizer"), "x"),
    ("sweep", "sweep.json", None, ("points", 2, "values"), "\0"),
    ("finished", "attempts/001/plan.json", None, ("batch",), "x"),
    ("finished", "metrics.jsonl", 5, ("attempt",), {}),
    ("crashed", "attempts/002/end.json", None, ("verdict", "host"), "\ud800"),
    ("crashed", "events.jsonl", 0, ("event",), "\ud800"),
    ("command-crashed", "attempts/001/errors/rank-0001.json", None, ("log_tail", 5), None),
    ("finished", "attempts/001/plan.json", None, ("batch", "device_batch_size"), "1e9"),
    ("finished", "attempts/001/plan.json", None, ("layout", "dp_replicate"), 2**63),
    ("finished", "checkpoints/step-00000003/manifest.json", None, ("layout",), "x"),
    ("finished", "provenance.json", None, ("argv",), 1e308),
    ("bench", "bench.json", None, ("repeats",), "x"),
    ("bench", "bench.json", None, ("runs", 1, "degrees", "tp"), "1e9"),
    ("bench", "bench.json", None, ("runs", 1, "run"), "\0"),
    ("bench", "bench.json", None, ("runs", 1, "values"), {"a": [1]}),
)
"""Changes after which a command ended with an exception."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which commands are typed, on a machine without Slurm."""
    folder = tmp_path / "project"
    make_project(folder, ["bench", "command-crashed", "crashed", "finished", "sbatch", "sweep"])
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", str(folder / "bin"))
    return folder


@pytest.mark.parametrize(("name", "file", "line", "place", "value"), FOUND)
def test_a_change_that_once_broke_a_command(
    project: Path, name: str, file: str, line: int | None, place: tuple[str | int, ...], value: object
) -> None:
    assert list(tried(project, name, Change(Path(file), line, place), value)) == []


@pytest.mark.parametrize("name", ["crashed", "sbatch", "sweep"])
def test_any_change(project: Path, name: str) -> None:
    draw = random.Random(0)
    for change in draw.sample(list(changes(project / "runs" / name)), 3):
        assert list(tried(project, name, change, draw.choice(VALUES))) == []
