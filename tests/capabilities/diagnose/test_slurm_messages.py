"""Tests to which attempt a message of Slurm belongs.

A requeued job appends to the log of an earlier attempt.
"""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.support.said import said
from trainkit.capabilities.diagnose.diagnose import Diagnosis, diagnose
from trainkit.run.end import Action, end_line, is_end_line
from trainkit.run.files import as_utc, write_json
from trainkit.run.record import add_slurm_attempt, create_job, read_job
from trainkit.run.rundir import RunDir
from trainkit.scheduler import JobState
from trainkit.slurm.jobs import SlurmJob

BEGIN = datetime.fromisoformat("2026-11-25T20:00:00.400+00:00")
KILLED = {"rank": 1, "host": "n2", "type": "exit", "message": "killed by SIGKILL", "exit_code": 137}
CRASH = {"state": "failed", "cause": "crash", "reason": "a worker ended with SIGKILL", "verdict": KILLED}
LOST = {**KILLED, "rank": None, "type": "HostLost", "message": "its host died, or its supervisor was killed"}
NOT_RECORDED = {"state": "failed", "cause": "node_fail", "guessed": True, "verdict": LOST}
REASONS = {
    "PREEMPTION": "preempted",
    "JOB REQUEUE": "preempted",
    "TIME LIMIT": "time-limit",
    "NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS": "node-failure",
}


def job_of(folder: Path, *ends: dict[str, Any]) -> RunDir:
    """Return a job whose attempts began every 60 s. An attempt without a recorded end is given as {}."""
    run = RunDir(folder / "run")
    run.path.mkdir(parents=True)
    create_job(run, backend="sbatch", name="x", cwd=str(folder), code=None)
    for number, end in enumerate(ends, 1):
        attempt = run.attempt(number)
        attempt.create()
        time = as_utc(BEGIN + timedelta(seconds=60 * (number - 1)))
        add_slurm_attempt(run, number, "7", "restart", "sbatch", started_at=time)
        if end:
            write_json(attempt.end_file, end)
            if end is not NOT_RECORDED:
                append_to_log(run, number, end_line(number, "restart", end["reason"]))
    return run


def append_to_log(run: RunDir, number: int, line: str) -> None:
    with run.attempt(number).supervisor_log.open("a") as log:
        log.write(line + "\n")


def ended_by_slurm(why: str, second: float, kind: str = "JOB 7") -> str:
    """Return the message that slurmstepd writes N seconds after the beginning, in local time."""
    time = (BEGIN + timedelta(seconds=second)).astimezone().replace(tzinfo=None).isoformat(timespec="seconds")
    return f"slurmstepd: error: *** {kind} ON n1 CANCELLED AT {time}{why and ' DUE TO '}{why} ***"


def named(run: RunDir, attempt: int) -> str | None:
    return found_in(run, attempt).name


def found_in(run: RunDir, attempt: int) -> Diagnosis:
    return diagnose(run.attempt(attempt), read_job(run))


@pytest.mark.parametrize("why", ["", *REASONS])
def test_the_later_end_of_a_job_does_not_explain_an_attempt_that_had_ended(tmp_path, why):
    run = job_of(tmp_path, CRASH, {})
    append_to_log(run, 1, "slurmstepd: error: Detected 1 oom_kill event in StepId=7.batch.")
    append_to_log(run, 1, ended_by_slurm(why, 90))
    assert (found_in(run, 1).name, found_in(run, 1).rank) == ("killed", 1)
    assert named(run, 2) == REASONS.get(why), "it explains the one that ran"


def test_a_requeue_in_the_second_of_the_end_is_a_consequence(tmp_path):
    run = job_of(tmp_path, CRASH)
    append_to_log(run, 1, ended_by_slurm("JOB REQUEUE", 10))
    assert named(run, 1) == "killed"
    second = job_of(tmp_path / "second", CRASH, CRASH, {})
    append_to_log(second, 1, ended_by_slurm("JOB REQUEUE", 90))
    assert [named(second, number) for number in (1, 2)] == ["killed", "killed"]
    assert found_in(second, 3).name is None, "it began later"


@pytest.mark.parametrize("end", [{}, NOT_RECORDED], ids=["no end", "a later start wrote the end"])
def test_an_attempt_without_an_end_of_its_own_is_explained_by_what_slurm_wrote_while_it_ran(tmp_path, end):
    run = job_of(tmp_path, end, CRASH, end, end)
    append_to_log(run, 1, ended_by_slurm("PREEMPTION", 50))
    append_to_log(run, 1, ended_by_slurm("TIME LIMIT", 170))
    append_to_log(run, 1, ended_by_slurm("NODE FAILURE", 180.5))
    assert [named(run, number) for number in range(1, 5)] == [
        *("preempted", "killed", "time-limit", "node-failure")
    ]
    said(found_in(run, 3).evidence[0].place)
    assert (found_in(run, 3).rank, found_in(run, 3).host) == (None, None), "it is about the job"
    requeued = SlurmJob("7", JobState.REQUEUED, slurm_state="REQUEUED")
    found = diagnose(run.attempt(1), read_job(run), slurm_job=requeued)
    assert found.name == "preempted", "accounting has no reason"


def test_a_message_about_the_step_is_in_the_log_of_its_own_attempt(tmp_path):
    run = job_of(tmp_path, {}, {})
    append_to_log(run, 1, ended_by_slurm("NODE FAILURE", 30, kind="STEP 7.0"))
    append_to_log(run, 2, ended_by_slurm("TIME LIMIT", 90, kind="STEP 7.1"))
    assert [named(run, number) for number in (1, 2)] == ["node-failure", "time-limit"]


def test_the_step_that_watches_the_first_host_outlives_attempts(tmp_path):
    run = job_of(tmp_path, CRASH, {})
    log = run.attempt(1).batch_host_log
    preempted = ended_by_slurm("PREEMPTION", 90, "STEP 7.0")
    log.write_text(f"{preempted}\nsrun: error: n3: task 0: Out Of Memory\n")
    assert named(run, 1) == "killed"


def test_every_action_ends_an_attempt():
    assert all(is_end_line(end_line(1, action, "…"), 1) for action in get_args(Action))
    assert not is_end_line(end_line(12, "failed", "…"), 1)
    assert not is_end_line("attempt 1: restarts without n2: slow", 1), "it still runs"
