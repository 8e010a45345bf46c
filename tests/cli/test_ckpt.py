"""Tests `trainkit ckpt` on run folders with small checkpoints."""

import json
import os
import socket

import pytest

from tests.run.test_manifest import change, flip, make, shard
from tests.support.folders import names
from tests.support.said import said
from trainkit.cli.main import main
from trainkit.run.events import log_event
from trainkit.run.files import read_json, write_json
from trainkit.run.manifest import point_best_at, published, set_aside
from trainkit.run.record import add_attempt
from trainkit.run.rollbacks import Rollback, write_rollbacks
from trainkit.run.rundir import RunDir


@pytest.fixture
def run(tmp_path):
    """Return an ended run with checkpoints after steps 10, 20, 30 and 40. Step 20 is the best one."""
    run = RunDir(tmp_path / "run")
    run.attempts_dir.mkdir(parents=True)
    run.config_file.write_text("name: run\n")
    write_json(run.job_file, {"backend": "local", "name": "run", "cwd": str(tmp_path), "attempts": []})
    for step in (10, 20, 30, 40):
        checkpoint = make(run.checkpoints_dir, step)
        change(checkpoint, layout={"dp_shard": 2, "tp": 1}, world_size=2)
        log_event(run, 1, "checkpoint_commit", step=step, reason="every_steps")
        if step == 20:
            point_best_at(checkpoint)
    return run


def steps(run: RunDir) -> list[int]:
    return [checkpoint.step for checkpoint in published(run.checkpoints_dir)]


def test_ls(run, prints):
    aside = set_aside(published(run.checkpoints_dir)[3])
    log_event(run, 2, "checkpoint_rejected", step=40, reason="it was bad", set_aside=aside.name)
    (run.checkpoints_dir / "step-00000050.attempt-002.partial").mkdir()
    shard(published(run.checkpoints_dir)[0]).unlink()
    rows = [line.split() for line in prints(["ckpt", "ls", str(run.path)]).out.splitlines()]
    assert rows[0] == ["CHECKPOINT", "STATE", "TIME", "SIZE", "LAYOUT", "BEST", "REASON"]
    assert dict(row[:2] for row in rows[1:]) == {
        **{"step-00000010": "damaged", "step-00000020": "published", "step-00000030": "published"},
        **{"step-00000040.rejected": "rejected", "step-00000050.attempt-002.partial": "partial"},
    }
    assert rows[1][-3:] == ["__1_0.distcp", "is", "missing"]
    assert rows[2][-3:] == ["dp_shard=2", "best", "every_steps"]
    assert rows[3][-2:] == ["dp_shard=2", "every_steps"]
    assert rows[4][-3:] == ["it", "was", "bad"]


def test_ls_json(run, prints):
    listed = json.loads(prints(["ckpt", "ls", str(run.path), "--json"]).out)
    folder = run.checkpoint_dir(20)
    assert listed[1].pop("time").endswith("Z")
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    assert listed[1] == {
        **{
            "name": "step-00000020",
            "path": str(folder),
            "state": "published",
            "step": 20,
            "bytes": num_bytes,
        },
        **{"layout": {"dp_shard": 2, "tp": 1}, "world_size": 2, "best": True, "reason": "every_steps"},
        **{"best_metric": None, "best_value": None, "pinned_by": []},
    }


def test_ls_of_nothing(run, prints):
    run.checkpoints_dir.rename(run.path / "elsewhere")
    shown = prints(["ckpt", "ls", str(run.path)])
    assert shown.out == ""
    said(shown.err)
    assert prints(["ckpt", "ls", str(run.path), "--json"]).out == "[]\n"


def test_verify(run, capsys, prints):
    assert prints(["ckpt", "verify", str(run.path), "--step", "30"]).out == "step-00000030  intact\n"
    flip(shard(published(run.checkpoints_dir)[2]))
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    said(prints(["ckpt", "verify", str(run.path)], code=1).out)
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before
    shard(published(run.checkpoints_dir)[3]).unlink()
    assert main(["ckpt", "verify", str(run.path), "--step", "40", "--json"]) == 1
    damage = {"step": 40, "path": str(run.checkpoint_dir(40)), "damage": "__1_0.distcp is missing"}
    assert json.loads(capsys.readouterr().out) == [damage]


def test_prune_keeps_the_newest_and_the_best(run, prints):
    shown = prints(["ckpt", "prune", str(run.path), "--keep-last", "1"])
    assert shown.out.splitlines() == [f"removed {run.checkpoint_dir(step)}" for step in (10, 30)]
    assert shown.err == "kept: step-00000020, step-00000040\n"
    assert steps(run) == [20, 40]
    assert names(run.checkpoints_dir) == ["best", "step-00000020", "step-00000040"]


def test_prune_keeps_the_newest_that_is_intact(run):
    flip(shard(published(run.checkpoints_dir)[3]))
    assert main(["ckpt", "prune", str(run.path), "--keep-last", "1"]) == 0
    assert steps(run) == [20, 30, 40]
    assert main(["ckpt", "prune", str(run.path)]) == 2  # it needs to know how many
    assert main(["ckpt", "prune", str(run.path), "--keep-last", "0"]) == 2
    assert steps(run) == [20, 30, 40]


def test_prune_keeps_the_checkpoint_to_which_a_run_goes_back(run, prints):
    """The next attempt moves the later checkpoints aside, so they are neither counted nor deleted."""
    write_rollbacks(run, [Rollback(10, 40, 1)])
    assert prints(["ckpt", "prune", str(run.path), "--keep-last", "1"]).err == "kept: step-00000010\n"
    assert steps(run) == [10, 20, 30, 40]


def test_prune_by_a_rule(run, prints):
    main(["ckpt", "pin", str(run.path), "--step", "30"])
    shown = prints(["ckpt", "prune", str(run.path), "--keep", "last=1,at=7", "--dry-run"])
    assert shown.out.splitlines() == [f"would remove {run.checkpoint_dir(10)}"]
    assert prints(["ckpt", "prune", str(run.path), "--keep", "last=1,at=10"]).out == ""
    left = run.checkpoints_dir / "step-00000005.deleted-7.partial"
    left.mkdir()  # as after kill -9 in the middle of an earlier prune
    prints(["ckpt", "prune", str(run.path), "--keep", "last=1,every=15"])
    assert steps(run) == [20, 30, 40]
    assert not left.exists()
    for options in ([], ["--keep-last", "1", "--keep", "last=2"], ["--keep", "first=1"]):
        said(prints(["ckpt", "prune", str(run.path), *options], code=2).err)


def test_pins(run, prints):
    name = str(run.path)
    said(prints(["ckpt", "pin", name, "--step", "10"]).out)
    said(prints(["ckpt", "pin", name, "--step", "10", "--by", "the paper"]).out)
    value = json.loads(prints(["ckpt", "pin", name, "--step", "30", "--json"]).out)
    assert value == {"path": str(run.checkpoint_dir(30)), "by": "user", "pinned_by": ["user"]}
    listed = json.loads(prints(["ckpt", "ls", name, "--json"]).out)
    assert [item["pinned_by"] for item in listed] == [["the paper", "user"], [], ["user"], []]
    rows = prints(["ckpt", "ls", name]).out.splitlines()
    assert "  PINNED BY " in rows[0]
    assert "  the paper, user " in rows[1]
    assert prints(["ckpt", "prune", name, "--keep-last", "1"]).out == ""
    said(prints(["ckpt", "unpin", name, "--step", "10"]).out)
    for options in (["--step", "10"], ["--step", "20"], ["--step", "99"]):
        said(prints(["ckpt", "unpin", name, *options], code=2).err)
    prints(["ckpt", "unpin", name, "--step", "30"])
    assert prints(["ckpt", "prune", name, "--keep-last", "1"]).out == f"removed {run.checkpoint_dir(30)}\n"
    assert steps(run) == [10, 20, 40]


def test_dry_run_removes_nothing(run, capsys):
    assert main(["ckpt", "prune", str(run.path), "--keep-last", "2", "--dry-run"]) == 0
    assert capsys.readouterr().out == f"would remove {run.checkpoint_dir(10)}\n"
    assert main(["ckpt", "prune", str(run.path), "--keep-last", "2", "--dry-run", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    removed, *kept = (str(run.checkpoint_dir(step)) for step in (10, 20, 30, 40))
    assert value == {"run_dir": str(run.path), "removed": [removed], "kept": kept, "dry_run": True}
    assert steps(run) == [10, 20, 30, 40]


def test_prune_of_a_live_run_is_refused(run, capsys, prints):
    entry = add_attempt(run, 1, os.getpid(), "submit")
    assert main(["ckpt", "prune", str(run.path), "--keep-last", "1"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {run.path} is running as {entry.job_id}\n")
    job = read_json(run.job_file)
    job["attempts"][0] |= {"host": f"not-{socket.gethostname()}", "boot_id": "another"}
    write_json(run.job_file, job)
    said(prints(["ckpt", "prune", str(run.path), "--keep-last", "1"], code=2).err)
    assert steps(run) == [10, 20, 30, 40]
