"""Builds and explains the outcome of an attempt, based on what the attempt's supervisor observed."""

from __future__ import annotations

import signal
from dataclasses import replace

from trainkit.job.decision import Observed, Outcome, PlannedStop
from trainkit.job.failure.records import find_first_failure
from trainkit.job.signals import signal_exit_code
from trainkit.plan.launch import LaunchPlan
from trainkit.run.end import RankFailure
from trainkit.run.events import read_events
from trainkit.run.files import parse_time, seconds_between
from trainkit.run.rundir import AttemptDir

NOT_RUN = Outcome()
"""The outcome of an attempt that has not started any processes."""


def outcome_of(
    attempt: AttemptDir,
    plan: LaunchPlan,
    observed: Observed,
    *,
    cause: str | None = None,
    planned_stop: PlannedStop | None = None,
    lost_nodes: tuple[str, ...] = (),
    launch_error: str | None = None,
    failure: RankFailure | None = None,
    had_failed: bool = False,
) -> Outcome:
    """Return the outcome of an attempt whose processes have all exited.

    Pass `failure` if the caller has already determined the failure, and `planned_stop` if the value differs
    from `observed.planned_stop`.

    Raises OSError if the run folder cannot be read.
    """
    failure = failure or find_first_failure(attempt, plan, observed, lost_nodes, launch_error)
    return replace(
        only_observed(observed),
        cause=cause,
        planned_stop=planned_stop or observed.planned_stop,
        had_failed=had_failed,
        launch_error=launch_error,
        lost_nodes=lost_nodes,
        failure=failure,
        failed_after_signal=_is_after_signal(attempt, failure),
    )


def only_observed(observed: Observed) -> Outcome:
    """Return the outcome of an attempt using only the supervisor's observations."""
    return Outcome(
        exits=tuple(observed.exits),
        stop_signal=observed.stop_signal,
        planned_stop=observed.planned_stop,
        out_of_time=observed.out_of_time,
        moved_to=observed.moved_to,
        hung=bool(observed.hangs),
    )


def dead_outcome(failure: RankFailure, lost_host: str | None) -> Outcome:
    """Return the outcome of an attempt whose supervisor died.

    `lost_host` is the attempt's host if that host is lost, else None.
    """
    if lost_host is None:
        return Outcome(failure=failure)
    return Outcome(((0, signal_exit_code(signal.SIGKILL)),), lost_nodes=(lost_host,), failure=failure)


def without_cause(outcome: Outcome) -> Outcome:
    """Return the outcome without its cause, for a run that a user has cancelled."""
    return replace(outcome, cause=None)


def _is_after_signal(attempt: AttemptDir, failure: RankFailure | None) -> bool:
    """Return whether a failure happened after the attempt's first stop signal."""
    if failure is None:
        return False
    stop = next(read_events(attempt.run, "signal", attempt=attempt.number), None)
    since_s = seconds_between(None if stop is None else stop.time, parse_time(failure.time))
    return since_s is not None and since_s >= 0
