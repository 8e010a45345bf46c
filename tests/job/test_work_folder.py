"""Tests the working folder of a command."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.folders import content, git, names, write
from trainkit.job.work_folder import prepare_work_folder
from trainkit.launch.snapshot import copy_code
from trainkit.plan.workload import Workload
from trainkit.run.files import write_json
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    write(folder, "train.py", "pkg/same.py", "pkg/gone.py", "log.json")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "run").mkdir()
    return RunDir(tmp_path / "run")


def submit(project: Path, run: RunDir, subfolder: str = "") -> None:
    copied = copy_code(project / subfolder, run, Workload(("true",)))
    code = {"code": copied.code, "subfolder": copied.subfolder}
    write_json(run.job_file, {"cwd": "/", "code": code, "attempts": []})


def test_outputs_stay_and_code_is_only_replaced_by_new_code(project, run):
    submit(project, run)
    work = prepare_work_folder(run, read_job(run))
    assert work == run.work_dir
    first = content(run.code_dir)
    assert content(work) == first
    write(work, "out/ckpt.pt")
    with (work / "log.json").open("a") as log:  # the copy is writable, and the snapshot does not change
        log.write(", and a line of the run")
    assert prepare_work_folder(run, read_job(run)) == work
    assert content(work)["log.json"] == "log.json, and a line of the run"
    assert content(run.code_dir) == first

    run.code_dir.rename(run.path / "code.001")
    for name in ("train.py", "log.json", "new.py"):
        (project / name).write_text("second\n")
    (project / "pkg" / "gone.py").unlink()
    submit(project, run)
    for _ in range(2):  # the second start has nothing to do
        assert prepare_work_folder(run, read_job(run)) == work
        assert content(work) == {
            **{"train.py": "second\n", "new.py": "second\n", "log.json": "second\n"},
            "log.json.before-code.001": "log.json, and a line of the run",
            **{"pkg/same.py": "pkg/same.py", "out/ckpt.pt": "out/ckpt.pt"},
        }


def test_the_points_of_a_sweep_share_no_outputs(project, tmp_path):
    group = RunDir(tmp_path / "group")
    group.path.mkdir()
    submit(project, group, "pkg")
    for index in range(2):
        trial = RunDir(group.path / str(index))
        trial.path.mkdir()
        trial.code_dir.symlink_to("../code")
        trial.job_file.write_bytes(group.job_file.read_bytes())
        work = prepare_work_folder(trial, read_job(trial))
        assert work.is_relative_to(trial.path)
        assert not (work / "ckpt.pt").exists()
        (work / "ckpt.pt").write_text(str(index))


def test_an_interrupted_copy_is_made_again(project, run, monkeypatch):
    submit(project, run)
    fail = Mock(side_effect=OSError(28, "No space left on device"))
    with monkeypatch.context() as patch:
        patch.setattr("trainkit.job.work_folder._copy_file", fail)
        with pytest.raises(OSError, match="No space"):
            prepare_work_folder(run, read_job(run))
    assert names(run.path) == ["code", "job.json"]
    assert prepare_work_folder(run, read_job(run)) == run.work_dir
    assert content(run.work_dir) == content(run.code_dir)


def test_a_lost_record_does_not_lose_the_outputs(project, run):
    write(project, "exp/run.py")
    git(project, "init")
    git(project, "add", "-A")
    submit(project, run, "exp")
    assert prepare_work_folder(run, read_job(run)) == run.work_dir / "exp"
    run.job_file.write_text("")
    assert prepare_work_folder(run, read_job(run)) == run.work_dir / "exp"


def test_without_a_snapshot_there_is_none(run):
    write_json(run.job_file, {"cwd": "/", "code": None, "attempts": []})
    assert prepare_work_folder(run, read_job(run)) is None
