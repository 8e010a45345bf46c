"""Decides how to continue after an attempt has ended, and reads and writes end.json files."""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from itertools import chain, islice
from shlex import quote

from trainkit.job.attempt import Attempt
from trainkit.job.decision import FAILURES, Decision, Outcome, RestartOptions, Standing, decide, decide_dead
from trainkit.job.failure.records import (
    agent_failure,
    dead_host_failure,
    first_rank_failure,
)
from trainkit.job.outcome import NOT_RUN, dead_outcome, without_cause
from trainkit.job.signals import signal_exit_code
from trainkit.plan.launch import RequeuePolicy
from trainkit.run.end import KILLED, AttemptEnd, RankFailure, read_end
from trainkit.run.events import Entry, best_result, log_event
from trainkit.run.files import parse_time, read_jsonl_reversed, seconds_between, to_json, utc_now
from trainkit.run.record import AttemptRecord, JobRecord, read_job
from trainkit.run.rollbacks import checkpoints_in_line, read_rollbacks
from trainkit.run.rundir import AttemptDir

LONG_ATTEMPT_S = 1800.0
"""For a run without checkpoints, an attempt is considered progress if it ran for at least this many
seconds."""
LATE_RECORDS = 1000
"""Number of metrics records, starting with the newest, that are searched for the last step of an attempt. The
newest records may already belong to the next attempt."""


def judge(live: Attempt, options: RestartOptions) -> Decision:
    """Decide whether to restart the run after an attempt ended, based on the last read of job.json."""
    attempt, plan, outcome = live.folder, live.plan, live.outcome
    killed, failure = signal_exit_code(signal.SIGKILL), outcome.failure
    if (entry := live.entry).is_cancelled:
        # scancel sends SIGTERM before SIGKILL, so the attempt may also have recorded a stop signal.
        if entry.cancelled_now and killed in outcome.exit_codes:
            return Decision("stopped", KILLED, killed)
        outcome = without_cause(outcome)
    standing = Standing(
        previous=tuple(previous_ends(attempt, live.job).values()),
        progress=progress_of(attempt, entry),
        step=last_step(attempt, failure),
        workload=plan.workload,
        attended_in=plan.attended_in or attempt.attended_in,
        rollback=_rollback_of(attempt),
        is_done=attempt.done_file.exists(),
        ran_s=_duration_s(attempt, entry),
        # Do not start another attempt if the remaining time is only long enough for a save.
        is_total_used=remaining_s(live) <= plan.grace_s,
    )
    decision = decide(outcome, standing, plan.requeue, options)
    if decision.action != "failed" or failure is None or not failure.code or failure.final:
        return decision
    again = f"trainkit resume {quote(str(attempt.run.path))}"
    hint = f"`{again} --new-code` after fixing the code; without --new-code, the same code runs again"
    return replace(decision, hint=hint)


def _rollback_of(attempt: AttemptDir) -> str:
    """Return the rollback on which the ranks of an attempt decided, in words; "" if there was none."""
    newest = next(reversed(read_rollbacks(attempt.run)), None)
    is_own = newest is not None and newest.is_automatic and newest.attempt == attempt.number
    return newest.describe() if newest is not None and is_own else ""


def is_requeue_requested(live: Attempt) -> bool:
    """Return whether a user requested another attempt; False if this attempt was cancelled or superseded."""
    is_asked = live.entry.requeue_requested_at is not None and not live.entry.is_cancelled
    return is_asked and live.superseding is None


def close_dead_attempts(
    live: Attempt, policy: RequeuePolicy, is_down: Callable[[str], bool]
) -> Decision | None:
    """Write end.json for this job's earlier attempts whose host died before the supervisor could write it.

    Slurm requeues a job every time its host dies, so this function must stop runs that keep crashing their
    hosts. If the failures of the dead attempts rule out a restart, copies their outcome to `live` and returns
    the decision to end `live`. Returns None if a restart is allowed.

    `is_down(host)` returns whether a host is currently down. If the host of a dead attempt is up, the attempt
    may have died because Slurm preempted the job without grace time.
    """
    attempt, entries = live.folder, live.job.attempts
    job_ids = {entry.job_id for entry in entries if entry.attempt == attempt.number}
    refusal = None
    for entry in entries:
        dead = attempt.run.attempt(entry.attempt)
        if dead.number < attempt.number and entry.job_id in job_ids and not dead.end_file.exists():
            host = str(entry.node or "")
            ends = previous_ends(attempt, live.job).items()
            previous = tuple(end for number, end in ends if number < dead.number)
            lost_host = host if host and is_down(host) else None
            # If a host was lost, errors of ranks on other hosts are only consequences of the loss.
            failure = first_rank_failure(dead) if lost_host is None else None
            failure = failure or dead_host_failure(host, last_log_write(dead))
            outcome = dead_outcome(failure, lost_host)
            standing = Standing(previous, progress_of(dead, entry), last_step(dead, None))
            decision = decide_dead(outcome, standing, policy)
            write_end(dead, entry, outcome, decision, guessed=lost_host is None)
            refusal = decision if decision.action == "failed" else None
            live.outcome = NOT_RUN if refusal is None else outcome
    return refusal


def write_end(
    attempt: AttemptDir,
    entry: AttemptRecord,
    outcome: Outcome,
    decision: Decision,
    *,
    guessed: bool = False,
) -> AttemptEnd:
    """Write the attempt's end and the decision about the run to end.json and events.jsonl. Raises OSError.

    `entry` is the attempt's entry in job.json. `guessed` means that the attempt left no end record, so its
    outcome was inferred.
    """
    run, number = attempt.run, attempt.number
    failure = None
    if decision.action == "failed" or decision.cause in FAILURES:
        failure = outcome.failure or agent_failure(outcome.first_failed_node, decision.summary)
        failure = replace(failure, hint=failure.hint or decision.hint)
    best = None
    with contextlib.suppress(OSError):  # write end.json even if the metrics cannot be read
        best = best_result(run)
    # Write end.json before the events, because the events only repeat the content of end.json.
    state = state_after(entry, decision)
    end = AttemptEnd(
        state=state,
        action=decision.action,
        cause=decision.cause,
        exit_code=decision.exit_code,
        reason=decision.reason,
        verdict=failure,
        mark=progress_of(attempt, entry),
        step=last_step(attempt, failure),
        best=best,
        guessed=guessed,
        summary=decision.summary if decision.details else None,
        stopped_by=decision.stopped_by,
        saved=decision.action != "finished" and outcome.has_saved,
        time=utc_now(),
    )
    end.write(attempt)
    if failure is not None:
        values = to_json(replace(failure, log_tail=[]))
        failed_at = values.pop("time")
        log_event(run, number, "rank_failed", **values, failed_at=failed_at)
    if outcome.hung:
        log_event(run, number, "hang", message=None if failure is None else failure.message)
    if decision.cause is not None:
        fields = {"action": decision.action, "cause": decision.cause, "reason": decision.reason}
        log_event(run, number, "requeue_decision", **fields, delay_s=decision.delay_s)
    event = "finished" if state == "finished" else "stopped"
    log_event(run, number, event, state=state, exit_code=decision.exit_code, reason=decision.reason)
    return end


def state_after(entry: AttemptRecord, decision: Decision) -> str:
    """Return the state of a run, given the `decision` about its newest attempt."""
    if decision.action == "finished":
        return "finished"
    if decision.resumes:
        return "failed" if decision.cause in FAILURES else "stopped"
    return "cancelled" if entry.is_cancelled else str(decision.action)


def previous_ends(attempt: AttemptDir, job: JobRecord | None = None) -> dict[int, AttemptEnd]:
    """Return the end records of earlier attempts, keyed by attempt number, oldest first.

    Only attempts since a command last started the run are included. `job` is the content of the run's
    job.json if the caller has already read it.
    """
    run = attempt.run
    job = job or read_job(run)
    earlier = [number for number in run.attempt_numbers() if number < attempt.number]
    found = {}
    for number in earlier[len(earlier) - job.num_auto_restarts :]:
        one = run.attempt(number)
        # If no end was recorded, the host died before the supervisor could write end.json.
        if (end := read_end(one)) is None:
            end = AttemptEnd(cause="node_fail", mark=progress_of(one, job.of_attempt(number)))
        found[number] = end
    return found


def progress_of(attempt: AttemptDir, entry: AttemptRecord) -> int:
    """Return the step of the run's newest checkpoint, or the number of long attempts if nothing was saved.

    `entry` is the attempt's entry in job.json.
    """
    checkpoints = checkpoints_in_line(attempt.run)
    if checkpoints:
        return checkpoints[-1].step
    earlier = [number for number in attempt.run.attempt_numbers() if number < attempt.number]
    last = read_end(attempt.run.attempt(earlier[-1])) if earlier else None
    return ((last and last.mark) or 0) + (_duration_s(attempt, entry) >= LONG_ATTEMPT_S)


def reached_its_stop(attempt: AttemptDir) -> bool:
    """Return whether the newest checkpoint is at `train.stop_at_step`, the step at which the run pauses."""
    checkpoints = checkpoints_in_line(attempt.run)
    if not checkpoints:
        return False
    # Import lazily: the import is slow, and most attempts do not need the module.
    from trainkit.config import read_effective

    return read_effective(attempt.config_file).train.stop_at_step == checkpoints[-1].step


def remaining_s(live: Attempt) -> float:
    """Return the seconds until the ranks must save to keep the run within its total time limit.

    Returns infinity if the run has no total time limit.
    """
    attempt, plan = live.folder, live.plan
    if plan.requeue.total_s is None:
        return math.inf
    own = [*map(attempt.run.attempt, previous_ends(attempt, live.job)), attempt]
    used_s = sum(_duration_s(one, live.job.of_attempt(one.number)) for one in own)
    return plan.requeue.total_s - used_s - plan.grace_s


def _duration_s(attempt: AttemptDir, entry: AttemptRecord) -> float:
    """Return the duration of an attempt in seconds.

    Without an end record, the duration is measured up to the attempt's last log write.
    """
    is_newest = attempt.number >= max(attempt.run.attempt_numbers(), default=0)
    ended = None if is_newest else read_end(attempt)
    end = parse_time(None if ended is None else ended.time) or last_log_write(attempt)
    end = datetime.now(timezone.utc) if is_newest else end
    return seconds_between(entry.started_at or entry.submitted_at, end) or 0.0


def last_log_write(attempt: AttemptDir) -> datetime | None:
    """Return the time of the last write to any of the attempt's logs, or None if there are no logs."""
    logs = (attempt.supervisor_log, *attempt.logs_dir.glob("*"))
    times = [log.stat().st_mtime for log in logs if log.is_file()]
    return datetime.fromtimestamp(max(times), timezone.utc) if times else None


def last_step(attempt: AttemptDir, failure: RankFailure | None) -> int | None:
    """Return the step at which an attempt failed or, if unknown, the last step that was logged or saved."""
    if failure is not None and failure.step is not None:
        return failure.step
    files = (attempt.run.metrics_file, attempt.run.events_file)
    newest = chain.from_iterable(islice(read_jsonl_reversed(file), LATE_RECORDS) for file in files)
    steps = (record.count("step") for record in map(Entry, newest) if record.attempt == attempt.number)
    return max((step for step in steps if step is not None), default=None)
