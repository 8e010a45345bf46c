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
PLAN, MANIFEST = "attempts/001/plan.json", "checkpoints/step-00000006/manifest.json"
FOUND = (
    ("sweep 1", "sweep.json", None, ("plan", "batch"), DEEP),
    ("sweep 2", "sweep.json", None, ("config", "seed"), LONG),
    ("sweep 3", "sweep.json", None, ("config", "optimizer"), "x"),
    ("sweep 4", "sweep.json", None, ("points", 2, "values"), "\0"),
    ("sweep 3", "sweep.json", None, ("submitted_at",), "2026-01-01T12:00:00"),
    ("finished 1", PLAN, None, ("batch",), "x"),
    ("finished 1", "metrics.jsonl", 5, ("attempt",), {}),
    ("finished 2", "metrics.jsonl", 3, ("loss",), 10**400),
    ("finished 3", "metrics.jsonl", 3, ("time",), "0001-01-01T00:00:00+14:00"),
    ("finished 1", "job.json", None, ("attempts", 0, "submitted_at"), "2026-01-01T12:00:00"),
    ("crashed 1", "attempts/002/end.json", None, ("verdict", "host"), "\ud800"),
    ("crashed 1", "events.jsonl", 0, ("event",), "\ud800"),
    ("command-crashed 1", "attempts/001/errors/rank-0001.json", None, ("log_tail", 5), None),
    ("command-crashed 1", "job.json", None, ("code", "workdir"), None),
    ("command-crashed 2", "job.json", None, ("code", "import_path"), ["/"]),
    ("finished 2", PLAN, None, ("batch", "device_batch_size"), "1e9"),
    ("finished 3", PLAN, None, ("layout", "dp_replicate"), 2**63),
    ("finished 1", "checkpoints/step-00000003/manifest.json", None, ("layout",), "x"),
    ("finished 1", MANIFEST, None, ("model", "vocab_size"), 0),
    ("finished 1", "provenance.json", None, ("argv",), 1e308),
    ("bench 1", "bench.json", None, ("repeats",), "x"),
    ("bench 1", "bench.json", None, ("runs", 1, "degrees", "tp"), "1e9"),
    ("bench 2", "bench.json", None, ("runs", 1, "run"), "\0"),
    ("bench 3", "bench.json", None, ("runs", 1, "values"), {"a": [1]}),
)
"""Changes of a value that once made a command end with an exception.

The changes of one number are made together, because none of them hides another.
"""
RESUME = ["resume", "runs/finished", "--set", "train.steps=9"]
SUBMIT = ["submit", "runs/command-crashed", "--dry-run"]
HOSTILE = (
    ("finished 1", "metrics.jsonl", "a folder"),
    ("finished 2", "metrics.jsonl", "zeros"),
    ("finished 1", "events.jsonl", "a pipe"),
    ("finished 1", "checkpoints/step-00000003/manifest.json", "a pipe"),
    ("finished 2", "checkpoints/step-00000003", "a file"),
    ("finished 3", "checkpoints", "a link to its folder"),
    ("crashed 1", "attempts/002/logs/rank-0000.log", "a link to a device"),
    ("command-crashed 1", "attempts/001/logs/rank-0000.log", "a folder"),
    ("crashed 2", "job.json", "a link to itself"),
    ("crashed 3", "attempts/002/end.json", "a socket"),
    ("crashed 1", "plan.json", "zeros"),
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


@pytest.mark.parametrize("changes", dict.fromkeys(row[0] for row in FOUND))
def test_changes_that_once_broke_a_command(project, changes):
    name = changes.split()[0]
    for _, file, line, place, value in (row for row in FOUND if row[0] == changes):
        replace_value(project / "runs" / name, Change(Path(file), line, place), value)
    assert faults(name) == []


@pytest.mark.parametrize("changes", dict.fromkeys(row[0] for row in HOSTILE))
def test_what_is_no_file(project, changes):
    name = changes.split()[0]
    for _, file, kind in (row for row in HOSTILE if row[0] == changes):
        put_in_place(project / "runs" / name / file, kind)
    assert faults(name) == []


@pytest.mark.slow(seconds=8)
def test_some_random_changes():
    argv = (sys.executable, "-m", "benchmarks.mutated_runs", "--changes", "64", "--procs", "2")
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"64 changes of 16 runs, 128 commands, 0 faults, 0 hangs", done.stdout)


@pytest.mark.parametrize(
    ("name", "change", "value", "words"),
    [
        ("finished", Change(Path(MANIFEST), None, ("model", "vocab_size")), 0, RESUME),
        ("command-crashed", Change(Path("job.json"), None, ("code", "workdir")), "/", SUBMIT),
    ],
    ids=["a checkpoint of another version", "a copy of the code that is elsewhere"],
)
def test_what_a_command_refuses(project, capsys, name, change, value, words):
    replace_value(project / "runs" / name, change, value)
    assert main(words) == 2
    said(capsys.readouterr().err)


def test_a_dry_run_of_prune_takes_no_lock(project):
    lock = project / "runs/finished/.lock"
    lock.unlink(missing_ok=True)
    assert main(["ckpt", "prune", "runs/finished", "--keep-last", "1", "--dry-run"]) == 0
    assert not lock.exists()


def test_the_status_says_what_cannot_be_read(project, capsys):
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


def test_the_index_has_paths_that_are_none(project, capsys):
    index_file().parent.mkdir(parents=True, exist_ok=True)
    for path in ("/a\0b", "/" + "x" * 300, "\ud800", "~nobody/x", "s3://bucket/run", ""):
        append_jsonl(index_file(), {"time": "2026-01-01T12:00:00.000Z", "name": "x", "path": path})
    for line in ("status", "status --json", "status finished", "logs finished --lines 1"):
        assert main(line.split()) == 0
    assert "runs/sweep" in capsys.readouterr().out
    assert main(["status", "x"]) == 2
    assert "unknown run 'x'" in capsys.readouterr().err
