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
    progress: int = 0
    step: int | None = 1
    ran_s: float = 0.0
    is_total_used: bool = False
    workload: Workload = TRAINER
    attended_in: str | None = None
    rollback: str = ""
    is_done: bool = False


def ended(codes, stop_signal=None, cause=None, **more):
    return Ended(tuple(enumerate(codes)), stop_signal, cause, **more)


def after(end, *past, policy=POLICY, options=HERE):
    known = {field.name: getattr(end, field.name) for field in fields(Standing) if field.name != "previous"}
    return decide(end, Standing(past, **known), policy, options)


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


QUIT = RankFailure(type="bdb.BdbQuit")
PDB = {"attended_in": "debugger"}
FINAL = RankFailure(type="ImportError", message="no x", final=True)
UNKNOWN = RankFailure(type="exit", message="ended with exit code 1")
LOADER = RankFailure(type="MyError", message="no <Loader at 0x7f12>", exit_code=1)
SLOW = {"planned_stop": PlannedStop("slow_host", "restarts without node3: rank 5 slow")}
NO_CRASH = {"policy": RequeuePolicy(max_crashes=0)}
NEVER = {"policy": RequeuePolicy(on=(), max=0, max_crashes=0)}
LATE = {"failure": NAN, "failed_after_signal": True}
LIMIT = {"policy": RequeuePolicy(max=1)}
SLICES = {"policy": RequeuePolicy(max=1, total_s=7200.0)}
NEVER_ON = {"policy": RequeuePolicy(on=())}
MANY = {"policy": RequeuePolicy(max_crashes=10)}
IN_PLACE = RestartOptions(restart=True)
REQUEUE, RESUBMIT = RestartOptions(requeue=True), RestartOptions(resubmit=True)
AT_14 = {"progress": 10, "step": 14}
CRASHES = [was("crash", 10, step) for step in (11, 12, 13)]
AT_12 = {"progress": 3, "step": 12}
AT_15 = [was("hang", 10, 15), was("crash", 10, 15)]
AT_10 = {"progress": 10, "step": 10}
MOVED = replace(LOADER, message="no <Loader at 0x7fff>")
SLICE = [was("timeout", 1, 5), was("timeout", 2, 9)]
HAD_FAILED = {"workload": COMMAND, "had_failed": True}
OTHER = was("crash", 0, 37, replace(NAN, type="other"))
BEFORE = was("crash", 5, None, UNKNOWN)
PREEMPTED = was("preempted", 10, 10)
EVERY_WAY = RestartOptions(restart=True, requeue=True, resubmit=True, follow_up=True)


def saved(cause, stop_signal="SIGUSR2", **more):
    return ended([75], stop_signal, cause, **more)


@pytest.mark.parametrize(
    ("end", "stopped_by"),
    [
        (ended([75], "SIGTERM"), "SIGTERM"),  # a user sent the signal
        (ended([137], "SIGINT", out_of_time=True), "SIGINT"),
        (ended([1], "SIGTERM", workload=COMMAND), None),  # the command may have failed
        (saved("preempted", planned_stop=PlannedStop("preempted", "n3 is drained", "n3")), "drained n3"),
        (saved("preempted"), None),
        (saved("slow_host", **SLOW), None),
        (ended([1, 143], failure=QUIT, **PDB), "debugger"),
        (ended([0]), None),
    ],
)
def test_what_stopped_an_attempt(end, stopped_by):
    assert after(end).stopped_by == stopped_by
    assert after(end, policy=RequeuePolicy(max=0)).stopped_by == stopped_by  # and if the run does not resume


def crashed(**more):
    return ended([1], **more)


def test_decisions():
    lines = []

    def case(name, end, *past, **given):
        found = after(end, *past, **given)
        lines.append(f"{name}: {found.action} ({found.cause}) with {found.exit_code}: {found.reason}")

    case("a trainer without a step has not saved", ended([75, 75], "SIGINT", step=None))
    case("a trainer at step 0 has not saved", ended([75, 75], "SIGINT", step=0))
    case("a command without a step has saved", ended([75], "SIGINT", step=None, workload=COMMAND))
    # The debugger belongs to a script, as its log shows, or to a task.
    case("a person quits the debugger", ended([1, 143], failure=QUIT, **PDB))
    case("a person quits pdb", ended([1, 143], failure=replace(QUIT, type="BdbQuit"), **PDB))
    case("a pdb has found no terminal", ended([1, 143], failure=QUIT))
    # A rank without a handler dies of the signal, and its peers then fail because the rank is dead.
    case("a preempted command fails", ended([1, 143], "SIGTERM", "preempted", workload=COMMAND))
    case("a cancelled command fails", ended([1, 143], "SIGTERM", workload=COMMAND))
    case("a command fails as requested", ended([1, 143], "SIGTERM", "asked", workload=COMMAND))
    case("a command fails by itself", crashed(workload=COMMAND))
    case("a command wants no other attempt", ended([78], "SIGTERM", "preempted", workload=COMMAND))
    case("a command failed before its preemption", ended([137], "SIGTERM", "preempted", **HAD_FAILED))
    case("a command failed before a cancellation", ended([137], "SIGTERM", **HAD_FAILED))
    # A command that exits with 0 after a stop signal has saved, unless it has said that it is done.
    case("a command ends with 0", ended([0, 0], workload=COMMAND))
    case("a preempted command ends with 0", ended([0, 0], "SIGTERM", "preempted", workload=COMMAND))
    case("a command out of time ends with 0", ended([0, 0], "SIGUSR2", "timeout", workload=COMMAND))
    case("a cancelled command ends with 0", ended([0, 0], "SIGTERM", workload=COMMAND))
    case("a preempted command is done", ended([0], "SIGTERM", "preempted", workload=COMMAND, is_done=True))
    case("killed", ended([137]))
    case("hung", ended([143], hung=True))
    case("hung without a node", ended([143], hung=True, lost_nodes=("n2",)))
    case("preempted", saved("preempted", "SIGTERM"))
    case("out of time", saved("timeout"))
    case("preempted and killed", ended([137], "SIGTERM", "preempted", out_of_time=True))
    case("a crash restarts in place", crashed(), options=EVERY_WAY)
    case("a crash requeues", crashed(), options=replace(EVERY_WAY, restart=False))
    case("a crash has a follow-up", crashed(), options=RestartOptions(resubmit=True, follow_up=True))
    case("a crash submits again", crashed(), options=RESUBMIT)
    case("a crash has no way back", ended([9]), options=RestartOptions(unavailable_reason="no scontrol"))
    case("a preempted save fails", ended([1, 75], "SIGTERM", "preempted", **LATE), **NO_CRASH)
    case("a requested save fails", ended([1, 75], "SIGTERM", "asked", **LATE), **NO_CRASH)
    case("a cancelled save fails", ended([1, 75], "SIGTERM", **LATE), **NO_CRASH)
    case("a failure before a preemption", ended([1, 75], "SIGTERM", "preempted", failure=NAN), **NO_CRASH)
    case("a failure before a request", ended([1, 75], "SIGTERM", "asked", failure=NAN), **NO_CRASH)
    case("preempted nodes are no place to restart", saved("preempted", "SIGTERM"), options=IN_PLACE)
    case("a preempted failure requeues", ended([1], "SIGTERM", "preempted"))
    back = ended([75, 75], rollback="went back from step 9 to step 4")
    case("a rollback restarts in place", back, **NEVER_ON)
    case("a rollback in another allocation", back, options=RestartOptions(requeue=True))
    case("a rollback that cannot restart", back, options=RestartOptions(unavailable_reason="it is here"))
    case("too many rollbacks", back, *[was("rollback")] * 2, policy=RequeuePolicy(max=2))
    case("a rollback and a cancellation", replace(back, stop_signal="SIGTERM"))
    case("a rollback after which a rank crashed", replace(back, exits=((0, 75), (1, 1)), failure=NAN))
    case("a request restarts in place", saved("asked"), options=IN_PLACE)
    case("a request is above requeue.on", saved("asked"), **NEVER_ON)
    for cause, end in (
        *(("preempted", saved("preempted", "SIGTERM")), ("timeout", saved("timeout")), ("crash", crashed())),
        *(("hang", crashed(hung=True)), ("node_fail", crashed(lost_nodes=("n1",)))),
    ):
        others = tuple(word for word in POLICY.on if word != cause)
        case(f"requeue.on without {cause}", end, policy=RequeuePolicy(on=others))
        case(f"requeue.on is {cause}", end, policy=RequeuePolicy(on=(cause,)))
    case("a spare host", saved("slow_host", **SLOW), **NEVER_ON)
    case("no spare host", saved("slow_host", **SLOW), **NEVER_ON, options=REQUEUE)
    case("a preemption while a slow host is left", saved("preempted", **SLOW))
    case("slow hosts are no lack of progress", crashed(step=9), *[was("slow_host", step=9)] * 2)
    case("the same failure at the same step", crashed(failure=NAN, progress=30), was("crash", 20, 37, NAN))
    case("the same failure at another step", crashed(failure=NAN), was("crash", 0, 36, replace(NAN, step=36)))
    case("another failure at the same step", crashed(failure=NAN), OTHER)
    # A different end between the two shows that the failure is an accident.
    case("a preemption between the two", crashed(failure=NAN), was("crash", 0, 37, NAN), was("preempted", 30))
    case("an unknown step, no save between", crashed(failure=UNKNOWN, progress=5), BEFORE)
    case("an unknown step, a save between", crashed(failure=UNKNOWN, progress=6), BEFORE)
    case("cannot get better", crashed(failure=FINAL))
    case("an exception before any progress", crashed(failure=LOADER, step=None))
    case("the same one at another address", crashed(failure=LOADER, step=None), was("crash", failure=MOVED))
    case("three crashes that saved nothing", crashed(**AT_14), *CRASHES[:2])
    case("four crashes that saved nothing", crashed(**AT_14), *CRASHES)
    case("three crashes and a save", crashed(progress=20, step=24), *CRASHES)
    case("three ends at one step", crashed(progress=10, step=15), *AT_15, **MANY)
    case("two ends at one step", crashed(progress=10, step=16), *AT_15, **MANY)
    case("three time limits at one step", saved("timeout", **AT_10), *[was("timeout", 10, 10)] * 2)
    case("ten preemptions at one step", saved("preempted", "SIGTERM", **AT_10), *[PREEMPTED] * 9)
    case("nine starts that failed", crashed(launch_error="srun: error"), *[was("not_started")] * 8, **NEVER)
    case("ten starts that failed", crashed(launch_error="srun: error"), *[was("not_started")] * 9, **NEVER)
    failed_start = was("not_started", 10)
    case("a failed start hides no crashes", crashed(**AT_14), *CRASHES[:2], failed_start, CRASHES[2])
    case("the cap on restarts", saved("asked"), *[was("preempted", 1)] * 3, policy=RequeuePolicy(max=3))
    case("slices are no restarts", saved("timeout", **AT_12), *SLICE, **SLICES)
    case("time limits without a total are restarts", saved("timeout", **AT_12), *SLICE, **LIMIT)
    between = [*SLICE, was("preempted")]
    case("a preemption between slices is a restart", saved("timeout", **AT_12), *between, **SLICES)
    case("the total of slices is used", saved("timeout", is_total_used=True), **SLICES)
    case("a crash with the total used", crashed(is_total_used=True), **SLICES)
    said("\n".join(lines))


@pytest.mark.parametrize("cause", ["grow", "toy"])
def test_a_capability_stops_a_run_for_its_own_cause(cause):
    """The cause `toy` belongs to a capability of another package."""
    planned_stop = PlannedStop(cause, "restarts without node3: rank 5 slow")
    decision = after(saved(cause, planned_stop=planned_stop), **NEVER_ON)
    assert (decision.action, decision.cause, decision.exit_code) == ("requeue", cause, 75)


def test_delays_grow_while_nothing_new_is_saved_or_no_step_starts():
    crashes = [was("crash", 10, 11 + number) for number in range(8)]
    end, policy = crashed(progress=10, step=90), RequeuePolicy(max_crashes=100)
    delays = [after(end, *crashes[:count], policy=policy).delay_s for count in range(9)]
    assert delays == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    end, failed = crashed(launch_error="srun: error"), [was("not_started")]
    assert [after(end, *failed * count, **NEVER).delay_s for count in range(9)] == [*delays[1:], 60]


def test_the_limit_counts_restarts_for_slow_hosts():
    said(restarts_limit([was("preempted"), was("slow_host", step=9)], RequeuePolicy(max=2)))


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
