"""Tests the decision after an attempt, and the reason why the attempt had to stop."""

from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta, timezone

import pytest

from tests.support.said import said
from trainkit.backends.slurm.attempt_watch import termination_cause
from trainkit.job.decision import (
    Outcome,
    PlannedStop,
    RestartOptions,
    Standing,
    decide,
    decide_requested,
    restarts_limit,
)
from trainkit.job.signals import combine_exit_codes, describe_exit
from trainkit.plan.launch import RequeuePolicy
from trainkit.plan.workload import TRAINER, Workload
from trainkit.run.end import AttemptEnd, RankFailure
from trainkit.run.tracebacks import CodeLine
from trainkit.scheduler import JobState
from trainkit.slurm.jobs import JobDetails, parse_job

POLICY = RequeuePolicy()
COMMAND = Workload(("train",))
HERE = RestartOptions(restart=True, requeue=True)
NAN = RankFailure(type="ValueError", message="bad", step=37)


def was(cause, progress=0, step=None, failure=None):
    return AttemptEnd(cause=cause, mark=progress, step=step, verdict=failure)


@dataclass(frozen=True)
class Ended(Outcome):
    """The outcome of an attempt, with other facts about its run."""

    progress: int = 0
    step: int | None = 1
    ran_s: float = 0.0
    is_total_used: bool = False
    workload: Workload = TRAINER
    attended_in: str | None = None
    is_done: bool = False


def ended(codes, stop_signal=None, cause=None, **more):
    return Ended(tuple(enumerate(codes)), stop_signal, cause, **more)


@pytest.mark.parametrize("step", [None, 0])
def test_a_trainer_without_a_step_has_not_saved(step):
    decision = after(ended([75, 75], "SIGINT", step=step))
    assert decision.action == "stopped"
    said(decision.reason)
    assert after(ended([75], "SIGINT", step=None, workload=COMMAND)).reason == "saved after SIGINT"


def after(end, *past, policy=POLICY, options=HERE):
    known = {field.name: getattr(end, field.name) for field in fields(Standing) if field.name != "previous"}
    return decide(end, Standing(past, **known), policy, options)


@pytest.mark.parametrize("kind", ["bdb.BdbQuit", "BdbQuit"])
def test_a_person_who_quits_the_debugger(kind):
    """The debugger belongs to a script, as its log shows, or to a task."""
    end = ended([1, 143], failure=RankFailure(type=kind))
    decision = after(replace(end, attended_in="debugger"))
    assert (decision.action, decision.cause) == ("stopped", None)
    said(decision.reason)
    assert after(end).cause == "crash", "of a pdb that has found no terminal"


@pytest.mark.parametrize(
    ("codes", "request_name", "cause", "action", "exit_code"),
    [
        ([0, 0], None, None, "finished", 0),
        ([0, 0], "SIGTERM", "preempted", "finished", 0),
        ([75, 75], None, None, "stopped", 75),
        ([75, 0], "SIGTERM", None, "stopped", 75),
        ([75, 0], "SIGTERM", "preempted", "requeue", 75),
        ([75, 75], "SIGUSR2", "timeout", "requeue", 75),
        ([75, 75], "SIGUSR2", "asked", "requeue", 75),
        ([75, 78], "SIGUSR2", "timeout", "failed", 78),
        ([143, 75], "SIGTERM", None, "stopped", 75),
        ([143, 75], "SIGTERM", "node_fail", "requeue", 75),
        ([140, 75], "SIGUSR2", "asked", "requeue", 75),
        ([130, 143], "SIGTERM", None, "stopped", 75),
        ([70, 70], "SIGUSR2", "timeout", "requeue", 75),
        ([70, 75], None, None, "restart", 75),
        ([1, 75], "SIGTERM", None, "failed", 1),
        ([1, 75], "SIGTERM", "preempted", "requeue", 75),
        ([143, 0], None, None, "restart", 75),
        ([75, 137, 1], None, None, "restart", 75),
    ],
)
def test_what_follows(codes, request_name, cause, action, exit_code):
    decision = after(ended(codes, request_name, cause))
    assert (decision.action, decision.exit_code) == (action, exit_code)


@pytest.mark.parametrize(
    ("stop_signal", "cause", "is_done", "action"),
    [
        (None, None, False, "finished"),
        ("SIGTERM", "preempted", False, "requeue"),
        ("SIGUSR2", "timeout", False, "requeue"),
        ("SIGTERM", None, False, "stopped"),
        ("SIGTERM", "preempted", True, "finished"),
    ],
)
def test_exit_code_0_of_a_command_after_a_notice_is_a_save_unless_it_is_done(
    stop_signal, cause, is_done, action
):
    result = ended([0, 0], stop_signal, cause, workload=COMMAND, is_done=is_done)
    assert after(result).action == action


@pytest.mark.parametrize(
    ("cause", "action"), [("preempted", "requeue"), (None, "stopped"), ("asked", "requeue")]
)
def test_a_command_that_fails_after_a_notice_was_ended_by_it(cause, action):
    """A rank without a handler dies of the signal, and its peers then fail because the rank is dead."""
    decision = after(ended([1, 143], "SIGTERM", cause, workload=COMMAND))
    assert (decision.action, decision.exit_code) == (action, 75)
    said(decision.reason)
    assert after(ended([1], None, None, workload=COMMAND)).cause == "crash"
    assert after(ended([78], "SIGTERM", cause, workload=COMMAND)).action == "failed"
    earlier = after(ended([137], "SIGTERM", cause, workload=COMMAND, had_failed=True))
    assert (earlier.cause, earlier.resumes) == ("crash", cause is not None)


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (ended([137]), "crash"),
        (ended([143], hung=True), "hang"),
        (ended([143], hung=True, lost_nodes=("n2",)), "node_fail"),
        (ended([75], "SIGTERM", "preempted"), "preempted"),
        (ended([75], "SIGUSR2", "timeout"), "timeout"),
        (ended([137], "SIGTERM", "preempted", out_of_time=True), "preempted"),
    ],
)
def test_each_cause_has_its_words(end, cause):
    decision = after(end)
    assert decision.cause == cause
    said(decision.reason)


@pytest.mark.parametrize(
    ("options", "action"),
    [
        (RestartOptions(restart=True, requeue=True, resubmit=True, follow_up=True), "restart"),
        (RestartOptions(requeue=True, resubmit=True, follow_up=True), "requeue"),
        (RestartOptions(resubmit=True, follow_up=True), "follow_up"),
        (RestartOptions(resubmit=True), "resubmit"),
        (RestartOptions(unavailable_reason="nobody"), "failed"),
    ],
)
def test_the_nearest_way_back_from_a_crash(options, action):
    assert after(ended([1]), options=options).action == action


@pytest.mark.parametrize("cause", ["preempted", "asked", None])
def test_a_failure_after_a_notice_is_no_crash(cause):
    end = ended([1, 75], "SIGTERM", cause, failure=NAN, failed_after_signal=True)
    decision = after(end, policy=RequeuePolicy(max_crashes=0))
    if cause is None:
        assert (decision.action, decision.cause) == ("failed", "crash")
    else:
        assert (decision.action, decision.cause) == ("requeue", cause)
        said(decision.reason)
    before = after(ended([1, 75], "SIGTERM", cause, failure=NAN), policy=RequeuePolicy(max_crashes=0))
    assert (before.action, before.cause) == ("failed", "crash")


def test_what_is_taken_away_is_no_place_to_start_again():
    restart = RestartOptions(restart=True)
    assert after(ended([75], "SIGTERM", "preempted"), options=restart).action == "stopped"
    assert after(ended([1], "SIGTERM", "preempted"), options=HERE).action == "requeue"
    assert after(ended([75], "SIGUSR2", "asked"), options=restart).action == "restart"


def test_without_a_way_back_the_failure_stands():
    decision = after(ended([9]), options=RestartOptions(unavailable_reason="there is no scontrol"))
    assert (decision.action, decision.exit_code) == ("failed", 9)
    said(decision.reason)


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (ended([75], "SIGTERM", "preempted"), "preempted"),
        (ended([75], "SIGUSR2", "timeout"), "timeout"),
        (ended([1]), "crash"),
        (ended([1], hung=True), "hang"),
        (ended([1], lost_nodes=("n1",)), "node_fail"),
    ],
)
def test_requeue_on_says_what_starts_again(end, cause):
    others = RequeuePolicy(on=tuple(word for word in POLICY.on if word != cause))
    decision = after(end, policy=others)
    assert not decision.resumes
    said(decision.reason)
    assert after(end, policy=RequeuePolicy(on=(cause,))).resumes


def test_who_asks_gets_it_whatever_the_config_says():
    assert after(ended([75], "SIGUSR2", "asked"), policy=RequeuePolicy(on=())).action == "requeue"


@pytest.mark.parametrize(
    ("cause", "options", "action"),
    [
        ("slow_host", HERE, "restart"),  # the allocation has a spare host
        ("slow_host", RestartOptions(requeue=True), "requeue"),
        ("grow", HERE, "requeue"),
        ("toy", HERE, "requeue"),  # the cause belongs to a capability of another package
    ],
)
def test_what_the_supervisor_itself_wants_is_the_reason(cause, options, action):
    planned_stop = PlannedStop(cause, "restarts without node3: rank 5 slow")
    end = ended([75, 75], "SIGUSR2", cause, planned_stop=planned_stop)
    decision = after(end, policy=RequeuePolicy(on=()), options=options)
    assert (decision.action, decision.cause, decision.exit_code) == (action, cause, 75)
    said(decision.reason)
    preempted = replace(end, cause="preempted")
    said(after(preempted).reason)


def test_restarts_for_slow_hosts_are_counted_and_no_lack_of_progress():
    slow = was("slow_host", step=9)
    most = restarts_limit([was("preempted"), slow], RequeuePolicy(max=2))
    said(most)
    assert after(ended([1], step=9), slow, slow).action == "restart"


def test_the_same_failure_at_the_same_step_is_no_accident():
    decision = after(ended([1], failure=NAN, progress=30), was("crash", 20, 37, NAN))
    assert decision.action == "failed"
    said(decision.reason)
    assert after(ended([1], failure=NAN), was("crash", 0, 36, replace(NAN, step=36))).resumes
    assert after(ended([1], failure=NAN), was("crash", 0, 37, RankFailure(type="other", step=37))).resumes
    # A different end between the two shows that the failure is an accident.
    assert after(ended([1], failure=NAN), was("crash", 0, 37, NAN), was("preempted", 30)).resumes


def test_a_failure_at_an_unknown_step_is_the_same_when_nothing_was_saved_between():
    unknown = RankFailure(type="exit", message="ended with exit code 1")
    assert not after(ended([1], failure=unknown, progress=5), was("crash", 5, None, unknown)).resumes
    assert after(ended([1], failure=unknown, progress=6), was("crash", 5, None, unknown)).resumes


def test_what_cannot_get_better_is_not_tried():
    decision = after(ended([1], failure=RankFailure(type="ImportError", message="no x", final=True)))
    assert (decision.action, decision.exit_code) == ("failed", 1)
    said(decision.reason)


KEY = RankFailure(type="KeyError", message="'lr'", exit_code=1, code=CodeLine("train.py", 12))


@pytest.mark.parametrize(
    ("failure", "more", "past", "resumes"),
    [
        (KEY, {}, [], False),
        (replace(KEY, type="omegaconf.errors.ConfigAttributeError"), {}, [], False),
        (replace(KEY, code=None), {"workload": COMMAND}, [], False),
        (KEY, {}, [was("crash", failure=NAN)], False),
        # The error is not in the user's code, or the run has made progress or may have.
        (replace(KEY, code=None), {}, [], True),
        (KEY, {"step": 7}, [], True),
        (KEY, {"progress": 1}, [], True),
        (KEY, {"ran_s": 700.0}, [], True),
        (KEY, {}, [was("preempted")], True),
        (KEY, {}, [was("crash", step=7)], True),
        # Such an error may be an accident.
        *((replace(KEY, type=kind), {}, [], True) for kind in ("OSError", "RuntimeError", "ConnectionError")),
        (replace(KEY, type="torch.OutOfMemoryError"), {}, [], True),
        (replace(KEY, type="ValueError", message="Connection error, and no cached file"), {}, [], True),
        (replace(KEY, exit_code=137), {}, [], True),
    ],
)
def test_an_own_error_before_any_progress_is_not_tried_again(failure, more, past, resumes):
    decision = after(ended([1], failure=failure, **{"step": None, **more}), *past)
    assert (decision.resumes, decision.cause) == (resumes, "crash")
    if not resumes:
        kind, where = str(failure.type).rpartition(".")[2], " in train.py:12" if failure.code else ""
        says = f"not started again: {kind}{where} before the first step would be raised again"
        assert decision.reason.endswith(says)


@pytest.mark.parametrize("kind", ["OSError", "RuntimeError", "MyError"])
def test_no_exception_is_raised_a_third_time_before_any_progress(kind):
    failure = RankFailure(type=kind, message="no <Loader at 0x7f12>", exit_code=1)
    again = replace(failure, message="no <Loader at 0x7fff>")
    assert after(ended([1], failure=failure, step=None)).resumes
    decision = after(ended([1], failure=again, step=None), was("crash", failure=failure))
    assert decision.action == "failed"
    said(decision.reason)


def test_crashes_without_progress_are_counted():
    crashes = [was("crash", 10, step) for step in (11, 12, 13)]
    assert after(ended([1], progress=10, step=14), *crashes[:2]).resumes
    decision = after(ended([1], progress=10, step=14), *crashes)
    assert decision.action == "failed"
    said(decision.reason)
    assert after(ended([1], progress=20, step=24), *crashes).resumes


def test_three_ends_at_one_step_are_enough():
    policy = RequeuePolicy(max_crashes=10)
    two = [was("hang", 10, 15), was("crash", 10, 15)]
    decision = after(ended([1], progress=10, step=15), *two, policy=policy)
    assert decision.action == "failed"
    said(decision.reason)
    assert after(ended([1], progress=10, step=16), *two, policy=policy).resumes
    timeouts = [was("timeout", 10, 10)] * 2
    decision = after(ended([75], "SIGUSR2", "timeout", progress=10, step=10), *timeouts)
    assert (decision.action, decision.exit_code) == ("stopped", 75)
    preempted = [was("preempted", 10, 10)] * 9
    assert after(ended([75], "SIGTERM", "preempted", progress=10, step=10), *preempted).resumes


def test_a_start_that_slurm_could_not_make_is_no_failure():
    policy = RequeuePolicy(on=(), max=0, max_crashes=0)
    delays = []
    for count in range(9):
        decision = after(ended([1], launch_error="srun: error"), *[was("not_started")] * count, policy=policy)
        assert (decision.action, decision.cause) == ("restart", "not_started")
        delays.append(decision.delay_s)
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    decision = after(ended([1], launch_error="srun: error"), *[was("not_started")] * 9)
    assert decision.action == "failed"
    said(decision.reason)
    # Nor does it hide failures before and after it.
    crashes = [was("crash", 10, step) for step in (11, 12, 13)]
    assert not after(
        ended([1], progress=10, step=14), *crashes[:2], was("not_started", 10), crashes[2]
    ).resumes


def test_waits_grow_while_nothing_new_is_saved():
    policy = RequeuePolicy(max_crashes=100)
    delays = []
    for count in range(9):
        past = [was("crash", 10, 11 + number) for number in range(count)]
        delays.append(after(ended([1], progress=10, step=90), *past, policy=policy).delay_s)
    assert delays == [0, 1, 2, 4, 8, 16, 32, 60, 60]


def test_cap_on_restarts():
    decision = after(ended([75], "SIGUSR2", "asked"), *[was("preempted", 1)] * 3, policy=RequeuePolicy(max=3))
    assert decision.action == "stopped"
    said(decision.reason)


def test_slices_end_with_their_total_and_are_no_restarts():
    policy = RequeuePolicy(max=1, total_s=7200.0)
    slices = [was("timeout", 1, 5), was("timeout", 2, 9)]
    end = ended([75], "SIGUSR2", "timeout", progress=3, step=12)
    assert after(end, *slices, policy=policy).action == "requeue"
    assert not after(end, *slices, policy=RequeuePolicy(max=1)).resumes
    assert not after(end, *slices, was("preempted"), policy=policy).resumes
    decision = after(replace(end, is_total_used=True), policy=policy)
    assert (decision.action, decision.exit_code) == ("stopped", 75)
    said(decision.reason)
    crash = after(ended([1], is_total_used=True), policy=policy)
    assert crash.action == "failed"
    said(crash.reason)


@pytest.mark.parametrize(
    ("codes", "expected"), [([0], 0), ([0, 75], 75), ([75, 3, 1], 3), ([1, 78], 78), ([0, 137], 137), ([], 0)]
)
def test_combine(codes, expected):
    assert combine_exit_codes(codes) == expected


def test_describe_exit():
    assert [describe_exit(code) for code in (3, 137, 255)] == ["exit code 3", "SIGKILL", "exit code 255"]


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
        # A person used scancel, or scancel --signal=TERM.
        ("SIGTERM", job(COMPLETING), True, None),
        ("SIGTERM", job(JobState.CANCELLED), True, None),
        ("SIGTERM", job(), False, None),
        ("SIGTERM", job(left_s=100), False, None),
        # Slurm does not answer.
        ("SIGTERM", None, False, "preempted"),
        ("SIGTERM", None, True, None),
        ("SIGINT", None, False, None),
        ("SIGUSR2", None, False, "timeout"),
    ],
)
def test_what_stood_behind_a_notice(request_name, found, shell, cause):
    assert cause_of(request_name, found, shell) == cause


def cause_of(name, found, shell, restarts=0, lost=False, **more):
    facts = {"supervisor_was_signalled": shell, "restarts": restarts, "lost": lost, **more}
    return termination_cause(name, found, 30.0, **facts)


def test_a_job_that_slurm_starts_again_for_a_lost_host():
    found = job(COMPLETING, restarts=3)
    assert cause_of("SIGTERM", found, True, restarts=2, lost=True) == "node_fail"
    assert cause_of("SIGTERM", found, True, restarts=3) is None


def test_an_early_notice_of_another_name():
    for left_s, shell, cause in ((100, False, "timeout"), (300_000, False, None), (100, True, None)):
        assert cause_of("SIGTERM", job(left_s=left_s), shell, notice="SIGTERM") == cause


def test_what_scontrol_prints():
    text = (
        "JobId=7 JobName=a JobState=FAILED Restarts=9 PreemptTime=1 UserId=root(0) GroupId=root(0)"
        " JobState=COMPLETING Reason=TimeLimit Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1"
        " EndTime=1790000000 PreemptEligibleTime=1780000000 PreemptTime=None BatchHost=node1"
        " Command=/x/JobState=RUNNING WorkDir=/y\n"
    )
    found = parse_job(text)
    assert (found.state, found.reason, found.restarts) == (COMPLETING, "TimeLimit", 2)
    assert (found.is_preempted, found.may_requeue) == (False, True)
    assert found.end_time == datetime.fromtimestamp(1790000000, timezone.utc)
    assert parse_job(text.replace("PreemptTime=None", "PreemptTime=1789999990")).is_preempted


@pytest.mark.parametrize(
    ("options", "action"),
    [(RestartOptions(restart=True), "restart"), (HERE, "requeue"), (RestartOptions(), "failed")],
)
def test_a_person_who_asks_for_another_attempt_gets_it_whatever_the_limits(options, action):
    past = [was("crash")] * 10
    end = after(ended([1]), *past, options=options)
    assert end.action == "failed"
    decision = decide_requested(end, past, options)
    assert (decision.action, decision.cause) == (action, "asked")
    said(decision.reason)
