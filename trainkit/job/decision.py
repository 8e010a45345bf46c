"""Decides whether to restart, requeue or end a run after an attempt that ran, died or could not start.

This module neither reads nor writes files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from typing import get_args

from trainkit.errors import EXIT_FAILED, EXIT_NO_RESTART, EXIT_OK, EXIT_STOPPED, EXIT_STUCK
from trainkit.formats import plural, time_text
from trainkit.job.hangs import HangRecord
from trainkit.job.signals import describe_exit, is_death_by_stop_signal
from trainkit.plan.launch import RequeuePolicy
from trainkit.plan.workload import TRAINER, Workload
from trainkit.run.end import RESUME_ACTIONS, Action, AttemptEnd, Cause, RankFailure
from trainkit.run.tracebacks import is_quit
from trainkit.shipped import restart_cause

RESTART_SIGNAL = "SIGUSR2"
"""The signal that asks a supervisor to save the state, stop the ranks and restart the run."""

FAILURES: tuple[Cause, ...] = ("node_fail", "crash", "hang")

UNCOUNTED: tuple[Cause, ...] = ("preempted", "asked", "rollback")
"""Causes of a restart that `_makes_no_progress` ignores, in addition to the causes defined by
capabilities."""
MAX_ENDS_AT_STEP = 3
"""Number of consecutive attempts that may end at the same step without a new checkpoint before the run
fails."""
RANDOM_TYPES = ("Hang", "HostLost", "PreflightFailed", "OutOfMemory", "CheckpointError", "RankKilled")
"""Failure types that can occur twice in a row with the same message by coincidence."""
OWN_ERRORS = (
    "KeyError",
    "IndexError",
    "AttributeError",
    "NameError",
    "UnboundLocalError",
    "TypeError",
    "ValueError",
    "ZeroDivisionError",
    "NotImplementedError",
)
"""Suffixes of the names of exceptions that the same code would raise again; excludes errors caused by files,
peers and GPUs."""
_BY_CHANCE = re.compile(
    r"connect|time[d ]? ?out|temporar|unavailable|unreachable|reset|network|socket|http|NCCL|CUDA|gloo",
    re.IGNORECASE,
)
"""Matches exception messages that suggest a problem with the network, a peer or the hardware."""
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")
FIRST_STEP_S = 600.0
"""Seconds after which trainkit assumes that a command may have made progress."""
MAX_DELAY_S = 60.0
MAX_STARTS = 10
"""Number of times in a row that Slurm may fail to start the step before the run fails. The delays between ten
start attempts add up to four minutes."""


@dataclass(frozen=True)
class PlannedStop:
    """A stop planned by the supervisor, or requested because a host is being drained."""

    cause: str
    """``timeout`` if the run has used up its total time, ``preempted`` for a drained host, or a cause defined
    by a capability."""
    why: str
    """The reason, such as ``restarts without b: rank 5 has been slow since step 1200 (compute)``."""
    host: str | None = None
    """The drained host, or the host to exclude when the run continues; None to exclude no host."""


@dataclass
class Observed:
    """The observations of the supervisor about an attempt's processes, from start to exit."""

    stop_signal: str | None = None
    """The signal that asked the job to stop, or None."""
    supervisor_was_signalled: bool = False
    """True if the supervisor itself also received the stop signal (never for SIGUSR2). On a preemption, Slurm
    signals only the steps, not the supervisor."""
    planned_stop: PlannedStop | None = None
    """The stop that the supervisor planned, or None."""
    hangs: list[HangRecord] = field(default_factory=list)
    """The hang reports of the ranks. Hang reports are read before the ranks are killed: killing a peer
    unblocks a hanging rank, which then deletes its report."""
    killed_node: int | None = None
    """The node rank of the agent that was killed before any other process exited, or None."""
    step_may_still_run: bool = False
    """True if srun had to be killed; Slurm may then still consider the step running."""
    moved_to: str | None = None
    """The run folder's new path if the folder was moved, else None. Moving the folder ends the run."""
    out_of_time: bool = False
    """True if some processes were still running when the grace time expired."""
    exits: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of node rank and exit code, ordered by the time of the agent's exit."""

    @property
    def exit_codes(self) -> list[int]:
        return [code for _, code in self.exits]


@dataclass(frozen=True)
class Outcome:
    """The outcome of an attempt, including the supervisor's observations; created by `job/outcome.py`."""

    exits: tuple[tuple[int, int], ...] = ()
    """Pairs of node rank and exit code, ordered by the time of the agent's exit."""
    stop_signal: str | None = None
    """The signal that asked the job to stop, or None."""
    cause: str | None = None
    """The cause of the stop signal, or None if a user cancelled the job."""
    planned_stop: PlannedStop | None = None
    """The stop that the supervisor planned or that a drained host required, or None."""
    had_failed: bool = False
    """True if the ranks had already failed before the stop signal arrived, during the delay before a
    restart."""
    out_of_time: bool = False
    """True if some processes were still running when the grace time expired."""
    moved_to: str | None = None
    """The run folder's new path if the folder was moved, else None. Moving the folder ends the run."""
    launch_error: str | None = None
    """The error message of srun if Slurm could not start the step, else None."""
    lost_nodes: tuple[str, ...] = ()
    """The hosts that no longer respond."""
    hung: bool = False
    """True if any rank reported a hang."""
    failure: RankFailure | None = None
    """The first failure, or None if nothing failed or the failure is unknown."""
    failed_after_signal: bool = False
    """True if the first failure happened after the stop signal, which may have caused the failure."""

    @property
    def exit_codes(self) -> list[int]:
        return [code for _, code in self.exits]

    @property
    def has_saved(self) -> bool:
        """Return whether all workers' exit codes indicate success or a completed save.

        For a command, the exit codes are the only evidence of a save.
        """
        return bool(self.exits) and all(code in (EXIT_OK, EXIT_STOPPED) for code in self.exit_codes)

    @property
    def first_failed_node(self) -> int | None:
        """The node rank of the agent that failed first, or None."""
        return next((rank for rank, code in self.exits if code not in (EXIT_OK, EXIT_STOPPED)), None)


@dataclass(frozen=True)
class Standing:
    """The state of a run when one of its attempts ends."""

    previous: tuple[AttemptEnd, ...] = ()
    """The end records of the previous attempts, oldest first."""
    progress: int = 0
    """A number that increases with every checkpoint of the run."""
    step: int | None = None
    """The step at which the attempt ended, or None if unknown."""
    ran_s: float = 0.0
    """The duration of the attempt in seconds."""
    is_total_used: bool = False
    """True if the run has used up its total time limit."""
    workload: Workload = TRAINER
    """The kind of program run by the workers."""
    attended_in: str | None = None
    """The capability that may have given a user control of a rank in a terminal, or None."""
    rollback: str = ""
    """The rollback on which the ranks of the attempt decided, in words; empty if there was none."""
    is_done: bool = False
    """True if a command has reported that it is done, so that exit code 0 after a stop signal means
    "finished"."""


@dataclass(frozen=True)
class RestartOptions:
    """The currently available ways to restart the run."""

    restart: bool = False
    requeue: bool = False
    resubmit: bool = False
    follow_up: bool = False
    unavailable_reason: str = ""
    """The reason why the run cannot be restarted, which the decision's text includes; empty if the run can be
    restarted."""


@dataclass(frozen=True)
class Decision:
    """The next action of the supervisor, and the reason for it."""

    action: Action
    summary: str
    """A summary of how the attempt ended."""
    exit_code: int
    cause: str | None = None
    """The cause of the restart or failure, or None."""
    delay_s: float = 0.0
    """Seconds to wait before the restart."""
    details: str = ""
    """The second half of `reason`: what happens next, or why the run is not restarted."""
    hint: str | None = None
    """A hint on how to fix the failure; None if the failure message already includes a hint."""
    stopped_by: str | None = None
    """The value of `AttemptEnd.stopped_by`."""

    @property
    def reason(self) -> str:
        """Return `summary` and `details` joined into one sentence."""
        return "; ".join(filter(None, (self.summary, self.details)))

    @property
    def resumes(self) -> bool:
        """Return whether another attempt is started automatically."""
        return self.action in RESUME_ACTIONS


def decide(result: Outcome, run: Standing, policy: RequeuePolicy, options: RestartOptions) -> Decision:
    """Decide whether to restart, requeue or end a run after one of its attempts."""
    codes, starts = result.exit_codes, run.previous
    run = replace(run, previous=tuple(attempt for attempt in starts if attempt.cause != "not_started"))
    was_stopped = result.stop_signal is not None
    is_finished = run.workload.is_finished(was_stopped=was_stopped, is_done=run.is_done)
    if is_finished and all(code == EXIT_OK for code in codes):
        return Decision("finished", "all workers finished", EXIT_OK)
    saved = result.has_saved
    if result.moved_to is not None and not saved:
        reason = f"the run folder was moved to {result.moved_to}, and not all workers could save"
        return Decision("failed", reason, EXIT_FAILED)
    if run.attended_in is not None and result.failure is not None and is_quit(result.failure.type or ""):
        stopped_by = run.attended_in
        return Decision("stopped", f"stopped in the {stopped_by}", EXIT_STOPPED, stopped_by=stopped_by)
    if EXIT_NO_RESTART in codes:
        return Decision("failed", "a worker reported that a restart would not help", EXIT_NO_RESTART)
    # If a save fails after a cancellation, the run is considered failed.
    is_interrupted = result.failed_after_signal and result.cause is not None
    # A command may exit with any code if the stop signal killed one of its ranks.
    is_any_code = run.workload.is_command and not result.had_failed
    is_excused = is_any_code or result.out_of_time or is_interrupted
    # Unless `is_excused` is set, every worker must have saved, been killed by the signal, or exited because
    # it was stuck.
    expected = (EXIT_OK, EXIT_STOPPED, EXIT_STUCK)
    ended_on_signal = is_excused or all(code in expected or is_death_by_stop_signal(code) for code in codes)
    if was_stopped and (saved or ended_on_signal):
        return _after_request(result, run, policy, options)
    if saved and run.rollback:
        return _after_rollback(run, policy, options)
    if saved:
        return Decision("stopped", "the workers saved a checkpoint and exited by themselves", EXIT_STOPPED)
    if result.launch_error is not None and not result.lost_nodes and not was_stopped:
        summary = "Slurm could not start the step"
        return decide_no_start(summary, _failure_code(result), starts, options, in_place=True)
    return _after_failure(result, run, policy, options)


def decide_no_start(
    summary: str, code: int, starts: Sequence[AttemptEnd], options: RestartOptions, *, in_place: bool
) -> Decision:
    """Decide whether to retry a job or step that could not start.

    There are up to `MAX_STARTS` tries, with increasing delays. `in_place` means that the retry happens in the
    current allocation.

    `starts` contains the previous attempts, including attempts that could not start.
    """
    count = len(list(takewhile(lambda attempt: attempt.cause == "not_started", reversed(starts))))
    if count + 1 >= MAX_STARTS:
        return Decision("failed", f"{summary} {count + 1} times in a row", code, "not_started")
    delay_s = min(MAX_DELAY_S, 2.0**count)
    return _resume(summary, "not_started", code, starts, options, in_place=in_place, delay_s=delay_s)


def decide_requested(end: Decision, previous: Sequence[AttemptEnd], options: RestartOptions) -> Decision:
    """Return the decision to start another attempt at a user's request.

    Restart limits do not apply to this attempt.
    """
    summary = f"{end.summary}, and `trainkit requeue` requested another attempt"
    found = _resume(summary, "asked", end.exit_code, previous, options, in_place=not options.requeue)
    return replace(found, hint=end.hint)


def decide_stranded(decision: Decision, result: Outcome, problem: str) -> Decision:
    """Return the final decision after `decision` could not be carried out because of `problem`."""
    ended = replace(decision, action="stopped", details=not_again(problem))
    if decision.cause not in FAILURES:
        return ended
    # Exit code 75 (`EXIT_STOPPED`) would wrongly indicate that the state was saved.
    code = next((code for code in result.exit_codes if code not in (EXIT_OK, EXIT_STOPPED)), EXIT_FAILED)
    return replace(ended, action="failed", exit_code=code)


def decide_dead(result: Outcome, run: Standing, policy: RequeuePolicy) -> Decision:
    """Decide how to continue after an attempt whose supervisor died and whose job Slurm requeued.

    If no host was lost, Slurm may have preempted the job without grace time.
    """
    if result.lost_nodes:
        return decide(result, run, policy, RestartOptions(requeue=True))
    summary = "ended without a record: its host died, or its supervisor was killed"
    limit = restarts_limit(run.previous, policy)
    if limit is not None:
        return Decision("failed", summary, EXIT_FAILED, "node_fail", details=not_again(limit))
    return Decision("requeue", summary, EXIT_FAILED, "node_fail")


def not_again(why: str) -> str:
    """Return the `details` for a decision not to restart the run."""
    return f"not started again: {why}"


def _after_request(
    result: Outcome, run: Standing, policy: RequeuePolicy, options: RestartOptions
) -> Decision:
    saved = result.has_saved
    if saved and EXIT_STOPPED not in result.exit_codes:
        summary = f"exited with 0 after {result.stop_signal} without reporting that it is done"
    elif saved and not run.step and not run.workload.is_command:
        summary = f"ended by {result.stop_signal} before the first step"
    elif saved:
        summary = f"saved after {result.stop_signal}"
    elif result.out_of_time:
        summary = f"killed: not all workers exited within the grace time after {result.stop_signal}"
    elif EXIT_STUCK in result.exit_codes:
        summary = (
            f"stuck: the workers exited shortly before the grace time after {result.stop_signal} was over"
        )
    elif result.failed_after_signal and (failure := repeatable_failure(result.failure)) is not None:
        what = f"{failure.type}: {failure.message}"
        summary = f"failed after {result.stop_signal}, before all workers had saved: {what}"
    else:
        summary = f"ended by {result.stop_signal}, and no worker reported a save"
    if result.moved_to is not None:
        return Decision("stopped", f"{summary}: the run folder was moved to {result.moved_to}", EXIT_STOPPED)
    cause = result.cause
    if cause is None:
        stopped_by = result.stop_signal if saved or result.out_of_time else None
        return Decision("stopped", summary, EXIT_STOPPED, stopped_by=stopped_by)
    planned_stop = result.planned_stop
    is_drained = planned_stop is not None and planned_stop.cause == cause == "preempted"
    summary += f" while {planned_stop.why}" if planned_stop and is_drained else _BECAUSE.get(cause, "")
    stopped_by = f"drained {planned_stop.host}" if planned_stop and is_drained else None
    if planned_stop is not None and is_of_capability(cause):
        summary = planned_stop.why if saved else f"{planned_stop.why}; {summary}"
    limit = _total_limit(run, policy) or restarts_limit(run.previous, policy)
    if cause not in ("asked", *policy.on) and not is_of_capability(cause):
        limit = f"requeue.on does not include {cause}"
    elif limit is None and cause == "timeout" and _makes_no_progress(run):
        limit = f"the time limit was reached {MAX_ENDS_AT_STEP} times in a row at step {run.step}"
    if limit is not None:
        details = not_again(limit)
        return Decision("stopped", summary, EXIT_STOPPED, cause, details=details, stopped_by=stopped_by)
    # After a stop signal, a job stays in its allocation only if the stop serves to exclude one host, or if a
    # user requested a restart and the job cannot be requeued.
    in_place = restart_cause(cause).in_place or (cause == "asked" and not options.requeue)
    found = _resume(summary, cause, EXIT_STOPPED, run.previous, options, in_place=in_place)
    return replace(found, stopped_by=stopped_by)


_BECAUSE = {
    "preempted": " at a preemption",
    "timeout": " before the time limit",
    "node_fail": " when a node failed",
}


def _after_rollback(run: Standing, policy: RequeuePolicy, options: RestartOptions) -> Decision:
    summary = f"the run {run.rollback}"
    limit = _total_limit(run, policy) or restarts_limit(run.previous, policy)
    if limit is not None:
        return Decision("stopped", summary, EXIT_STOPPED, "rollback", details=not_again(limit))
    return _resume(summary, "rollback", EXIT_STOPPED, run.previous, options, in_place=True)


def _after_failure(
    result: Outcome, run: Standing, policy: RequeuePolicy, options: RestartOptions
) -> Decision:
    cause: Cause = "node_fail" if result.lost_nodes else "hang" if result.hung else "crash"
    code = _failure_code(result)
    summary = {
        "node_fail": f"lost {', '.join(result.lost_nodes)}",
        "hang": "no progress",
        "crash": f"a worker ended with {describe_exit(code)}",
    }[cause]
    limit = _restart_limit(result, cause, run, policy)
    if limit is not None:
        return Decision("failed", summary, code, cause, details=limit and not_again(limit))
    # After a stop signal, the allocation is about to be revoked, which leaves no time for another attempt.
    in_place = result.stop_signal is None
    # The delay doubles with every consecutive failure that made no progress.
    failures = _num_failures_without_progress(run)
    delay_s = 0.0 if failures == 0 else min(MAX_DELAY_S, 2.0 ** (failures - 1))
    return _resume(summary, cause, code, run.previous, options, in_place=in_place, delay_s=delay_s)


def _failure_code(result: Outcome) -> int:
    return next((code for code in result.exit_codes if code not in (EXIT_OK, EXIT_STOPPED)), EXIT_STUCK)


def _restart_limit(result: Outcome, cause: Cause, run: Standing, policy: RequeuePolicy) -> str | None:
    """Return why a run is not restarted after a failure, or None if a restart is allowed.

    The result is "" if the reason is obvious.
    """
    failure = repeatable_failure(result.failure)
    if result.stop_signal is not None and result.cause is None:
        return ""  # a user requested that the run end
    if cause not in policy.on:
        return f"requeue.on does not include {cause}" if policy.on else ""
    if failure is not None and failure.final:
        return "the run would fail again in the same way"
    if failure is not None and _is_own_error(failure, run):
        where = "" if failure.code is None else f" in {failure.code.place}"
        return f"{str(failure.type).rpartition('.')[2]}{where} before the first step would be raised again"
    if failure is not None and run.previous and _is_same(failure, run.progress, run.previous[-1]):
        where = "" if failure.step is None else f" at step {failure.step}"
        return f"the same failure{where} as in the previous attempt"
    crashes = _num_failures_without_progress(run)
    if crashes >= policy.max_crashes:
        attempts = plural(crashes + 1, "attempt")
        return f"requeue.max_crashes is {policy.max_crashes}, and {attempts} saved nothing new"
    if _makes_no_progress(run):
        return f"{MAX_ENDS_AT_STEP} attempts in a row ended at step {run.step}"
    return _total_limit(run, policy) or restarts_limit(run.previous, policy)


def is_of_capability(cause: str | None) -> bool:
    """Return whether a restart's cause is defined by a capability and is therefore not a failure."""
    return cause is not None and cause not in get_args(Cause)


def repeatable_failure(failure: RankFailure | None) -> RankFailure | None:
    """Return the failure if the run itself causes it; None if its cause is external or random."""
    if failure is None or failure.was_signalled or (failure.type in RANDOM_TYPES and not failure.final):
        return None
    return failure


def _is_own_error(failure: RankFailure, run: Standing) -> bool:
    """Return whether the user's code raised a deterministic exception before the run made any progress."""
    has_begun = run.progress or run.step or run.ran_s > FIRST_STEP_S
    has_run = any(end.mark or end.step or end.cause not in FAILURES for end in run.previous)
    is_own = failure.code is not None or run.workload.is_command
    return (
        is_own
        and not (has_begun or has_run)
        and failure.exit_code in (None, EXIT_FAILED)
        and str(failure.type).endswith(OWN_ERRORS)
        and not _BY_CHANCE.search(str(failure.message))
    )


def _is_same(failure: RankFailure, progress: int, before: AttemptEnd) -> bool:
    """Return whether the previous attempt ended with the same failure.

    If the step of the failure is unknown, the failures are the same only if both attempts made the same
    progress.
    """
    last = repeatable_failure(before.verdict)
    if last is None or _what(failure) != _what(last):
        return False
    return failure.step is not None or progress == (before.mark or 0)


def _what(failure: RankFailure) -> tuple[object, ...]:
    # Compare only exit codes, because the output of a crashing process may contain timestamps and addresses.
    is_code = failure.type == "exit" and failure.exit_code is not None
    message = _ADDRESS.sub("", str(failure.message))
    return failure.type, failure.step, failure.exit_code if is_code else message


def _total_limit(run: Standing, policy: RequeuePolicy) -> str | None:
    if not run.is_total_used or policy.total_s is None:
        return None
    total = time_text(int(policy.total_s))
    return f"the run has used up the {total} of resources.time; `trainkit resume` grants the same time again"


def restarts_limit(previous: Sequence[AttemptEnd], policy: RequeuePolicy) -> str | None:
    """Return a message if the run has used up its `requeue.max` restarts, else None."""
    # A time slice that ends with a saved checkpoint does not use up a restart.
    progress = [0, *(end.mark or 0 for end in previous)]
    ends = zip(previous, pairwise(progress), strict=True)
    count = sum(policy.total_s is None or end.cause != "timeout" or now <= was for end, (was, now) in ends)
    if count < policy.max:
        return None
    return f"requeue.max is {policy.max}, and the run has restarted {plural(count, 'time')}"


def _num_failures_without_progress(run: Standing) -> int:
    """Return the number of consecutive failures without a new checkpoint, excluding the current failure."""
    alike = (end.cause in FAILURES and (end.mark or 0) == run.progress for end in reversed(run.previous))
    return len(list(takewhile(bool, alike)))


def _makes_no_progress(run: Standing) -> bool:
    """Return whether the last MAX_ENDS_AT_STEP attempts all ended at the same step.

    Attempts that ended because of a preemption or at a user's request are ignored.
    """
    counted = [end for end in run.previous if end.cause not in UNCOUNTED and not is_of_capability(end.cause)]
    counted = counted[1 - MAX_ENDS_AT_STEP :]
    return (
        run.step is not None
        and len(counted) == MAX_ENDS_AT_STEP - 1
        and all((end.mark or 0, end.step) == (run.progress, run.step) for end in counted)
    )


def _resume(
    summary: str,
    cause: str,
    exit_code: int,
    previous: Sequence[AttemptEnd],
    options: RestartOptions,
    *,
    in_place: bool,
    delay_s: float = 0.0,
) -> Decision:
    """Return the decision to resume the run with the first available action in `RESUME_ACTIONS`.

    `in_place` allows a restart in the current allocation.
    """
    ways = RESUME_ACTIONS if in_place else RESUME_ACTIONS[1:]
    action = next((way for way in ways if getattr(options, way)), None)
    if action is None:
        end: Action = "stopped" if exit_code == EXIT_STOPPED else "failed"
        return Decision(end, summary, exit_code, cause, details=not_again(options.unavailable_reason))
    delay_s = delay_s if action == "restart" else 0.0
    return Decision(action, summary, EXIT_STOPPED, cause, delay_s, f"resumes (restart {len(previous) + 1})")
