"""Tests the run's copy of the code, and when it is replaced."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.folders import git, names
from tests.support.said import said
from trainkit.cluster.machine import Machine
from trainkit.cluster.model import Cluster
from trainkit.cluster.target import Target
from trainkit.config import load_config
from trainkit.errors import UsageError
from trainkit.launch.repeat import submission_folder
from trainkit.launch.snapshot import copy_code, renewed_code
from trainkit.plan.facts import Facts
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.make_plan import make_plan
from trainkit.plan.workload import Workload
from trainkit.run.files import to_json, write_json
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir


@pytest.fixture
def loaded(project: Path):  # type: ignore[no-untyped-def]
    return load_config(
        None, overrides=["device=cpu", "train.global_batch_size=null"], environ={}, cwd=project
    )


@pytest.fixture
def plan(loaded) -> LaunchPlan:  # type: ignore[no-untyped-def]
    target = Target("sbatch", "a test", Cluster("unknown"))
    return make_plan(
        loaded, Facts(Machine(4, 0, (), "a login node"), target), Workload(("python", "train.py"))
    )


@pytest.fixture
def submitted(run: RunDir, project: Path, loaded, plan: LaunchPlan) -> RunDir:  # type: ignore[no-untyped-def]
    """Return a run with a copy of its project, which has changed since."""
    (project / "train.py").write_text("old\n")
    code = copy_code(project, run, plan.workload)
    write_json(run.job_file, {"cwd": str(project), "code": to_json(code), "attempts": []})
    run.attempt(1).create()
    (project / "train.py").write_text("new\n")
    return run


def test_a_refusal_leaves_the_code_as_it_was(submitted, loaded, plan):
    before = read_job(submitted)

    def refuse() -> None:
        with renewed_code(submitted, read_job(submitted), loaded.config, plan):
            assert (submitted.code_dir / "train.py").read_text() == "new\n"
            raise UsageError("sbatch: invalid partition specified: typo")

    with pytest.raises(UsageError):
        refuse()
    assert (submitted.code_dir / "train.py").read_text() == "old\n"
    assert read_job(submitted) == before
    assert [path.name for path in submitted.path.glob("code*")] == ["code"]


def test_code_that_cannot_be_recorded_does_not_stay(submitted, loaded, plan, monkeypatch):
    def stale(path: Path) -> object:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr("trainkit.run.record.read_json", stale)
    with (
        pytest.raises(OSError, match="Stale"),
        renewed_code(submitted, read_job(submitted), loaded.config, plan),
    ):
        pass
    assert (submitted.code_dir / "train.py").read_text() == "old\n"


def test_the_copy_before_stays(submitted, loaded, plan):
    with renewed_code(submitted, read_job(submitted), loaded.config, plan):
        submitted.attempt(2).create()
    assert (submitted.code_dir / "train.py").read_text() == "new\n"
    assert (submitted.path / "code.001/train.py").read_text() == "old\n"


def test_an_attempt_that_may_have_been_submitted_keeps_its_code(submitted, loaded, plan):
    def interrupt() -> None:
        with renewed_code(submitted, read_job(submitted), loaded.config, plan):
            submitted.attempt(2).create()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert (submitted.code_dir / "train.py").read_text() == "new\n"


def test_a_run_is_judgedsubmission_folder(submitted, project, tmp_path):
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


def test_a_script_that_is_named_past_the_copy(run, project, loaded, plan):
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
