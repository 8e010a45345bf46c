"""Tests runs of others, and runs that others have changed: commands warn, and execute nothing of them."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import make_attempt
from trainkit.backends.local.backend import LocalBackend
from trainkit.cli.main import main
from trainkit.run.events import log_event
from trainkit.run.files import write_json
from trainkit.run.rundir import RunDir
from trainkit.trust import TRUSTED_VARIABLE

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
NEIGHBOUR = 65534
ACTING = ("resume RUN", "requeue RUN", "submit RUN", "cancel RUN", "cancel RUN --now", "sync RUN")
READING = ("status RUN", "logs RUN", "diagnose RUN", "report RUN")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return a run of a script, two folders below its project. Its supervisor is this process."""
    (tmp_path / "lab/project").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "lab/project")
    monkeypatch.setenv(TRUSTED_VARIABLE, "[]")
    monkeypatch.setattr(LocalBackend, "_supervisor", lambda *args: os.getpid())
    Path("train.py").write_text("print()\n")
    assert main(["submit", "--backend", "local", "--gpus-per-node", "1", "--", "python", "train.py"]) == 0
    made = RunDir(capsys.readouterr().out.splitlines()[0])
    made.attempt(1).rank_log(0).write_text("said\n")
    return made


def give(path: Path, mode: int | None = None) -> None:
    os.chown(path, NEIGHBOUR, NEIGHBOUR)
    if mode is not None:
        path.chmod(mode)


def plant_code(run: RunDir) -> None:
    shutil.rmtree(run.code_dir)
    run.code_dir.mkdir()
    (run.code_dir / "train.py").write_text("planted")
    give(run.code_dir)


def link_config(run: RunDir) -> None:
    run.config_file.rename("elsewhere.yaml")
    run.config_file.symlink_to(Path("elsewhere.yaml").absolute())


LAB = "lab belongs to user 65534, who could replace runs/train"
RUN = "runs/train belongs to user 65534, who could replace the run"
RECORD = "every user can write to runs/train/job.json and could change what the run executes"
CODE = "runs/train/code belongs to user 65534, who could change what the run executes"
ATTACKS: dict[str, tuple[Callable[[RunDir], None], str]] = {
    "a folder above it": (lambda run: give(run.path.parents[2]), LAB),
    "a group above it": (lambda run: give(run.path.parents[2], 0o2775), LAB),
    "everybody above it": (
        lambda run: run.path.parents[1].chmod(0o777),
        "project, and could replace runs/train",
    ),
    "the run": (lambda run: give(run.path), RUN),
    "its record": (lambda run: give(run.job_file), "runs/train/job.json belongs to user 65534"),
    "an open record": (lambda run: run.job_file.chmod(0o666), RECORD),
    "its code": (plant_code, CODE),
}
READ_LATER: dict[str, tuple[Callable[[RunDir], None], str]] = {
    "its config": (lambda run: give(run.config_file), "config.yaml belongs to user 65534"),
    "an open plan": (lambda run: run.plan_file.chmod(0o602), "every user can write to runs/train/plan.json"),
    "a link": (link_config, "runs/train/config.yaml is a symlink, which can point to any file"),
}


@as_root
@pytest.mark.parametrize("attack", ATTACKS)
def test_who_acts_on_a_run_learns_of_others(run, capsys, attack):
    plant, expected = ATTACKS[attack]
    plant(run)
    for command in ACTING:
        assert main([str(run.path) if word == "RUN" else word for word in command.split()]) == 2, command
        said = capsys.readouterr().err
        assert expected in said, command
        assert "\n\nhint: " in said
    assert run.attempt_numbers() == [1]
    for command in READING:
        assert main([str(run.path) if word == "RUN" else word for word in command.split()]) == 0, command
    capsys.readouterr()
    # The attempt seems to run, because its recorded process is this one.
    assert main(["submit", str(run.path), "--dry-run", "--trust"]) == 0


@as_root
@pytest.mark.parametrize("attack", READ_LATER)
def test_a_file_is_judged_when_it_is_opened(run, prints, attack):
    plant, expected = READ_LATER[attack]
    plant(run)
    assert expected in prints(["submit", str(run.path), "--dry-run"], code=2).err
    assert main(["status", str(run.path)]) == 0
    assert main(["submit", str(run.path), "--dry-run", "--trust"]) == 0


@as_root
def test_a_new_run_below_a_folder_of_somebody_else(run, prints):
    give(run.path.parents[2])
    submit = ["submit", "--backend", "local", "--name", "new", "--", "true"]
    said = prints(submit, code=2).err
    assert "user 65534, who could" in said
    assert "--run-dir" in said
    assert not Path("runs/new").exists()
    assert main([*submit[:1], "--trust", *submit[1:]]) == 0


class Planted:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.file), "w")


LOOKS = "status", "logs", "diagnose", "report", "compare", "watch", "status --json", "ckpt ls", "ckpt verify"


def test_looking_at_a_run_executes_nothing_in_it(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    attempt = make_attempt(tmp_path / "received", num_procs=2)
    run, executed = attempt.run, tmp_path / "executed"
    content = pickle.dumps(Planted(executed))
    checkpoint = run.checkpoint_dir(1)
    places = [run.path / "call.pkl", run.path / "result.pkl", run.compiled_file, run.path / "calls/0.pkl"]
    places += [checkpoint / ".metadata", checkpoint / "__0_0.distcp", attempt.flight_dir / "rank_0"]
    places += [attempt.path / "flight/rank_1.pkl", run.path / "submitit/0_0_result.pkl"]
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    files = {file.name: {"size": len(content), "sha256": "0" * 64} for file in (places[4], places[5])}
    write_json(checkpoint / "manifest.json", {"step": 1, "files": files})
    log_event(run, 1, "started")
    log_event(run, 1, "hang", rank=0)
    log_event(run, 1, "rank_failed", rank=1, exit_code=1)
    metrics = {"step": 1, "loss": 2.0, "attempt": 1, "time": "2026-01-01T00:00:00Z"}
    run.metrics_file.write_text(json.dumps(metrics) + "\n")
    for look in LOOKS:
        main([*look.split(), str(run.path), *([str(run.path)] if look == "compare" else [])])
        said = capfd.readouterr()
        assert "Traceback" not in said.err, look
        assert "unexpected error" not in said.err, look
        assert not executed.exists(), look
    pickle.loads(content).close()
    assert executed.exists()  # the object is executed by a normal load
