"""Tests the working folder of a command."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.folders import content
from tests.support.programs import run_program
from tests.support.said import said
from trainkit.job.work_folder import prepare_work_folder
from trainkit.launch.snapshot import copy_code
from trainkit.plan.workload import Workload
from trainkit.run.files import read_json, write_json
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "pkg").mkdir(parents=True)
    for name in ("train.py", "pkg/same.py", "pkg/gone.py", "log.csv"):
        (folder / name).write_text(f"{name}, first\n")
    (folder / "log.csv").rename(folder / "log.json")  # the pattern copies this file
    return folder


def submit(project: Path, run: RunDir, subfolder: str = "") -> None:
    snapshot = copy_code(project / subfolder, run, Workload(("true",)))
    write_json(
        run.job_file,
        {"cwd": "/", "code": {"code": snapshot.code, "subfolder": snapshot.subfolder}, "attempts": []},
    )


def test_outputs_stay_and_code_is_only_replaced_by_new_code(project: Path, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    submit(project, run)
    work = prepare_work_folder(run, read_job(run))
    assert work == run.work_dir
    first = content(run.code_dir)
    assert content(work) == first
    (work / "out").mkdir()
    (work / "out" / "ckpt.pt").write_text("weights")
    with (work / "log.json").open("a") as log:  # the copy is writable, and the snapshot does not change
        log.write("a line of the run\n")
    assert prepare_work_folder(run, read_job(run)) == work
    said(content(work)["log.json"])
    assert content(run.code_dir) == first

    run.code_dir.rename(run.path / "code.001")
    (project / "train.py").write_text("second\n")
    (project / "log.json").write_text("second\n")
    (project / "new.py").write_text("second\n")
    (project / "pkg" / "gone.py").unlink()
    submit(project, run)
    for _ in range(2):  # the second start has nothing to do
        assert prepare_work_folder(run, read_job(run)) == work
        assert content(work) == {
            "train.py": "second\n",
            "new.py": "second\n",
            "log.json": "second\n",
            "log.json.before-code.001": "log.csv, first\na line of the run\n",
            "pkg/same.py": "pkg/same.py, first\n",
            "out/ckpt.pt": "weights",
        }


def test_the_points_of_a_sweep_share_no_outputs(project: Path, tmp_path: Path) -> None:
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


def test_an_interrupted_copy_is_made_again(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    submit(project, run)

    fail = Mock(side_effect=OSError(28, "No space left on device"))
    with monkeypatch.context() as patch:
        patch.setattr("trainkit.job.work_folder._copy_file", fail)
        with pytest.raises(OSError, match="No space"):
            prepare_work_folder(run, read_job(run))
    assert sorted(path.name for path in run.path.iterdir()) == ["code", "job.json"]
    assert prepare_work_folder(run, read_job(run)) == run.work_dir
    assert content(run.work_dir) == content(run.code_dir)


def test_a_lost_record_does_not_lose_the_outputs(project: Path, tmp_path: Path) -> None:
    (project / "exp").mkdir()
    (project / "exp" / "run.py").touch()
    for name in ("init", "add -A"):
        subprocess.run(["git", *name.split()], cwd=project, check=True, capture_output=True)
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    submit(project, run, "exp")
    assert prepare_work_folder(run, read_job(run)) == run.work_dir / "exp"
    run.job_file.write_text("")
    assert prepare_work_folder(run, read_job(run)) == run.work_dir / "exp"


def test_without_a_snapshot_there_is_none(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    write_json(run.job_file, {"cwd": "/", "code": None, "attempts": []})
    assert prepare_work_folder(run, read_job(run)) is None


def test_a_local_command_writes_into_its_run(project: Path, tmp_path: Path) -> None:
    (project / "train.py").write_text(
        "import os, pathlib; pathlib.Path('out').mkdir(); pathlib.Path('out/w').write_text(os.environ['PWD'])"
    )
    argv = [
        *("trainkit", "submit", "--backend", "local", "--follow", "--run-dir", str(tmp_path / "run")),
        *("--set", "device=cpu", "--", "python", "train.py"),
    ]
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    done = run_program(sys.executable, "-m", *argv, cwd=project, env=environ)
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "run")
    assert (run.work_dir / "out" / "w").read_text() == str(run.work_dir)
    assert not (project / "out").exists()
    assert "relative output paths lead there" in done.stderr
    assert read_json(run.job_file)["cwd"] == str(project)
