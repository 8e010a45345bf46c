"""Commands that read runs, after one value of a file was changed; `benchmarks.damaged_runs` changes all."""

import json
import os
import random
from pathlib import Path

import pytest

from benchmarks import hostile_files
from benchmarks.damaged_runs import DEEP, LONG, VALUES, Change, changes, make_project, tried
from trainkit.cli.main import main
from trainkit.run.registry import index_file

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


HOSTILE = (
    ("finished", "metrics.jsonl", "a folder"),
    ("finished", "metrics.jsonl", "unreadable"),
    ("finished", "events.jsonl", "a pipe"),
    ("finished", "checkpoints/step-00000003/manifest.json", "a pipe"),
    ("finished", "checkpoints/step-00000003", "a file"),
    ("crashed", "attempts/002/logs/rank-0000.log", "a link to a device"),
    ("crashed", "job.json", "a link to itself"),
    ("crashed", "attempts/002/end.json", "a socket"),
    ("crashed", "plan.json", "zeros"),
)
"""What stands in the place of a file."""


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


@pytest.mark.parametrize(("name", "file", "kind"), HOSTILE)
def test_what_is_no_file(project: Path, name: str, file: str, kind: str) -> None:
    assert list(hostile_files.tried(project, name, project / "runs" / name / file, kind)) == []


def test_the_status_says_what_cannot_be_read(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = project / "runs/finished/metrics.jsonl"
    file.unlink()
    os.mkfifo(file)
    assert main(["status", "runs/finished"]) == 0
    shown = capsys.readouterr().out
    assert "warning: metrics.jsonl cannot be read: it is no regular file" in shown
    assert "state       finished" in shown
    log = project / "runs/finished/attempts/001/logs/rank-0000.log"
    log.unlink()
    log.mkdir()
    assert main(["logs", "runs/finished"]) == 2
    assert capsys.readouterr().err == (
        "error: runs/finished/attempts/001/logs/rank-0000.log cannot be read: it is a folder\n\n"
        "hint: --rank, --node and --all print other logs\n"
    )


@pytest.mark.parametrize("path", ["/a\0b", "/" + "x" * 300, "\ud800", "~nobody/x", "s3://bucket/run", ""])
def test_the_index_has_a_path_that_is_none(
    project: Path, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    index_file().parent.mkdir(parents=True, exist_ok=True)
    with index_file().open("a") as stream:
        stream.write(json.dumps({"time": "2026-01-01T12:00:00.000Z", "name": "x", "path": path}) + "\n")
    for line in (
        ["status"],
        ["status", "--json"],
        ["status", "finished"],
        ["logs", "finished", "--lines", "1"],
    ):
        assert main(line) == 0
    assert "runs/sweep" in capsys.readouterr().out
    assert main(["status", "x"]) == 2
    assert "unknown run 'x'" in capsys.readouterr().err
