"""Runs commands on runs with changed files: changes that once broke a command, and random changes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.mutated_runs import NEIGHBOUR, READING, make_project, typed
from benchmarks.run_mutations import DEEP, LONG, Change, put_in_place, replace_value
from tests.support.said import said
from trainkit.cli.main import main
from trainkit.run.files import append_jsonl
from trainkit.run.registry import index_file

ROOT = Path(__file__).parents[2]
FOUND = (
    ("sweep", "sweep.json", None, ("plan", "batch"), DEEP),
    ("sweep", "sweep.json", None, ("config", "seed"), LONG),
    ("sweep", "sweep.json", None, ("config", "optimizer"), "x"),
    ("sweep", "sweep.json", None, ("points", 2, "values"), "\0"),
    ("sweep", "sweep.json", None, ("submitted_at",), "2026-01-01T12:00:00"),
    ("finished", "attempts/001/plan.json", None, ("batch",), "x"),
    ("finished", "metrics.jsonl", 5, ("attempt",), {}),
    ("finished", "metrics.jsonl", 3, ("loss",), 10**400),
    ("finished", "metrics.jsonl", 3, ("time",), "0001-01-01T00:00:00+14:00"),
    ("finished", "job.json", None, ("attempts", 0, "submitted_at"), "2026-01-01T12:00:00"),
    ("crashed", "attempts/002/end.json", None, ("verdict", "host"), "\ud800"),
    ("crashed", "events.jsonl", 0, ("event",), "\ud800"),
    ("command-crashed", "attempts/001/errors/rank-0001.json", None, ("log_tail", 5), None),
    ("command-crashed", "job.json", None, ("code", "workdir"), None),
    ("command-crashed", "job.json", None, ("code", "import_path"), ["/"]),
    ("finished", "attempts/001/plan.json", None, ("batch", "device_batch_size"), "1e9"),
    ("finished", "attempts/001/plan.json", None, ("layout", "dp_replicate"), 2**63),
    ("finished", "checkpoints/step-00000003/manifest.json", None, ("layout",), "x"),
    ("finished", "checkpoints/step-00000006/manifest.json", None, ("model", "vocab_size"), 0),
    ("finished", "provenance.json", None, ("argv",), 1e308),
    ("bench", "bench.json", None, ("repeats",), "x"),
    ("bench", "bench.json", None, ("runs", 1, "degrees", "tp"), "1e9"),
    ("bench", "bench.json", None, ("runs", 1, "run"), "\0"),
    ("bench", "bench.json", None, ("runs", 1, "values"), {"a": [1]}),
)
"""Changes of a value that once made a command end with an exception."""
MANIFEST = "checkpoints/step-00000006/manifest.json"
RESUME = ["resume", "runs/finished", "--set", "train.steps=9"]
SUBMIT = ["submit", "runs/command-crashed", "--dry-run"]
HOSTILE = (
    ("finished", "metrics.jsonl", "a folder"),
    ("finished", "metrics.jsonl", "zeros"),
    ("finished", "events.jsonl", "a pipe"),
    ("finished", "checkpoints/step-00000003/manifest.json", "a pipe"),
    ("finished", "checkpoints/step-00000003", "a file"),
    ("finished", "checkpoints", "a link to its folder"),
    ("crashed", "attempts/002/logs/rank-0000.log", "a link to a device"),
    ("command-crashed", "attempts/001/logs/rank-0000.log", "a folder"),
    ("crashed", "job.json", "a link to itself"),
    ("crashed", "attempts/002/end.json", "a socket"),
    ("crashed", "plan.json", "zeros"),
)
"""The content that replaces a file."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder where commands are typed, on a machine without Slurm."""
    folder = tmp_path / "project"
    make_project(folder, ["bench", "command-crashed", "crashed", "finished", "sbatch", "sweep"])
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", str(folder / "bin"))
    return folder


def faults(name: str) -> list[str]:
    """Run the most common commands that read a run, and a dry run of it; return their problems."""
    lines = (*READING[:13], "submit {run} --dry-run", "status --sort loss --all")
    found = [
        (line, typed(line.format(run=f"runs/{name}", other=f"runs/{NEIGHBOUR}")))
        for line in lines
        if line.split()[-1] != "--dry-run" or name not in ("bench", "sweep")
    ]
    said = found[1][1].output + found[1][1].errors  # the output of `status --json`
    names = () if name == "bench" else (name, NEIGHBOUR)
    hidden = [f"{one} is hidden" for one in names if f"runs/{one}" not in said]
    return [f"{line}: {ended.wrong}" for line, ended in found if ended.wrong] + hidden


@pytest.mark.parametrize(("name", "file", "line", "place", "value"), FOUND)
def test_a_change_that_once_broke_a_command(project: Path, name, file, line, place, value) -> None:
    replace_value(project / "runs" / name, Change(Path(file), line, place), value)
    assert faults(name) == []


@pytest.mark.parametrize(("name", "file", "kind"), HOSTILE)
def test_what_is_no_file(project: Path, name: str, file: str, kind: str) -> None:
    put_in_place(project / "runs" / name / file, kind)
    assert faults(name) == []


def test_a_few_hundred_changes() -> None:
    argv = (sys.executable, "-m", "benchmarks.mutated_runs", "--changes", "300", "--procs", "2")
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"300 changes of 16 runs, 600 commands, 0 faults, 0 hangs", done.stdout)


@pytest.mark.parametrize(
    ("name", "change", "value", "words"),
    [
        ("finished", Change(Path(MANIFEST), None, ("model", "vocab_size")), 0, RESUME),
        ("command-crashed", Change(Path("job.json"), None, ("code", "workdir")), "/", SUBMIT),
    ],
    ids=["a checkpoint of another version", "a copy of the code that is elsewhere"],
)
def test_what_a_command_refuses(project: Path, capsys, name, change, value, words) -> None:
    replace_value(project / "runs" / name, change, value)
    assert main(words) == 2
    said(capsys.readouterr().err)


def test_a_dry_run_of_prune_takes_no_lock(project: Path) -> None:
    lock = project / "runs/finished/.lock"
    lock.unlink(missing_ok=True)
    assert main(["ckpt", "prune", "runs/finished", "--keep-last", "1", "--dry-run"]) == 0
    assert not lock.exists()


def test_the_status_says_what_cannot_be_read(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = project / "runs/finished/metrics.jsonl"
    file.unlink()
    os.mkfifo(file)
    assert main(["status", "runs/finished"]) == 0
    shown = capsys.readouterr().out
    said("\n".join(line for line in shown.splitlines() if line.startswith("warning: ")))
    assert "state       finished" in shown
    log = project / "runs/finished/attempts/001/logs/rank-0000.log"
    log.unlink()
    log.mkdir()
    assert main(["logs", "runs/finished"]) == 2
    said(capsys.readouterr().err)


@pytest.mark.parametrize("path", ["/a\0b", "/" + "x" * 300, "\ud800", "~nobody/x", "s3://bucket/run", ""])
def test_the_index_has_a_path_that_is_none(project: Path, path: str, capsys) -> None:
    index_file().parent.mkdir(parents=True, exist_ok=True)
    append_jsonl(index_file(), {"time": "2026-01-01T12:00:00.000Z", "name": "x", "path": path})
    for line in ("status", "status --json", "status finished", "logs finished --lines 1"):
        assert main(line.split()) == 0
    assert "runs/sweep" in capsys.readouterr().out
    assert main(["status", "x"]) == 2
    assert "unknown run 'x'" in capsys.readouterr().err
