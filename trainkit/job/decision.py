"""What happens after the workers have ended: a pure function of how, what was before and what is possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from trainkit.errors import EXIT_NO_RESTART, EXIT_OK, EXIT_STOPPED, EXIT_STUCK
from trainkit.job.exit_codes import describe_exit, is_death_by_notice
from trainkit.plan.launch import RequeuePolicy
from trainkit.rundir import COMEBACK_ACTIONS

COMEBACK_SIGNAL = "SIGUSR2"
"""Sent to a supervisor it means: save, stop, and start again."""

Action = Literal["finished", "stopped", "failed", "restart", "requeue", "resubmit", "follow_up"]
"""`restart` starts the step again inside the allocation, `requeue` the same job, `resubmit` a new job; for
`follow_up` one waits in the queue already."""

Cause = Literal["preempted", "timeout", "node_fail", "crash", "hang", "asked", "not_started"]
"""Why a run starts again: the words of `requeue.on`, `asked` when a person wants it, and `not_started` when
Slurm could not start the step, which is no failure of the run."""
FAILURES: tuple[Cause, ...] = ("node_fail", "crash", "hang")

SAME_STEP_ENDS = 3
"""So many ends in a row at the same checkpoint are no bad luck."""
MAX_DELAY_S = 60.0
MAX_STARTS = 10
"""So many starts in a row that Slurm could not make are enough; their waits come to four minutes."""


@dataclass(frozen=True)
class Failure:
    """What went wrong first, as far as it takes to see that it happened before."""

    what: str
    """Type and message."""
    step: int | None
    final: bool = False
    """Starting again cannot help: a module that is missing, a syntax error."""


@dataclass(frozen=True)
class AttemptResult:
    """How the workers of one attempt ended."""

    exit_codes: Sequence[int]
    """One a node or task."""
    request: str | None = None
    """The signal that asked them to stop."""
    cause: Cause | None = None
    """What stood behind the request; None when a person wants the job to end."""
    out_of_time: bool = False
    """Some did not end within the grace time."""
    not_started: bool = False
    """Slurm could not start the step."""
    hung: bool = False
    lost_nodes: tuple[str, ...] = ()
    """Hosts that do not answer any more."""
    mark: int = 0
    """How far the run has come: grows with what was saved."""
    step: int | None = None
    """The step at which it ended."""
    failure: Failure | None = None


@dataclass(frozen=True)
class PreviousAttempt:
    """An earlier attempt, since a person last started the run; its fields are those of `End`."""

    cause: Cause | None
    mark: int = 0
    step: int | None = None
    failure: Failure | None = None


@dataclass(frozen=True)
class RestartOptions:
    """The ways in which the run can start again at this moment."""

    restart: bool = False
    requeue: bool = False
    resubmit: bool = False
    follow_up: bool = False
    why_not: str = ""
    """Why there is none, for a person."""


@dataclass(frozen=True)
class Decision:
    """What the supervisor does next, and why in one sentence."""

    action: Action
    reason: str
    exit_code: int
    cause: Cause | None = None
    """Why it starts again, or what it failed of."""
    delay_s: float = 0.0
    """How long to wait before that."""

    @property
    def comes_back(self) -> bool:
        return self.action in COMEBACK_ACTIONS


def decide(
    end: AttemptResult, past: Sequence[PreviousAttempt], policy: RequeuePolicy, means: RestartOptions
) -> Decision:
    """Judge one attempt; `past` holds those before it, oldest first."""
    codes, tries = end.exit_codes, past
    past = [one for one in past if one.cause != "not_started"]
    if all(code == EXIT_OK for code in codes):
        return Decision("finished", "all workers finished", EXIT_OK)
    if EXIT_NO_RESTART in codes:
        return Decision("failed", "a worker says that starting again cannot help", EXIT_NO_RESTART)
    saved = all(code in (EXIT_OK, EXIT_STOPPED) for code in codes)
    if end.request is not None and (saved or end.out_of_time or _ended_as_asked(codes)):
        return _after_request(end, saved, past, policy, means)
    if saved:
        return Decision("stopped", "the workers saved and ended by themselves", EXIT_STOPPED)
    if end.not_started and not end.lost_nodes and end.request is None:
        return _after_no_start(end, tries, means)
    return _after_failure(end, past, policy, means)


def _after_no_start(end: AttemptResult, tries: Sequence[PreviousAttempt], means: RestartOptions) -> Decision:
    """Try again, more and more patiently; in `tries` are also the starts before that failed."""
    count = len(list(takewhile(lambda one: one.cause == "not_started", reversed(tries))))
    how = "Slurm could not start the step"
    if count + 1 >= MAX_STARTS:
        reason = f"{how} {count + 1} times in a row"
        return Decision("failed", reason, _failure_code(end), "not_started")
    delay_s = min(MAX_DELAY_S, 2.0**count)
    return _come_back(how, "not_started", _failure_code(end), tries, means, stays=True, delay_s=delay_s)


def _after_request(
    end: AttemptResult,
    saved: bool,
    past: Sequence[PreviousAttempt],
    policy: RequeuePolicy,
    means: RestartOptions,
) -> Decision:
    if saved:
        how = f"saved after {end.request}"
    elif end.out_of_time:
        how = f"killed: not all workers ended within the grace time after {end.request}"
    elif EXIT_STUCK in end.exit_codes:
        how = f"stuck: the workers left shortly before the grace time after {end.request} was over"
    else:
        how = f"ended by {end.request}, and no worker said that it saved"
    cause = end.cause
    if cause is None:
        return Decision("stopped", how, EXIT_STOPPED)
    how += _BECAUSE[cause]
    brake = _too_often(past, policy)
    if cause != "asked" and cause not in policy.on:
        brake = f"requeue.on leaves {cause} out"
    elif brake is None and cause == "timeout" and _stands_still(end, past):
        brake = f"{SAME_STEP_ENDS} times in a row the time was over at step {end.step}"
    if brake is not None:
        return Decision("stopped", f"{how}; not started again: {brake}", EXIT_STOPPED, cause)
    # What was asked to stop leaves the allocation, but for a person, who wants it to go on here and now.
    return _come_back(how, cause, EXIT_STOPPED, past, means, stays=cause == "asked" and not means.requeue)


_BECAUSE: dict[Cause, str] = {
    "preempted": " at a preemption",
    "timeout": " before the time limit",
    "node_fail": " when a node failed",
    "crash": "",
    "hang": "",
    "asked": "",
    "not_started": "",
}


def _after_failure(
    end: AttemptResult, past: Sequence[PreviousAttempt], policy: RequeuePolicy, means: RestartOptions
) -> Decision:
    cause: Cause = "node_fail" if end.lost_nodes else "hang" if end.hung else "crash"
    code = _failure_code(end)
    how = {
        "node_fail": f"lost {', '.join(end.lost_nodes)}",
        "hang": "no progress",
        "crash": f"a worker ended with {describe_exit(code)}",
    }[cause]
    brake = _brake(end, cause, past, policy)
    if brake is not None:
        return Decision("failed", f"{how}{brake and '; not started again: '}{brake}", code, cause)
    # An allocation that is being taken away is no place to start again in.
    stays = end.request is None
    return _come_back(how, cause, code, past, means, stays=stays, delay_s=_delay_s(end, past))


def _failure_code(end: AttemptResult) -> int:
    return next((code for code in end.exit_codes if code not in (EXIT_OK, EXIT_STOPPED)), EXIT_STUCK)


def _brake(
    end: AttemptResult, cause: Cause, past: Sequence[PreviousAttempt], policy: RequeuePolicy
) -> str | None:
    """Why a failure is the end; empty when that needs no words, None when it is not."""
    failure = end.failure
    if end.request is not None and end.cause is None:
        return ""  # a person wanted it to end
    if cause not in policy.on:
        return f"requeue.on leaves {cause} out" if policy.on else ""
    if failure is not None and failure.final:
        return "it would fail in the same way again"
    if failure is not None and past and _is_same(failure, end.mark, past[-1]):
        where = "" if failure.step is None else f" at step {failure.step}"
        return f"the same failure{where} as in the attempt before"
    crashes = len(_failures_without_progress(end, past))
    if crashes >= policy.max_crashes:
        return (
            f"requeue.max_crashes is {policy.max_crashes}, and nothing new was saved in"
            f" {crashes + 1} attempts"
        )
    if _stands_still(end, past):
        return f"{SAME_STEP_ENDS} attempts in a row ended at step {end.step}"
    return _too_often(past, policy)


def _is_same(failure: Failure, mark: int, before: PreviousAttempt) -> bool:
    """Whether an attempt failed as the one before; where the step is not known, with nothing new saved."""
    last = before.failure
    if last is None or (failure.what, failure.step) != (last.what, last.step):
        return False
    return failure.step is not None or mark == before.mark


def _too_often(past: Sequence[PreviousAttempt], policy: RequeuePolicy) -> str | None:
    if len(past) >= policy.max:
        return f"requeue.max is {policy.max} and it came back {len(past)} times"
    return None


def _failures_without_progress(end: AttemptResult, past: Sequence[PreviousAttempt]) -> list[PreviousAttempt]:
    """The failures before this one, as long as nothing new was saved."""
    return list(takewhile(lambda one: one.cause in FAILURES and one.mark == end.mark, reversed(past)))


def _stands_still(end: AttemptResult, past: Sequence[PreviousAttempt]) -> bool:
    """Whether it ended at one step again and again; a preemption is nobody's fault and does not count."""
    counted = [one for one in past if one.cause not in ("preempted", "asked")][1 - SAME_STEP_ENDS :]
    return (
        end.step is not None
        and len(counted) == SAME_STEP_ENDS - 1
        and all((one.mark, one.step) == (end.mark, end.step) for one in counted)
    )


def _delay_s(end: AttemptResult, past: Sequence[PreviousAttempt]) -> float:
    """How long to wait before the step is started again: longer from failure to failure."""
    failures = len(_failures_without_progress(end, past))
    return 0.0 if failures == 0 else min(MAX_DELAY_S, 2.0 ** (failures - 1))


def _come_back(
    how: str,
    cause: Cause,
    exit_code: int,
    past: Sequence[PreviousAttempt],
    means: RestartOptions,
    *,
    stays: bool,
    delay_s: float = 0.0,
) -> Decision:
    """The nearest way back that there is; `stays` prefers the allocation that the run has."""
    ways: list[tuple[Action, bool]] = [
        ("requeue", means.requeue),
        ("follow_up", means.follow_up),
        ("resubmit", means.resubmit),
    ]
    if stays:
        ways.insert(0, ("restart", means.restart))
    action = next((action for action, possible in ways if possible), None)
    if action is None:
        words: Action = "stopped" if exit_code == EXIT_STOPPED else "failed"
        return Decision(words, f"{how}; not started again: {means.why_not}", exit_code, cause)
    reason = f"{how}; starting again, comeback {len(past) + 1}"
    return Decision(action, reason, EXIT_STOPPED, cause, delay_s if action == "restart" else 0.0)


def _ended_as_asked(exit_codes: Sequence[int]) -> bool:
    """True when every worker that did not save died of the signal, or left because it was stuck."""
    return all(code in (EXIT_OK, EXIT_STOPPED, EXIT_STUCK) or is_death_by_notice(code) for code in exit_codes)
