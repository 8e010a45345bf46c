"""Tests the run's copy of the code, and when it is replaced."""

import errno
import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.folders import git, names
from tests.support.runs import launch_plan
from tests.support.said import said
from trainkit.config import load_config
from trainkit.errors import UsageError
from trainkit.launch.repeat import submission_folder
from trainkit.launch.snapshot import copy_code, renewed_code
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.workload import Workload
from trainkit.run.files import to_json, write_json
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir


@pytest.fixture
def loaded(project: Path):  # type: ignore[no-untyped-def]
    overrides = ["device=cpu", "train.global_batch_size=null"]
    return load_config(None, overrides=overrides, environ={}, cwd=project)


@pytest.fixture
def plan() -> LaunchPlan:
    return launch_plan(workload=Workload(("python", "train.py")))


@pytest.fixture
def submitted(run: RunDir, project: Path, plan: LaunchPlan) -> RunDir:
    """Return a run with a copy of its project, which has changed since."""
    (project / "train.py").write_text("old\n")
    code = copy_code(project, run, plan.workload)
    write_json(run.job_file, {"cwd": str(project), "code": to_json(code), "attempts": []})
    run.attempt(1).create()
    (project / "train.py").write_text("new\n")
    return run


def test_a_refusal_leaves_the_code_as_it_was(submitted, loaded, plan):
    before = read_job(submitted)
    with pytest.raises(UsageError), renewed_code(submitted, before, loaded.config, plan):  # noqa: PT012
        assert (submitted.code_dir / "train.py").read_text() == "new\n"
        raise UsageError("sbatch: invalid partition specified: typo")
    assert (submitted.code_dir / "train.py").read_text() == "old\n"
    assert read_job(submitted) == before
    assert [path.name for path in submitted.path.glob("code*")] == ["code"]


def test_code_that_cannot_be_recorded_does_not_stay(submitted, loaded, plan, monkeypatch):
    job, stale = read_job(submitted), OSError(errno.ESTALE, "Stale file handle")
    monkeypatch.setattr("trainkit.run.record.read_json", Mock(side_effect=stale))
    with pytest.raises(OSError, match="Stale"), renewed_code(submitted, job, loaded.config, plan):
        pass
    assert (submitted.code_dir / "train.py").read_text() == "old\n"


@pytest.mark.parametrize("end", [None, KeyboardInterrupt], ids=str)
def test_an_attempt_that_may_have_been_submitted_keeps_its_code(submitted, loaded, plan, end):
    expected = pytest.raises(end) if end else nullcontext()
    with expected, renewed_code(submitted, read_job(submitted), loaded.config, plan):
        submitted.attempt(2).create()
        if end:
            raise end
    assert (submitted.code_dir / "train.py").read_text() == "new\n"
    assert (submitted.path / "code.001/train.py").read_text() == "old\n"


def test_a_run_is_judged_in_its_submission_folder(submitted, project, tmp_path):
    here = Path.cwd()
    with submission_folder(read_job(submitted), takes_new_code=False) as code_dir:
        assert (Path.cwd(), code_dir) == (project, submitted.code_dir)
    with submission_folder(read_job(submitted), takes_new_code=True) as code_dir:
        assert code_dir == project
    assert Path.cwd() == here
    project.rename(tmp_path / "moved")
    with submission_folder(read_job(submitted), takes_new_code=True) as code_dir:
        assert (Path.cwd(), code_dir) == (here, here)
    assert Path.cwd() == here


def test_a_script_that_is_named_past_the_copy(run, project, plan):
    (project / "train.py").write_text("old\n")
    past = replace(plan, workload=Workload(("python", f"{project}/train.py", "--data", str(project.parent))))
    code = copy_code(project, run, past.workload)
    said("\n".join(code.notes))


def test_names_of_all_kinds_reach_provenance(project, run, plan):
    git(project, "init")
    for name in (b"two\nlines.py", b"\xff.py", "ü.py".encode(), b" lead\"'$(x).py", b"\xfe.pem"):
        with open(os.fsencode(project) + b"/" + name, "w"):
            pass
    write_json(run.provenance_file, to_json(copy_code(project, run, plan.workload)))
    assert names(run.code_dir) == [" lead\"'$(x).py", ".git", "two\nlines.py", "ü.py", "\udcff.py"]
    read = json.loads(run.provenance_file.read_text())
    assert read["left_out"] == [{"path": "\\xfe.pem", "reason": "looks like a secret"}]
    assert read["workdir"] == read["code"] == str(run.code_dir)
    assert (read["num_files"], read["kind"]) == (4, "git")
