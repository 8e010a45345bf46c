from datetime import datetime, timedelta, timezone

import pytest

from trainkit.job.decision import termination_cause
from trainkit.slurm.jobs import JobDetails, parse_job
from trainkit.slurm.states import JobState

NOW = datetime.now(timezone.utc)


def job(state=JobState.RUNNING, *, preempted=False, restarts=0, left_s=360_000.0, reason=""):
    end_time = NOW + timedelta(seconds=left_s)
    return JobDetails(state, state.name, preempted, restarts, True, end_time, reason)


COMPLETING = JobState.COMPLETING


@pytest.mark.parametrize(
    ("request_name", "found", "shell", "cause"),
    [
        ("SIGTERM", job(preempted=True), False, "preempted"),
        ("SIGTERM", job(COMPLETING, preempted=True), True, "preempted"),
        ("SIGTERM", job(COMPLETING, restarts=1), True, "preempted"),
        ("SIGTERM", job(JobState.REQUEUED, restarts=1), True, "preempted"),
        ("SIGTERM", job(COMPLETING, reason="TimeLimit"), True, "timeout"),
        ("SIGUSR2", job(left_s=100), False, "timeout"),
        ("SIGUSR2", job(left_s=300_000), False, "asked"),
        # scancel, and scancel --signal=TERM
        ("SIGTERM", job(COMPLETING), True, None),
        ("SIGTERM", job(JobState.CANCELLED), True, None),
        ("SIGTERM", job(), False, None),
        ("SIGTERM", job(left_s=100), False, None),
        # Slurm says nothing.
        ("SIGTERM", None, False, "preempted"),
        ("SIGTERM", None, True, None),
        ("SIGINT", None, False, None),
        ("SIGUSR2", None, False, "timeout"),
    ],
)
def test_what_stood_behind_a_notice(request_name, found, shell, cause):
    assert (
        termination_cause(request_name, found, 30.0, supervisor_was_signalled=shell, restarts=0, lost=False)
        == cause
    )


def test_a_job_that_slurm_starts_again_for_a_lost_host():
    found = job(COMPLETING, restarts=3)
    assert (
        termination_cause("SIGTERM", found, 30.0, supervisor_was_signalled=True, restarts=2, lost=True)
        == "node_fail"
    )
    assert (
        termination_cause("SIGTERM", found, 30.0, supervisor_was_signalled=True, restarts=3, lost=False)
        is None
    )


def test_an_early_notice_of_another_name():
    def cause(left_s, shell):
        found = job(left_s=left_s)
        facts = {"supervisor_was_signalled": shell, "restarts": 0, "lost": False, "notice": "SIGTERM"}
        return termination_cause("SIGTERM", found, 30.0, **facts)

    assert (cause(100, False), cause(300_000, False), cause(100, True)) == ("timeout", None, None)


def test_what_scontrol_prints():
    text = (
        "JobId=7 JobName=a JobState=FAILED Restarts=9 PreemptTime=1 UserId=root(0) GroupId=root(0)"
        " JobState=COMPLETING Reason=TimeLimit Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1"
        " EndTime=1790000000 PreemptEligibleTime=1780000000 PreemptTime=None BatchHost=node1"
        " Command=/x/JobState=RUNNING WorkDir=/y\n"
    )
    found = parse_job(text)
    assert (found.state, found.reason, found.restarts) == (COMPLETING, "TimeLimit", 2)
    assert (found.is_preempted, found.may_requeue, found.batch_host) == (False, True, "node1")
    assert found.end_time == datetime.fromtimestamp(1790000000, timezone.utc)
    assert parse_job(text.replace("PreemptTime=None", "PreemptTime=1789999990")).is_preempted
