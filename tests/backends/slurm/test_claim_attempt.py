"""Tests which start of a job claims which attempt, and when it leaves the run to another job."""

import os
import sys
from dataclasses import replace
from unittest.mock import Mock

import pytest
from slurm_job import RUNNING, reasons

from tests.support.said import said
from trainkit.backends.local.allocation import LocalAllocation
from trainkit.backends.slurm import allocation
from trainkit.backends.slurm.claim_attempt import NothingToDo, claim_attempt
from trainkit.errors import EXIT_OK, EXIT_STOPPED, UsageError
from trainkit.job import supervisor
from trainkit.job.attempt import Attempt
from trainkit.job.decision import Decision
from trainkit.job.supervisor import supervise_job
from trainkit.locks import file_lock
from trainkit.plan.launch import LaunchPlan
from trainkit.run import record
from trainkit.run.end import AttemptEnd
from trainkit.run.files import read_json
from trainkit.run.record import AUTO_RESTART, add_slurm_attempt, mark_cancelled, read_job, reopen_attempt
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.scheduler import JobState
from trainkit.slurm.client import SlurmRefused, SlurmUnreachable
from trainkit.slurm.jobs import JobDetails


@pytest.mark.parametrize("is_recorded", [True, False])
def test_the_first_start_takes_the_attempt_that_was_submitted(run, is_recorded):
    """The submission may have been interrupted before it recorded the attempt."""
    if is_recorded:
        add_slurm_attempt(run, 1, "7", "submit", "sbatch")
    assert claim_attempt(run, "7").number == 1
    assert reasons(run) == [(1, "7", "submit")]
    assert read_job(run).newest.pid == os.getpid()


def test_a_job_that_came_back_opens_the_next_one_with_the_same_plan(taken):
    attempt = claim_attempt(taken, "7")
    assert reasons(taken) == [(1, "7", "submit"), (2, "7", AUTO_RESTART)]
    assert attempt.plan_file.read_bytes() == taken.attempt(1).plan_file.read_bytes()
    assert attempt.config_file.read_bytes() == taken.attempt(1).config_file.read_bytes()


def test_a_job_that_was_cancelled_while_it_waited_does_not_start(run):
    add_slurm_attempt(run, 1, "7", "submit", "sbatch")
    mark_cancelled(run)
    said(claim_attempt(run, "7").reason)


@pytest.mark.parametrize(
    "start", [lambda run: claim_attempt(run, "7"), lambda run: LocalAllocation(run, 1).claim()]
)
def test_a_start_leaves_nothing_in_the_place_of_a_run_that_is_gone(start, tmp_path, monkeypatch):
    monkeypatch.setattr("trainkit.backends.slurm.claim_attempt.ENTRY_TIMEOUT_S", 0.0)
    with pytest.raises(UsageError, match="moved or deleted before this job started"):
        start(RunDir(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def taken(run):
    add_slurm_attempt(run, 1, "7", "submit", "sbatch")
    claim_attempt(run, "7")
    return run


def says(monkeypatch: pytest.MonkeyPatch, job: JobDetails | None) -> None:
    """Set Slurm's state of the newest attempt's job. None means that Slurm does not answer."""
    answer = [SlurmUnreachable("scontrol: no answer") if job is None else job]
    monkeypatch.setattr("trainkit.backends.slurm.claim_attempt.job_details", Mock(side_effect=answer * 9))


CARRYING = ("running", "pending", "requeued", "held", "suspended", "starting")


def leaves_to(job_id: str, claimed: AttemptDir | NothingToDo) -> bool:
    words = f"job {job_id} is running or pending for this run; "
    return isinstance(claimed, NothingToDo) and claimed.reason.startswith(words)


@pytest.mark.parametrize("state", JobState)
def test_a_second_job_leaves_a_run_to_the_one_that_carries_it(taken, monkeypatch, state):
    """A second job exists after a manual sbatch, a requeue of an old job, or a lost answer."""
    says(monkeypatch, replace(RUNNING, state=state))
    claimed, carries = claim_attempt(taken, "8"), state.value in CARRYING
    assert leaves_to("7", claimed) == carries
    assert reasons(taken) == [(1, "7", "submit"), (2, "8", "submit")][: 1 if carries else 2]


def test_an_old_job_that_is_requeued_leaves_the_run_to_the_newer_one(taken, monkeypatch):
    reopen_attempt(taken.attempt(1))
    add_slurm_attempt(taken, 2, "8", "resume", "sbatch")
    says(monkeypatch, replace(RUNNING, state=JobState.PENDING))
    assert leaves_to("8", claim_attempt(taken, "7"))
    assert isinstance(claim_attempt(taken, "8"), AttemptDir)
    assert taken.attempt_numbers() == [1, 2]


@pytest.mark.parametrize("job", [None, replace(RUNNING, state=JobState.UNKNOWN, slurm_state="REVOKED")])
def test_where_slurm_does_not_know_the_lock_of_the_supervisor_does(taken, monkeypatch, job):
    says(monkeypatch, job)
    with file_lock(taken.supervisor_lock_file):
        assert leaves_to("7", claim_attempt(taken, "8"))
    assert claim_attempt(taken, "8").number == 2


def test_the_lock_of_a_dead_host_is_not_taken_for_a_live_job(taken, monkeypatch):
    """A job that Slurm has forgotten carries nothing, and neither does the job before a follow-up."""
    forgotten = SlurmRefused("scontrol: Invalid job id specified")
    monkeypatch.setattr("trainkit.backends.slurm.claim_attempt.job_details", Mock(side_effect=forgotten))
    with file_lock(taken.supervisor_lock_file):  # the lock belongs to a host that is down
        assert isinstance(claim_attempt(taken, "8"), AttemptDir)
    record.set_follow_ups(taken, ["9", "10"])
    says(monkeypatch, None)
    with file_lock(taken.supervisor_lock_file):
        assert isinstance(claim_attempt(taken, "9"), AttemptDir)


def test_a_follow_up_that_leaves_is_not_counted_on(taken, monkeypatch):
    record.set_follow_ups(taken, ["9", "10"])
    says(monkeypatch, RUNNING)
    assert leaves_to("7", claim_attempt(taken, "9"))
    assert read_job(taken).waiting == []


def test_a_job_that_leaves_does_not_end_the_attempt_that_saves_after_a_cancel(taken, slurm, monkeypatch):
    mark_cancelled(taken)
    says(monkeypatch, RUNNING)
    assert allocation.SlurmAllocation(taken, "8", []).claim().exit_code == EXIT_OK
    assert not taken.attempt(1).end_file.exists()


def test_a_job_that_comes_back_does_not_run_a_finished_run_again(taken):
    AttemptEnd("failed", "failed", exit_code=1).write(taken.attempt(1))
    assert isinstance(claim_attempt(taken, "7"), AttemptDir), "a person may have requeued it"
    AttemptEnd("finished", "finished", exit_code=0).write(taken.attempt(2))
    nothing = claim_attempt(taken, "7")
    assert nothing.cancelled is None
    said(nothing.reason)
    assert taken.attempt_numbers() == [1, 2]


def test_a_start_that_was_superseded_while_it_waited_for_the_lock_does_not_start(run, slurm, monkeypatch):
    def superseded(run: RunDir, timeout_s: float) -> None:
        add_slurm_attempt(reopen_attempt(run.attempt(1)).run, 2, "8", "resume", "sbatch")

    add_slurm_attempt(run, 1, "7", "submit", "sbatch")
    monkeypatch.setattr(supervisor, "become_sole_supervisor", superseded)
    assert supervise_job(run, [sys.executable, "-c", "raise SystemExit(3)"]) == EXIT_STOPPED
    end = read_json(run.attempt(1).end_file)
    assert end["state"] == "stopped"
    said(end["reason"])


def test_only_the_newest_attempt_opens_the_next(run, slurm):
    given = allocation.SlurmAllocation(run, "7", [])
    add_slurm_attempt(run, 1, "7", "submit", "sbatch")
    add_slurm_attempt(reopen_attempt(run.attempt(1)).run, 2, "8", "resume", "sbatch")
    first = Attempt(run.attempt(1), LaunchPlan.from_dict(read_json(run.attempt(1).plan_file)))
    said(given.claim_next(first).reason)
    given.job = RUNNING
    requeue = Decision("requeue", "preempted", EXIT_STOPPED, "preempted")
    said(given.release(first, requeue).reason)
    assert slurm.requeued == 0
    assert run.attempt_numbers() == [1, 2]
