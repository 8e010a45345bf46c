"""Tests that a job runs the submitted code, even if its folder is replaced while it waits."""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_job import step

from tests.backends.slurm.test_allocation_hosts import plan as planned
from tests.support.groups import make_group
from tests.support.said import said
from trainkit.backends.local.allocation import LocalAllocation
from trainkit.errors import EXIT_NO_RESTART
from trainkit.job.attempt import Attempt
from trainkit.job.supervisor import Supervisor, supervise_job
from trainkit.plan.launch import LaunchPlan, resized
from trainkit.run.files import read_json
from trainkit.run.group import RunGroup, create_trial_run
from trainkit.run.record import add_slurm_attempt
from trainkit.run.rundir import RunDir
from trainkit.run.submitted import (
    SUBMITTED_VARIABLE,
    NotSubmitted,
    read_submitted,
    require_submitted_group,
    submitted_group_hash,
    submitted_hash,
)


def test_the_plan_of_each_number_of_nodes_is_the_one_that_was_submitted():
    made = planned("resources.nodes=1-4", "train.global_batch_size=16", "train.device_batch_size=4").to_dict()
    made["of_a_newer_version"] = True
    submitted = submitted_hash("config", made)
    assert len(made["sizes"]) > 1
    for size in made["sizes"]:
        fitted = json.loads(json.dumps(resized(made, int(size))))
        assert (fitted["num_nodes"], submitted_hash("config", fitted)) == (int(size), submitted)
        back = resized(fitted, made["num_nodes"])
        assert submitted_hash("config", back) == submitted
        assert LaunchPlan.from_dict(back) == LaunchPlan.from_dict(made)
    for change in ({"threads_per_worker": 7}, {"command": ["x"]}, {"sizes": {}}, {"env": {"A": "b"}}):
        assert submitted_hash("config", {**made, **change}) != submitted
    filling = {**made, "fills_nodes": True}
    assert submitted_hash("c", filling) == submitted_hash("c", {**filling, "threads_per_worker": 7})


def submitted(run: RunDir) -> str:
    attempt = run.attempt(1)
    return submitted_hash(attempt.config_file.read_text(), read_json(attempt.plan_file))


def written(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


CHANGES = {
    "damage_plan": lambda run: written(run.attempt(1).plan_file, "[]"),
    "change_run": lambda run: written(run.config_file, "seed: 1\n"),
    "change_launcher_file": lambda run: written(run.attempt(1).path / "accelerate.yaml", "main: planted\n"),
}


def test_a_job_runs_what_it_was_submitted_with(run, slurm, monkeypatch):
    monkeypatch.setenv(SUBMITTED_VARIABLE, submitted(run))
    code = "import os; raise SystemExit(5 if os.environ['TRAINKIT_JOB_ATTEMPT'] == '1' else 0)"
    assert step(run, code)[1]["state"] == "finished", "the restart too"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_runs_of_a_folder_that_was_changed(run, slurm, monkeypatch, capfd, change):
    plan = {**read_json(run.attempt(1).plan_file), "launcher_files": {"accelerate.yaml": "a: b\n"}}
    for folder in (run, run.attempt(1)):
        folder.plan_file.write_text(json.dumps(plan))
        (folder.path / "accelerate.yaml").write_text("a: b\n")
    shutil.copy(run.attempt(1).config_file, run.config_file)
    monkeypatch.setenv(SUBMITTED_VARIABLE, submitted(run))
    file = CHANGES[change](run)
    code, end = step(run, "open('executed', 'w')")
    assert (code, end["state"], end["action"]) == (EXIT_NO_RESTART, "failed", "failed")
    assert end["reason"].startswith(str(file))
    out = capfd.readouterr().out
    assert f"error: {end['reason']}\n\nhint: " in out
    said(out)
    assert (slurm.requeued, Path("executed").exists(), run.attempt_numbers()) == (0, False, [1])


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_of_files_of_somebody_else_nothing_runs(run, slurm, capfd):
    add_slurm_attempt(run, 1, "7", "submit", "sbatch")
    for file in (run.job_file, run.attempt(1).plan_file):
        os.chown(file, 65534, 65534)
        assert supervise_job(run, [sys.executable, "-c", "open('executed', 'w')"]) == EXIT_NO_RESTART
        said(capfd.readouterr().out)
    assert read_json(run.attempt(1).end_file)["state"] == "failed"
    assert not Path("executed").exists()


def test_of_a_folder_that_changed_while_the_run_waited_for_its_turn_nothing_runs(run, monkeypatch):
    monkeypatch.setenv(SUBMITTED_VARIABLE, submitted(run))
    file = run.attempt(1).plan_file
    plan = json.dumps({**read_json(file), "command": ["planted"]})
    monkeypatch.setattr(LocalAllocation, "wait_for_turn", lambda *_: written(file, plan) and None)
    attempt = Attempt(run.attempt(1))
    decision = Supervisor(LocalAllocation(run, 1))._run_attempt(attempt)
    assert (decision.action, decision.exit_code, attempt.outcome.exits) == ("failed", EXIT_NO_RESTART, ())
    said(decision.reason)


def test_a_task_of_an_array_runs_what_its_group_was_submitted_with(tmp_path, monkeypatch):
    group = make_group(tmp_path, {0: {}, 1: {"seed": 5}})
    record = group.record
    named = submitted_group_hash(record.config, record.plan, group.trials.values())
    monkeypatch.setenv(SUBMITTED_VARIABLE, named)
    group.update(job_id="12", cancelled_at=None)  # these keys change while the array waits
    require_submitted_group(RunGroup(group.path))
    create_trial_run(group, group.trial(1))
    assert read_submitted(group.run(1))["num_nodes"] == record.plan["num_nodes"]
    plan_file = group.run(1).plan_file
    plan_file.write_text(json.dumps({**read_json(plan_file), "command": ["planted"]}))
    with pytest.raises(NotSubmitted, match=r"1/plan.json differs from the file"):
        read_submitted(group.run(1))
    trial = replace(group.trial(1), plan={"command": ["planted"]})
    content = read_json(group.sweep_file)
    content["points"][1] |= {"plan": trial.plan}
    group.sweep_file.write_text(json.dumps(content))
    with pytest.raises(NotSubmitted, match=r"sweep.json differs from the file"):
        require_submitted_group(RunGroup(group.path))
    # A trial that was resumed alone has a separate script.
    own = group.run(1)
    monkeypatch.setenv(SUBMITTED_VARIABLE, submitted_hash(own.config_file.read_text(), read_json(plan_file)))
    read_submitted(own)
