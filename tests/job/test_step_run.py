"""Tests how the tasks of an interactive step get their plan, and how the end of the step is judged."""

import threading
from dataclasses import asdict, replace

import pytest

from tests.support.runs import launch_plan
from trainkit.backends.launcher import LaunchedRank
from trainkit.backends.slurm.step import SlurmTask
from trainkit.errors import TrainkitError
from trainkit.job import step_run
from trainkit.job.failure.records import record_silent_death
from trainkit.job.hangs import HangRecord
from trainkit.job.step_run import announce, announcement_file, await_announcement, run_first_task, withdraw
from trainkit.locks import file_lock
from trainkit.plan.launch import Batch, Layout
from trainkit.run.files import read_json, write_json
from trainkit.run.rundir import AttemptDir, RunDir

TASK = SlurmTask("7", "0", 0, 1, 0, 1, (2,), ("host0",), "4000")


def test_the_others_wait_for_what_the_first_announces(tmp_path):
    value = RunDir(tmp_path / "mine").attempt(3)
    threading.Timer(0.2, announce, (tmp_path / "runs", TASK, value)).start()
    found = await_announcement(tmp_path / "runs", TASK, timeout_s=10.0)
    assert isinstance(found, AttemptDir)
    assert (found.run.path, found.number) == (tmp_path / "mine", 3)
    withdraw(tmp_path / "runs", TASK)
    assert not announcement_file(tmp_path / "runs", TASK).exists()
    announce(tmp_path, TASK, 2)  # the exit code of a start that failed
    assert await_announcement(tmp_path, TASK) == 2


def test_a_folder_of_runs_that_cannot_be_used_is_said(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(TrainkitError, match=r"cannot wait for task 0 of step 7.* at .*/runs: Not"):
        await_announcement(tmp_path / "runs", TASK, timeout_s=0.2)


def test_what_another_step_announced_does_not_count(tmp_path):
    announce(tmp_path, replace(TASK, launcher_port="4001"), 0)
    with pytest.raises(TrainkitError, match=r"task 0 of step 7\.0 has not announced its run within 0\.2 s"):
        await_announcement(tmp_path, TASK, timeout_s=0.2)


def test_what_another_launcher_announces_counts_while_rank_0_is_there(tmp_path):
    run, rank = RunDir(tmp_path / "small"), LaunchedRank("torchrun", 1, 1, (2, 2), "host/0", 29500)
    run.path.mkdir()
    announce(tmp_path, rank, run.attempt(2))
    with pytest.raises(TrainkitError, match="rank 0 of torchrun at host/0:29500 has not announced its run"):
        await_announcement(tmp_path, rank, timeout_s=0.2)
    with file_lock(run.supervisor_lock_file):
        found = await_announcement(tmp_path, rank)
    assert isinstance(found, AttemptDir)
    assert found.path == run.attempt(2).path


def test_the_end_of_a_hang_is_blamed_on_who_held_the_others_up(tmp_path, monkeypatch):
    """No supervisor watches a step: its agents end the step, and ranks fail because they lost their peers."""
    attempt = RunDir(tmp_path).attempt(1)
    attempt.create()
    plan = launch_plan(backend="srun", num_nodes=1, layout=Layout(dp_shard=2), batch=Batch(1, 1, 2, 2))
    write_json(attempt.plan_file, plan.to_dict())

    def run_task(attempt: AttemptDir, task: SlurmTask) -> int:
        attempt.hangs_dir.mkdir()
        hang = HangRecord(0, 0, "host1", 41, "backward", 2, 312.0, 300.0, 0.8, "2026-01-01T00:00:00.000Z", ())
        write_json(attempt.rank_hang(0), asdict(hang))
        record_silent_death(attempt, 0, 0, 1)
        return 1

    monkeypatch.setattr(step_run, "run_task", run_task)
    monkeypatch.setattr(step_run.processes, "block_signals", lambda *more: None)
    decision = run_first_task(attempt, plan, TASK, lambda attempt, ended: None)
    assert (decision.action, decision.cause) == ("failed", "hang")
    verdict = read_json(attempt.end_file)["verdict"]
    assert (verdict["type"], verdict["rank"], verdict["step"]) == ("Hang", 1, 41)
