"""Tests pins: who holds a checkpoint and for how long, and that a pinned checkpoint is never deleted."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import UsageError
from trainkit.run import pins as module
from trainkit.run.manifest import published
from trainkit.run.pins import UNSEEN_S, delete, pin, pinned, pins, unpin
from trainkit.run.process import ProcessId
from trainkit.run.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    for step in (1, 2, 3):
        run.checkpoint_dir(step).mkdir(parents=True)
    return run


def steps(run: RunDir) -> list[int]:
    return [checkpoint.step for checkpoint in published(run.checkpoints_dir)]


def test_a_pin_holds_until_its_holder_removes_it(run):
    pin(run, 1, "me")
    pin(run, 1, "/a/run", other_run=str(run.path))
    pin(run, 1, "me", note="replaces the first")
    pin(run, 3, "me")
    assert pins(run) == {1: {"me", "/a/run"}, 3: {"me"}}
    assert [unpin(run, 1, "me"), unpin(run, 1, "me"), unpin(run, 2, "me")] == [True, False, False]
    assert pins(run) == {1: {"/a/run"}, 3: {"me"}}
    with pytest.raises(UsageError, match="has no checkpoint of step 4"):
        pin(run, 4, "me")
    run.checkpoint_dir(3).rmdir()
    assert pins(run) == {1: {"/a/run"}}
    assert len(list(run.pins_dir.iterdir())) == 2  # Neither a failed pin nor a temporary file is left.


def dead() -> ProcessId:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    found = ProcessId.of(child.pid)
    child.communicate()
    return found


HERE = ProcessId.of(os.getpid())
AWAY = replace(HERE, host="another", boot_id="another")
ENDS: dict[str, tuple[Any, float, bool]] = {
    "a living process": (lambda: {"process": asdict(HERE)}, 9 * UNSEEN_S, True),
    "a dead process": (lambda: {"process": asdict(dead())}, 0.0, False),
    "a reused pid": (lambda: {"process": asdict(replace(HERE, start_ticks=1))}, 0.0, False),
    "a process on another host": (lambda: {"process": asdict(AWAY)}, UNSEEN_S - 60, True),
    "an old one on another host": (lambda: {"process": asdict(AWAY)}, UNSEEN_S + 60, False),
    "a run that is there": (lambda: {"other_run": str(Path.cwd())}, 9 * UNSEEN_S, True),
    "a run that was deleted": (lambda: {"other_run": "/no/such/run"}, 0.0, False),
    "a user": (dict, 9 * UNSEEN_S, True),
}


@pytest.mark.parametrize("kind", ENDS)
def test_when_a_pin_ends(run, kind, monkeypatch):
    why, age_s, holds = ENDS[kind]
    pin(run, 2, "x", **why())
    now_s = module.time.time() + age_s
    monkeypatch.setattr(module.time, "time", lambda: now_s)
    assert pins(run) == ({2: {"x"}} if holds else {})
    assert [item.step for item in delete(run, published(run.checkpoints_dir))] == (
        [1, 3] if holds else [1, 2, 3]
    )
    assert steps(run) == ([2] if holds else [])
    assert any(run.pins_dir.iterdir()) == holds


def test_an_unreadable_pin_holds(run):
    pin(run, 2, "x")
    (path,) = run.pins_dir.iterdir()
    path.write_text("{")
    assert pins(run) == {2: {f"{path.name} (unreadable)"}}


def test_a_process_pins_only_while_it_works(run):
    with pinned(run, 2, "ckpt export"):
        (holder,) = pins(run)[2]
        assert holder.startswith(f"ckpt export (process {os.getpid()} on ")
        assert delete(run, published(run.checkpoints_dir)[1:2]) == []
    assert pins(run) == {}
    code = (
        "import os, sys; from trainkit.run.pins import pinned; from trainkit.run.rundir import RunDir\n"
        "with pinned(RunDir(sys.argv[1]), 2, 'x'): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(run.path)]).returncode == -9
    assert any(run.pins_dir.iterdir())
    assert pins(run) == {}


def test_a_pin_made_after_the_decision_still_holds(run, monkeypatch):
    """The pin appears between the decision to delete and the deletion, and the checkpoint comes back."""
    doomed = published(run.checkpoints_dir)
    rename = Path.rename

    def pin_first(path: Path, target: Path) -> Path:
        if path.name.endswith("2"):
            pin(run, 2, "late")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", pin_first)
    assert [item.step for item in delete(run, doomed)] == [1, 3]
    assert steps(run) == [2]
    assert json.loads(next(run.pins_dir.iterdir()).read_text())["by"] == "late"
