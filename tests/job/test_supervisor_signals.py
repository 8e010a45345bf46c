"""Tests stop signals and preemptions of a Slurm job, and whether the run resumes."""

import signal
import threading
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from slurm_job import RUNNING, record_signal, step

from tests.support.said import said
from trainkit.backends.slurm import allocation
from trainkit.backends.slurm.allocation import SlurmAllocation
from trainkit.errors import EXIT_NO_RESTART, EXIT_STOPPED
from trainkit.job import supervisor
from trainkit.job.failure import records
from trainkit.job.failure.records import record_silent_death
from trainkit.plan.launch import LaunchPlan
from trainkit.run.end import KILLED
from trainkit.run.files import read_json, write_json
from trainkit.run.rundir import RunDir
from trainkit.scheduler import JobState
from trainkit.slurm.jobs import JobDetails


@pytest.fixture(autouse=True)
def no_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a requeued job end without waiting for Slurm to end it."""
    monkeypatch.setattr(allocation, "await_eviction", lambda: None)


IMPORTS = """
import os, signal, sys, time
from trainkit.run.events import log_event
from trainkit.run.record import change_newest, mark_cancelled
from trainkit.run.rundir import RunDir
run = RunDir(os.environ['TRAINKIT_JOB_RUN_DIR'])
attempt = run.attempt(int(os.environ['TRAINKIT_JOB_ATTEMPT']))
"""
CANCELS = "mark_cancelled(run, now=True)"
SAVES_ON_USR2 = "signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75))"


@pytest.mark.parametrize(
    "then",
    [
        # When Slurm cancels a job, its SIGTERM may arrive before the step is seen to have ended.
        f"{CANCELS}; log_event(run, 1, 'signal', signal='SIGTERM'); os.kill(os.getpid(), 9)",
        # Slurm may need some time between the request in job.json and the kill.
        f"{SAVES_ON_USR2}; {CANCELS}; time.sleep(1); os.kill(os.getpid(), 9)",
    ],
)
def test_what_cancel_now_kills_is_no_failure_and_not_asked_to_save(run, slurm, monkeypatch, then):
    blame = Mock()
    monkeypatch.setattr(SlurmAllocation, "record_suspect", blame)
    monkeypatch.setattr("trainkit.backends.slurm.attempt_watch.SIGNAL_RECORD_S", 0.1)
    result, end = step(run, IMPORTS + then)
    assert (result, end["state"], end["reason"], end["verdict"]) == (137, "cancelled", KILLED, None)
    assert not blame.called


@pytest.mark.parametrize(
    "then",
    [
        # No step receives the signal, because it arrives between two steps.
        f"{SAVES_ON_USR2}; request(); time.sleep(60)",
        # The signal arrives before the ranks have handlers, and kills them.
        "request(); os.kill(os.getpid(), signal.SIGUSR2)",
    ],
)
def test_a_requested_requeue_is_neither_lost_nor_a_crash(run, slurm, monkeypatch, then):
    monkeypatch.setattr("trainkit.backends.slurm.attempt_watch.SIGNAL_RECORD_S", 0.1)
    request = "request = lambda: change_newest(run, requeue_requested_at='2030-01-01T00:00:00Z')\n"
    result, end = step(run, IMPORTS + request + then)
    assert (result, end["action"], end["cause"]) == (EXIT_STOPPED, "requeue", "asked")
    assert slurm.requeued == 1


def job(state: JobState = JobState.RUNNING, **more: Any) -> JobDetails:
    return replace(RUNNING, state=state, **more)


CANCELLED, COMPLETING = job(JobState.CANCELLED), job(JobState.COMPLETING)
PREEMPTED, REQUEUED = job(is_preempted=True), job(JobState.REQUEUED, restarts=1)
OUT_OF_TIME = job(end_time=datetime.now(timezone.utc))
TAKEN = replace(RUNNING, state=JobState.COMPLETING, restarts=1)
"""A job that Slurm itself has already requeued."""


def dying(run: RunDir, number: int, *, record: bool = True) -> dict[str, Any]:
    """Return the end of a step whose rank dies of a signal that its agent did not get.

    With `record`, the rank's death is recorded.
    """
    code, file = 128 + number, run.attempt(1).rank_error(0)
    record_silent_death(run.attempt(1), 0, 0, code)
    death = file.read_text()
    file.unlink()
    place = f"'{run.attempts_dir}/%03d/errors/{file.name}' % int(os.environ['TRAINKIT_JOB_ATTEMPT'])"
    writes = f"open({place}, 'w').write({death!r})" if record else ""
    return step(run, f"import os; {writes}\nraise SystemExit({code})")[1]


def run_a_command(run):
    file = run.attempt(1).plan_file
    write_json(file, {**read_json(file), "command": ["python", "train.py"]})


@pytest.fixture
def suspects(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    noted: list[Any] = []
    monkeypatch.setattr(allocation, "note_failure", lambda *args, **more: noted.append(args))
    monkeypatch.setattr(allocation, "NOTICE_S", 0.2)
    monkeypatch.setattr(records, "own_host", lambda: "node1")
    return noted


SAVES, FAILS = "raise SystemExit(75)", "raise SystemExit(1)"
NO_STEP = "srun: error: Unable to create step for job 7: no memory"


@pytest.mark.parametrize(
    ("job", "code", "is_command", "expected"),
    [
        # A full disk did not take the notice.
        (PREEMPTED, SAVES, False, ("requeue", "preempted", 1)),
        (REQUEUED, SAVES, False, ("requeue", "preempted", 0)),
        (OUT_OF_TIME, SAVES, False, ("requeue", "timeout", 1)),
        (CANCELLED, SAVES, False, ("stopped", None, 0)),
        # A host that was cut off is reachable again, and its job has continued without it.
        (REQUEUED, FAILS, False, ("requeue", "crash", 0)),
        (job(restarts=1), FAILS, False, ("requeue", "crash", 0)),
        # Slurm does not answer.
        (None, FAILS, False, ("requeue", "crash", 1)),
        # A rank dies of the signal with which Slurm ends the job.
        (PREEMPTED, (signal.SIGTERM, True), False, ("requeue", "preempted", 1)),
        (PREEMPTED, (signal.SIGTERM, False), True, ("requeue", "preempted", 1)),
        (TAKEN, (signal.SIGUSR2, False), False, ("requeue", "preempted", 0)),
        (replace(COMPLETING, reason="TimeLimit"), (signal.SIGINT, True), False, ("requeue", "timeout", 1)),
        (CANCELLED, (signal.SIGTERM, True), False, ("stopped", None, 0)),
        (PREEMPTED, FAILS, True, ("requeue", "preempted", 1)),  # the handler of a command exits with 1
    ],
)
def test_a_step_without_a_notice(run, slurm, suspects, monkeypatch, job, code, is_command, expected):
    cancelled = []
    monkeypatch.setattr(allocation, "cancel_waiting", cancelled.extend)
    if is_command:
        run_a_command(run)
    slurm.job = job
    end = step(run, code)[1] if isinstance(code, str) else dying(run, code[0], record=code[1])
    assert (end["action"], end["cause"], slurm.requeued) == expected
    assert (end["verdict"] is None) == (expected[1] != "crash")
    assert (suspects, cancelled, run.attempt_numbers()) == ([], [], [1])


@pytest.mark.parametrize(
    ("job", "says", "is_command", "expected"),
    [
        (replace(COMPLETING, is_preempted=True), "", False, ("requeue", "crash", 1)),
        (replace(COMPLETING, is_preempted=True), NO_STEP, False, ("requeue", "crash", 1)),
        (TAKEN, "", True, ("requeue", "crash", 0)),
        (CANCELLED, NO_STEP, False, ("failed", "crash", 0)),
        (CANCELLED, "", True, ("failed", "crash", 0)),
    ],
)
def test_a_notice_before_the_step_is_started_again(run, slurm, monkeypatch, job, says, is_command, expected):
    if is_command:
        run_a_command(run)

    def take_away(delay_s: float) -> signal.Signals:
        slurm.job = job
        return signal.SIGTERM

    monkeypatch.setattr(supervisor.processes, "wait_for_notice", take_away)
    _, end = step(run, f"import sys; sys.exit({says!r} or 5)")
    assert (end["action"], end["cause"], slurm.requeued) == expected
    assert run.attempt_numbers() == [1]


@pytest.mark.parametrize(
    ("job", "waiting", "leaving"),
    [
        *((RUNNING, [], []), (REQUEUED, ["7"], []), (COMPLETING, [], [])),
        (TAKEN, [], ["7"]),  # Slurm requeues the job as soon as this shell has ended
        (job(restarts=1), [], []),  # the job already runs on other hosts
    ],
)
def test_a_run_that_has_ended_is_not_started_again_by_slurm(run, slurm, monkeypatch, job, waiting, leaving):
    """Slurm starts the job again because a host was lost for a while, but the run has failed for good."""
    cancelled: tuple[list[str], list[str]] = ([], [])
    monkeypatch.setattr(allocation, "cancel_waiting", cancelled[0].extend)
    monkeypatch.setattr(allocation, "cancel", cancelled[1].extend)
    slurm.job = job
    code, end = step(run, f"raise SystemExit({EXIT_NO_RESTART})")
    assert (code, end["action"], *cancelled) == (EXIT_NO_RESTART, "failed", waiting, leaving)


def test_what_stops_at_its_step_does_not_come_back_for_the_end_of_its_time(run, slurm, monkeypatch):
    attempt = run.attempt(1)
    changed = attempt.config_file.read_text().replace("stop_at_step: null", "stop_at_step: 40")
    assert "stop_at_step: 40" in changed
    attempt.config_file.write_text(changed)
    saved = [SimpleNamespace(step=40)]
    monkeypatch.setattr("trainkit.job.attempt_end.checkpoints_in_line", lambda run: saved)
    slurm.job = OUT_OF_TIME
    end = step(run, SAVES)[1]
    assert end["action"] == "stopped"
    said(end["reason"])


def test_a_step_is_not_started_again_where_it_would_not_hear_that_its_time_is_over(run, slurm, monkeypatch):
    """Slurm signals the time limit once, up to a minute early, and may have done so during the wait."""
    left_s = LaunchPlan.from_dict(read_json(run.attempt(1).plan_file)).grace_s + 60 + 30
    slurm.job = replace(RUNNING, end_time=datetime.now(timezone.utc) + timedelta(seconds=left_s + 5))

    def wait(delay_s: float) -> None:
        assert slurm.job is not None
        end_time = datetime.now(timezone.utc) + timedelta(seconds=left_s - 5)
        object.__setattr__(slurm.job, "end_time", end_time)

    monkeypatch.setattr(supervisor.processes, "wait_for_notice", wait)
    end = step(run, "raise SystemExit(5)")[1]
    assert (end["action"], end["cause"], run.attempt_numbers()) == ("requeue", "crash", [1])


@pytest.mark.parametrize(
    ("now", "requeued"),
    [
        *((CANCELLED, 0), (COMPLETING, 0), (replace(COMPLETING, reason="TimeLimit"), 1)),
        *((replace(COMPLETING, is_preempted=True), 1), (None, 1)),
    ],
)
def test_a_job_that_a_person_ends_after_it_was_judged_does_not_come_back(
    run, slurm, monkeypatch, now, requeued
):
    monkeypatch.setattr(allocation, "query_job", Mock(side_effect=[OUT_OF_TIME, now]))
    end = step(run, SAVES, record_signal(run, "SIGUSR2"))[1]
    assert slurm.requeued == requeued
    assert end["action"] == ("requeue" if requeued else "stopped")
    said(end["reason"])


@pytest.mark.parametrize(
    ("job", "ended_with", "signals", "cause"),
    [
        (RUNNING, EXIT_STOPPED, ["SIGUSR2"], "asked"),
        # The exit code is not 75, which would mean that the run has saved.
        (replace(PREEMPTED, state=JobState.COMPLETING), 5, [], "crash"),
    ],
)
def test_a_job_that_slurm_does_not_start_again(run, slurm, job, ended_with, signals, cause):
    slurm.job, slurm.refuses = job, True
    result, end = step(run, f"raise SystemExit({ended_with})", *(record_signal(run, one) for one in signals))
    state = "stopped" if signals else "failed"
    assert (result, end["state"], end["action"], end["cause"]) == (ended_with, state, state, cause)
    said(end["reason"])


def test_a_notice_may_follow_the_death(run, slurm, monkeypatch):
    """Slurm still reports the job as running, so somebody has signalled the step."""

    def query(job_id: str, patience_s: float = 0.0) -> JobDetails:
        record_signal(run, "SIGTERM")()
        return RUNNING

    monkeypatch.setattr(allocation, "query_job", query)
    end = dying(run, 15)
    assert (end["action"], end["cause"], end["verdict"]) == ("stopped", None, None)


def test_a_notice_may_come_to_the_supervisor(run, slurm):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, supervisor.processes.WATCHED)
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        found = SlurmAllocation(run, "7", [])._await_notice(run.attempt(1))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert found == ("SIGTERM", True)


@pytest.mark.parametrize("job", [RUNNING, None])
def test_a_death_by_a_signal_that_nobody_sent_to_the_job_is_a_crash_of_no_node(run, slurm, suspects, job):
    slurm.job = job
    end = dying(run, 15)
    assert (end["state"], end["cause"], suspects) == ("failed", "crash", [])
    assert (end["verdict"]["rank"], end["verdict"]["message"]) == (0, "killed by SIGTERM")
    said(end["reason"])


@pytest.mark.parametrize(
    ("state", "is_drained"), [("draining", True), ("allocated@", True), ("mixed", False)]
)
def test_a_death_on_a_node_that_is_drained(run, slurm, suspects, monkeypatch, state, is_drained):
    monkeypatch.setattr(allocation, "node_states", lambda hosts: dict.fromkeys(hosts, state))
    end = dying(run, 15)
    assert suspects == []
    assert end["cause"] == ("preempted" if is_drained else "crash")
    if is_drained:
        assert (end["action"], end["verdict"]) == ("requeue", None)
        said(end["reason"])


def test_a_segmentation_fault_is_judged_at_once_and_noted(run, slurm, suspects, monkeypatch):
    monkeypatch.setattr(SlurmAllocation, "_await_notice", None)
    end = dying(run, 11)
    assert end["cause"] == "crash"
    assert [args[1:3] for args in suspects] == [("node1", "culprit")] * 2
