"""Runs `trainkit drill` on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import tasks
from tests.support.json_outputs import checked
from tests.support.programs import RunProcesses, run_program
from tests.support.runs import wait_until
from tests.support.said import said
from tests.support.two_lines import two_lines
from trainkit.capabilities.drill.scenarios import NAMES
from trainkit.cli.main import main
from trainkit.run.files import read_json
from trainkit.run.rundir import RunDir

NOTHING = RunProcesses((), {}, {})
ROOT = Path(__file__).resolve().parents[3]
DRILL = ("drill", "small.yaml", "--backend", "local")
ARGV = (sys.executable, "-m", "trainkit", *DRILL)
CONFIG = """
name: small
device: cpu
model: {preset: nano, dropout: 0.1}
data: {source: text.txt, seq_len: 64, val_fraction: 0.1}
train: {device_batch_size: 4, global_batch_size: 16}
precision: {dtype: fp32}
requeue: {grace_s: 20}
logging: {tensorboard: false}
"""


class Place:
    """The folder where drills run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "small.yaml").write_text(CONFIG)
        (folder / "text.txt").write_text("".join(f"line {n} says {n * n}\n" for n in range(1500)))
        homes = {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("STATE", "CACHE", "CONFIG")}
        self.environ = {**os.environ, "PYTHONPATH": str(ROOT), **homes}

    def drill(self, *args: str) -> subprocess.CompletedProcess[str]:
        argv = [*ARGV, "--gpus-per-node", "1", *args]
        return run_program(*argv, cwd=self.folder, env=self.environ, timeout=600)

    def trainer(self, **options: Any) -> str:
        """Return the name of a script that trains with `two_lines`."""
        (self.folder / "train.py").write_text(two_lines(**options))
        return "train.py"

    def runs(self) -> list[RunDir]:
        return [RunDir(file.parent) for file in sorted(self.folder.glob("runs/*/*/job.json"))]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


OF_A_TASK = ("mid-save", "damaged-checkpoint")
OF_A_COMMAND = ("signal", "rank", "node")
NEEDS_SLURM = ("requeue",)
USER_TASK = f"""
name: small
device: cpu
task: {tasks.__file__}:Classify
task_args: {{width: 256, dropout: 0.2, batch_norm: true}}
data: {{num_workers: 1}}
train: {{device_batch_size: 8, global_batch_size: 16}}
precision: {{dtype: fp32}}
requeue: {{grace_s: 20}}
logging: {{tensorboard: false}}
"""
"""A task with dropout, batch norms and random augmentation. Its data workers die with their rank."""


@pytest.mark.slow(seconds=30)
@pytest.mark.smoke
def test_a_task_of_ones_own_survives_damaged_saves(place):
    """Only the built-in trainer can be interrupted while it saves.

    Other interruptions are injected in the same way for any trainer, so the other tests start a COMMAND.
    """
    (place.folder / "small.yaml").write_text(USER_TASK)
    names = (*OF_A_TASK, *NEEDS_SLURM)
    assert {*names, *OF_A_COMMAND} == set(NAMES)
    only = [word for name in names for word in ("--only", name)]
    done = place.drill("--seed", "2991", "--steps", "48", "--json", *only)
    assert done.returncode == 0, done.stdout + done.stderr
    value = checked("drill", done.stdout)
    assert value["passed"]
    assert [
        (found["scenario"], found["state"], found["curve"], found["restarted_by"])
        for found in value["scenarios"]
    ] == [
        ("mid-save", "passed", "equal", "restart"),
        ("damaged-checkpoint", "passed", "equal", "resume"),
        ("requeue", "skipped", "", ""),
    ]
    assert all(found["restart_s"] > 0 for found in value["scenarios"][:2])
    for run in place.runs():
        # A supervisor that has recorded its end may still be exiting.
        wait_until(lambda run=run: RunProcesses.of(run) == NOTHING)
        # these checkpoints were verified and are deleted to save space
        assert list(run.checkpoints_dir.iterdir()) == []
    # The drill has not changed the state of the user.
    assert {path.name for path in place.folder.iterdir()} <= {"small.yaml", "text.txt", "runs", "cache"}
    assert read_json(Path(value["folder"]) / "drill.json") == value


@pytest.mark.slow(seconds=20)
@pytest.mark.parametrize(
    ("example", "num_ranks", "scenario", "last"),
    [("resumable_train.py", 2, "signal", "0 steps equal passed"), ("own_loop.py", 1, "node", "equal passed")],
)
def test_an_example_survives(place, example, num_ranks, scenario, last):
    command = (sys.executable, str(ROOT / "examples" / example), "--steps", "100")
    shape = ("--gpus-per-node", str(num_ranks))
    done = place.drill(*shape, "--only", scenario, "--seed", "165", "--", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    _, row, *_, summary = done.stdout.splitlines()
    assert row.split()[0] == scenario
    assert " ".join(row.split()).endswith(last)
    assert summary == "1 of 1 passed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "options", "code", "expected"),
    [
        ({"saves": False}, "--only signal", 1, ("equal FAILED\n", " graceful stop\n", "0 of 1 passed\n")),
        # One of two ranks is killed. The end decides, because the trainer writes no steps.
        (
            {"writes": False},
            "--gpus-per-node 2 --only signal --only rank",
            0,
            ("unknown passed\n", "signal: only the final state ", "2 of 2 passed\n"),
        ),
        ({}, "--only rank --set requeue.on=[]", 0, (" (resume) ", "rank: the drill resumed ")),
    ],
    ids=["saves nothing", "writes no steps", "does not restart"],
)
def test_what_is_said_of_a_trainer(place, trainer, options, code, expected):
    done = place.drill(*options.split(), "--", "python", place.trainer(**trainer))
    assert done.returncode == code, done.stdout + done.stderr
    shown = re.sub(" +", " ", done.stdout)
    assert [part for part in expected if part not in shown] == [], shown


def test_a_run_that_fails_by_itself_ends_the_drill(place):
    (place.folder / "train.py").write_text("raise ValueError('no such column')\n")
    done = place.drill("--", "python", "train.py")
    assert done.returncode == 1
    assert "the uninterrupted run " in done.stderr
    assert "hint: `trainkit logs " in done.stderr


@pytest.mark.slow(seconds=25)
def test_a_trainer_that_hangs_when_it_comes_back_does_not_hold_the_drill_up(place):
    code = "import os, time\nif os.environ['TRAINKIT_JOB_ATTEMPT'] != '1': time.sleep(600)\n"
    (place.folder / "train.py").write_text(code + two_lines(steps=30))
    ways = ("--only", "rank", "--set", "requeue.hang_min_s=1")
    done = place.drill(*ways, "--", "python", "train.py")
    assert done.returncode == 1
    assert "made no progress" in done.stdout
    assert all(RunProcesses.of(run) == NOTHING for run in place.runs())


def test_ctrl_c_cancels_what_runs_and_says_where_it_lies(place):
    argv = [*ARGV, "--gpus-per-node", "1", "--", "python", place.trainer(steps=100_000)]
    process = subprocess.Popen(argv, cwd=place.folder, env=place.environ, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: any(run.metrics_file.exists() for run in place.runs()))
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=120)
    assert process.returncode == 130
    (run,) = place.runs()
    assert f"cancelled {run.path.relative_to(place.folder)}" in words
    assert f"are in {run.path.parent}" in words
    assert read_json(run.attempt(1).end_file)["state"] == "cancelled"
    assert RunProcesses.of(run) == NOTHING


def test_the_list_starts_nothing(place, monkeypatch, capsys):
    monkeypatch.chdir(place.folder)
    assert main([*DRILL, "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    here = {item["scenario"] for item in listed if item["skip_reason"] is None}
    assert here == {"signal", "rank", "node", "mid-save", "damaged-checkpoint"}
    assert main([*DRILL, "--list"]) == 0
    assert "requeue" in capsys.readouterr().out
    assert place.runs() == []


@pytest.mark.parametrize(
    "args", ["--only requeue", "--steps 30 -- true", "--launcher torchrun", "--only fire", "--steps 5"]
)
def test_refusals(place, monkeypatch, capsys, args):
    monkeypatch.chdir(place.folder)
    assert main([*DRILL, *args.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    said(err)
    assert not (place.folder / "runs").exists()
