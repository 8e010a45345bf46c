"""Tests the run folder of a trial, which is created late, once, and as completely as any."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.folders import names, write
from tests.support.groups import SUBMITTED_AT, make_group, planned
from tests.support.said import said
from trainkit.backends.slurm.claim_attempt import claim_attempt
from trainkit.config import read_effective
from trainkit.errors import UsageError
from trainkit.plan.launch import LaunchPlan
from trainkit.run.files import read_json, read_jsonl, to_json, write_json
from trainkit.run.group import RunGroup, create_task_run
from trainkit.run.record import read_job
from trainkit.run.rundir import AttemptDir, RunDir

POINTS = {
    0: {"optimizer.lr": 0.1, "train.device_batch_size": 1},
    1: {"optimizer.lr": 0.2, "train.device_batch_size": 4},
    7: {"optimizer.lr": 0.2, "launch.env": {"A": "x y"}},
}


@pytest.mark.parametrize("index", POINTS)
def test_a_point_has_the_config_and_plan_that_were_checked(tmp_path, index):
    checked = {trial.index: trial for trial in planned(tmp_path, POINTS)}
    group = make_group(tmp_path, POINTS)
    run = group.run(index)
    create_task_run(run)
    attempt = run.attempt(1)
    for file in (run.config_file, attempt.config_file):
        assert read_effective(file) == checked[index].config
    for file in (run.plan_file, attempt.plan_file):
        assert LaunchPlan.from_dict(read_json(file)) == checked[index].plan
        assert file.read_text() == checked[index].plan.to_text()


def test_a_point_is_a_complete_run(tmp_path):
    group = make_group(tmp_path, POINTS)
    write(group.code_dir, "train.py")
    run = group.run(7)
    create_task_run(run)
    assert run.exists()
    job = read_job(run)
    assert (job.name, job.backend, job.cwd) == ("small/7", "sbatch", str(Path.cwd()))
    entry = {"attempt": 1, "job_id": "12_7", "submitted_at": SUBMITTED_AT, "backend": "sbatch"}
    entry |= {"reason": "submit", "folder": str(run.path), "inode": run.path.stat().st_ino}
    assert to_json(job.attempts) == [entry]
    assert run.script_file.read_bytes() == group.script_file.read_bytes()
    assert run.provenance_file.read_bytes() == group.provenance_file.read_bytes()
    assert (run.code_dir / "train.py").read_text() == "train.py"
    assert [event["event"] for event in read_jsonl(run.events_file)] == ["submitted"]
    assert run.checkpoints_dir.is_dir()
    assert (run.path.stat().st_mode & 0o777) == 0o700


@pytest.mark.parametrize("trials", [[{}], [{"index": "0"}], [3], "0", None])
def test_a_group_whose_points_are_damaged(tmp_path, trials):
    group = make_group(tmp_path, POINTS)
    write_json(group.sweep_file, {**read_json(group.sweep_file), "points": trials})
    with pytest.raises(UsageError, match=r"sweep\.json was not written by trainkit"):
        _ = RunGroup(group.path).trials


def test_what_slurm_logs_is_the_log_of_the_supervisor(tmp_path):
    group = make_group(tmp_path, POINTS)
    group.log_file(1).write_text("module: not found\n")
    create_task_run(group.run(1))
    log = group.run(1).attempt(1).supervisor_log
    with log.open("a") as stream:
        stream.write("and more\n")
    said(group.log_file(1).read_text())
    moved = RunGroup(group.path.rename(tmp_path / "elsewhere"))
    said(moved.run(1).attempt(1).supervisor_log.read_text())


def test_the_task_names_its_own_job(tmp_path):
    # A task can start before the submitting command has recorded the job id, or has received it.
    group = make_group(tmp_path, POINTS, job_id=None)
    with pytest.raises(UsageError, match=r"it is unknown whether .* was submitted"):
        create_task_run(group.run(0))
    assert not group.run(0).path.exists()
    create_task_run(group.run(0), "34_0")
    entry = read_job(group.run(0)).newest
    assert entry.job_id == "34_0"
    attempt = claim_attempt(group.run(0), "34_0")
    assert isinstance(attempt, AttemptDir)
    assert attempt.number == 1


def test_a_task_of_a_cancelled_group_does_not_begin(tmp_path):
    group = make_group(tmp_path, POINTS, cancelled_at=SUBMITTED_AT)
    create_task_run(group.run(0), "12_0")
    said(claim_attempt(group.run(0), "12_0").reason)


def test_a_point_is_made_once_whoever_comes(tmp_path):
    group = make_group(tmp_path, POINTS)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(create_task_run, [group.run(0)] * 8))
    assert len(read_job(group.run(0)).attempts) == 1
    assert [path.name for path in group.path.iterdir() if path.name.startswith(".")] == [".lock"]


def test_runs_that_are_no_points_are_left_alone(tmp_path):
    group = make_group(tmp_path, POINTS)
    for path in (tmp_path / "other", tmp_path / "5", group.path / "logs", group.path / "07"):
        create_task_run(RunDir(path))
        assert not (path / "attempts").exists()
    with pytest.raises(UsageError, match="has no trial 3") as caught:
        create_task_run(group.run(3))
    said(caught.value.hint)


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    group = make_group(tmp_path, POINTS)
    monkeypatch.setattr("trainkit.run.group.create_job", Mock(side_effect=OSError(28, os.strerror(28))))
    with pytest.raises(UsageError, match=r"cannot create the run folder .*: No space left on device"):
        create_task_run(group.run(0))
    assert names(group.path) == [".lock", "logs", "provenance.json", "submit.sbatch", "sweep.json"]
