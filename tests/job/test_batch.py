"""Which attempt a start of a Slurm job is, and what its supervisor makes of the step's end."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import make_attempt
from trainkit.errors import EXIT_STOPPED
from trainkit.job import batch
from trainkit.job.batch import supervise, take_attempt
from trainkit.job.record import COMEBACK, add_slurm_entry, mark_cancelled, read_job
from trainkit.job.step_watch import StepWatch
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import RunDir, log_event, read_json, read_jsonl, write_json
from trainkit.slurm.client import SlurmRefused


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(batch, "ENTRY_TIMEOUT_S", 0.2)
    return make_attempt(tmp_path / "run").run


def reasons(run: RunDir) -> list[tuple[int, str, str]]:
    return [(entry["attempt"], entry["job_id"], entry["reason"]) for entry in read_job(run)["attempts"]]


def test_the_first_start_takes_the_attempt_that_was_submitted(run: RunDir) -> None:
    add_slurm_entry(run, 1, "7", "submit", "sbatch")
    attempt = take_attempt(run, "7")
    assert attempt is not None
    assert attempt.number == 1
    [entry] = read_job(run)["attempts"]
    assert entry["pid"] == os.getpid()


def test_a_job_that_came_back_opens_the_next_one_with_the_same_plan(run: RunDir) -> None:
    add_slurm_entry(run, 1, "7", "submit", "sbatch")
    take_attempt(run, "7")
    attempt = take_attempt(run, "7")
    assert attempt is not None
    assert reasons(run) == [(1, "7", "submit"), (2, "7", COMEBACK)]
    assert attempt.plan_file.read_bytes() == run.attempt(1).plan_file.read_bytes()
    assert attempt.config_file.read_bytes() == run.attempt(1).config_file.read_bytes()


def test_a_job_whose_submission_was_interrupted_still_knows_its_attempt(run: RunDir) -> None:
    attempt = take_attempt(run, "7")
    assert attempt is not None
    assert reasons(run) == [(1, "7", "submit")]


def test_a_job_that_was_cancelled_while_it_waited_does_not_start(run: RunDir) -> None:
    add_slurm_entry(run, 1, "7", "submit", "sbatch")
    mark_cancelled(run)
    assert take_attempt(run, "7") is None


def step(run: RunDir, monkeypatch: pytest.MonkeyPatch, code: str, *writes: Any) -> tuple[int, dict[str, Any]]:
    """The exit code of a job whose step runs some Python, and end.json."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(batch, "write_to", lambda log: None)
    monkeypatch.setattr(batch.children, "adopt_orphans", lambda: None)
    add_slurm_entry(run, 1, "7", "submit", "sbatch")
    for write in writes:
        write()
    result = supervise(run, [sys.executable, "-c", code])
    end = read_json(run.attempt(1).end_file)
    assert end["exit_code"] == result
    return result, end


def test_a_step_that_ends_well(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    assert step(run, monkeypatch, "pass")[0] == 0
    events = [event["event"] for event in read_jsonl(run.events_file)]
    assert events == ["started", "finished"]


def test_a_notice_that_only_the_ranks_got(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    code, end = step(
        run, monkeypatch, "raise SystemExit(75)", lambda: log_event(run, 1, "signal", signal="SIGTERM")
    )
    assert code == EXIT_STOPPED
    assert end["reason"] == "saved after SIGTERM"


def test_the_code_is_that_of_what_began_it(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    record = {
        "rank": 3,
        "node_rank": 1,
        "host": "b",
        "time": "1",
        "type": "exit",
        "message": "m",
        "exit_code": 5,
    }
    code, end = step(
        run,
        monkeypatch,
        "raise SystemExit(137)",
        lambda: write_json(run.attempt(1).rank_error(3), record),
    )
    assert code == 5
    assert end["verdict"]["rank"] == 3


def test_a_job_that_slurm_does_not_start_again(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(job_id: str) -> None:
        raise SlurmRefused(f"scontrol: Job {job_id} may not be requeued")

    monkeypatch.setattr(batch, "requeue", refuse)
    told = lambda: log_event(run, 1, "signal", signal="SIGUSR2")  # noqa: E731
    result, end = step(run, monkeypatch, f"raise SystemExit({EXIT_STOPPED})", told)
    assert (result, end["state"], end["action"]) == (EXIT_STOPPED, "stopped", "stopped")
    assert end["reason"] == ("saved after SIGUSR2; not started again: scontrol: Job 7 may not be requeued")


def test_a_step_whose_run_folder_is_deleted_is_ended(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepWatch, "look_every_s", 0.1)
    plan = LaunchPlan.from_dict(read_json(run.attempt(1).plan_file))
    watch = StepWatch(run.attempt(1), plan, ["sleep", "60"])
    threading.Timer(0.3, shutil.rmtree, (run.attempt(1).path,)).start()
    watch.work()
    assert [code for _, code in watch.outcome.ends] == [137]


def test_a_step_that_cannot_start(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(batch, "write_to", lambda log: None)
    monkeypatch.setattr(batch.children, "adopt_orphans", lambda: None)
    add_slurm_entry(run, 1, "7", "submit", "sbatch")
    assert supervise(run, ["/no/such/srun"]) == 1
    assert "No such file" in read_json(run.attempt(1).end_file)["reason"]


def test_outside_of_slurm(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert supervise(run, ["true"]) == 1
    assert "this is no Slurm job" in capsys.readouterr().out
