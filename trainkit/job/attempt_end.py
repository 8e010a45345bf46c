"""Decides what follows an ended attempt, and writes and reads the end.json files of attempts."""

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
from trainkit.run.manifest import published
from trainkit.run.record import AttemptRecord, JobRecord, read_job
from trainkit.run.rundir import AttemptDir

LONG_ATTEMPT_S = 1800.0
"""An attempt of a trainer without checkpoints counts as progress if it lasts this many seconds."""
LATE_RECORDS = 1000
"""Number of metrics records, counted from the newest, to search for an attempt's last step. Metrics records
of the next attempt may come after the attempt's own records."""


def judge(live: Attempt, options: RestartOptions) -> Decision:
    """Decide what follows an ended attempt, based on the last read of job.json."""
    attempt, plan, outcome = live.folder, live.plan, live.outcome
    killed, failure = signal_exit_code(signal.SIGKILL), outcome.failure
    if (entry := live.entry).is_cancelled:
        # scancel sends SIGTERM before SIGKILL, so a stop signal may have been recorded as well.
        if entry.cancelled_now and killed in outcome.exit_codes:
            return Decision("stopped", KILLED, killed)
        outcome = without_cause(outcome)
    standing = Standing(
        previous=tuple(previous_ends(attempt, live.job).values()),
        progress=progress_of(attempt, entry),
        step=last_step(attempt, failure),
        workload=plan.workload,
        attended_in=plan.attended_in or attempt.attended_in,
        is_done=attempt.done_file.exists(),
        ran_s=_duration_s(attempt, entry),
        # If the remaining time only suffices for a save, another attempt is not worthwhile.
        is_total_used=remaining_s(live) <= plan.grace_s,
    )
    decision = decide(outcome, standing, plan.requeue, options)
    if decision.action != "failed" or failure is None or not failure.code or failure.final:
        return decision
    again = f"trainkit resume {quote(str(attempt.run.path))}"
    hint = f"`{again} --new-code` after fixing the code; without --new-code, the same code runs again"
    return replace(decision, hint=hint)


def is_requeue_requested(live: Attempt) -> bool:
    """Return whether a user requested another attempt; False if this attempt was cancelled or superseded."""
    is_asked = live.entry.requeue_requested_at is not None and not live.entry.is_cancelled
    return is_asked and live.superseding is None


def close_dead_attempts(
    live: Attempt, policy: RequeuePolicy, is_down: Callable[[str], bool]
) -> Decision | None:
    """Write end.json for earlier attempts of this job whose host died before their supervisor could write it.

    Slurm requeues a job whenever its host dies, so a run that crashes its hosts must be stopped here. If the
    failures of the dead attempts forbid a restart, sets the outcome of `live` to theirs and returns the
    decision that ends `live`; else None.

    `is_down` returns whether a host is down now. If a dead attempt's host is up, the job may have been
    preempted without grace time.
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
            # A lost host also explains errors of ranks on other hosts.
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
    """Record in end.json and events.jsonl how the attempt ended and what follows. Raises OSError.

    `entry` is the attempt's entry in job.json. `guessed` means that the attempt left no record of its end, so
    that its outcome is only inferred.
    """
    run, number = attempt.run, attempt.number
    failure = None
    if decision.action == "failed" or decision.cause in FAILURES:
        failure = outcome.failure or agent_failure(outcome.first_failed_node, decision.summary)
        failure = replace(failure, hint=failure.hint or decision.hint)
    best = None
    with contextlib.suppress(OSError):  # end.json must be written even if the metrics cannot be read
        best = best_result(run)
    # Write end.json before the events, which only repeat its content.
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
    """Return the state of a run after `decision` about its newest attempt."""
    if decision.action == "finished":
        return "finished"
    if decision.resumes:
        return "failed" if decision.cause in FAILURES else "stopped"
    return "cancelled" if entry.is_cancelled else str(decision.action)


def previous_ends(attempt: AttemptDir, job: JobRecord | None = None) -> dict[int, AttemptEnd]:
    """Return the ends of the earlier attempts since a command last started the run, by number, oldest first.

    `job` is the content of the run's job.json, if the caller has read it.
    """
    run = attempt.run
    job = job or read_job(run)
    earlier = [number for number in run.attempt_numbers() if number < attempt.number]
    found = {}
    for number in earlier[len(earlier) - job.num_auto_restarts :]:
        one = run.attempt(number)
        # If no end was recorded, the host died before the supervisor could write it.
        if (end := read_end(one)) is None:
            end = AttemptEnd(cause="node_fail", mark=progress_of(one, job.of_attempt(number)))
        found[number] = end
    return found


def progress_of(attempt: AttemptDir, entry: AttemptRecord) -> int:
    """Return the run's progress: the step of its newest checkpoint, or the number of long attempts.

    `entry` is the attempt's entry in job.json.
    """
    checkpoints = published(attempt.run.checkpoints_dir)
    if checkpoints:
        return checkpoints[-1].step
    earlier = [number for number in attempt.run.attempt_numbers() if number < attempt.number]
    last = read_end(attempt.run.attempt(earlier[-1])) if earlier else None
    return ((last and last.mark) or 0) + (_duration_s(attempt, entry) >= LONG_ATTEMPT_S)


def reached_its_stop(attempt: AttemptDir) -> bool:
    """Return whether the run's newest checkpoint is at `train.stop_at_step`, where the run pauses."""
    checkpoints = published(attempt.run.checkpoints_dir)
    if not checkpoints:
        return False
    # Import here, because this import is slow and most attempts do not need it.
    from trainkit.config import read_effective

    return read_effective(attempt.config_file).train.stop_at_step == checkpoints[-1].step


def remaining_s(live: Attempt) -> float:
    """Return the seconds until the ranks must save for the run to stay within its total time.

    Returns infinity if the run has no total time.
    """
    attempt, plan = live.folder, live.plan
    if plan.requeue.total_s is None:
        return math.inf
    own = [*map(attempt.run.attempt, previous_ends(attempt, live.job)), attempt]
    used_s = sum(_duration_s(one, live.job.of_attempt(one.number)) for one in own)
    return plan.requeue.total_s - used_s - plan.grace_s


def _duration_s(attempt: AttemptDir, entry: AttemptRecord) -> float:
    """Return how many seconds an attempt ran; if it recorded no end, until the last write to its logs."""
    is_newest = attempt.number >= max(attempt.run.attempt_numbers(), default=0)
    ended = None if is_newest else read_end(attempt)
    end = parse_time(None if ended is None else ended.time) or last_log_write(attempt)
    end = datetime.now(timezone.utc) if is_newest else end
    return seconds_between(entry.started_at or entry.submitted_at, end) or 0.0


def last_log_write(attempt: AttemptDir) -> datetime | None:
    """Return the time of the last write to any of the attempt's logs; None without logs."""
    logs = (attempt.supervisor_log, *attempt.logs_dir.glob("*"))
    times = [log.stat().st_mtime for log in logs if log.is_file()]
    return datetime.fromtimestamp(max(times), timezone.utc) if times else None


def last_step(attempt: AttemptDir, failure: RankFailure | None) -> int | None:
    """Return the step at which an attempt failed, else the last step that was logged or saved."""
    if failure is not None and failure.step is not None:
        return failure.step
    files = (attempt.run.metrics_file, attempt.run.events_file)
    newest = chain.from_iterable(islice(read_jsonl_reversed(file), LATE_RECORDS) for file in files)
    steps = (record.count("step") for record in map(Entry, newest) if record.attempt == attempt.number)
    return max((step for step in steps if step is not None), default=None)
