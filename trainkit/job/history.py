"""What a run went through since a person last started it, and how far it has come: read from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from trainkit.job.decision import Failure, PreviousAttempt
from trainkit.job.exit_codes import signal_exit_code
from trainkit.job.record import find_entry, num_comebacks
from trainkit.manifest import published
from trainkit.rundir import AttemptDir, read_end, read_jsonl, seconds_between

LONG_S = 1800.0
"""A trainer of which we see no checkpoint has come further when it ran so long."""
RANDOM_TYPES = ("Hang", "HostLost", "PreflightFailed", "OutOfMemory", "CheckpointError")
"""Failures that can happen twice in the same words and still be bad luck."""


def past_attempts(attempt: AttemptDir) -> list[PreviousAttempt]:
    """The attempts before this one since a person last started the run, oldest first."""
    return [past for _, past in numbered_past(attempt)]


def numbered_past(attempt: AttemptDir) -> list[tuple[int, PreviousAttempt]]:
    """The same with their numbers."""
    return [(before.number, _past(before)) for before in _before(attempt)]


def past_verdicts(attempt: AttemptDir) -> list[dict[str, Any]]:
    """The first failures of those attempts that had one."""
    verdicts = [(read_end(before) or {}).get("verdict") for before in _before(attempt)]
    return [verdict for verdict in verdicts if isinstance(verdict, dict)]


def _before(attempt: AttemptDir) -> list[AttemptDir]:
    run = attempt.run
    earlier = [number for number in run.attempt_numbers() if number < attempt.number]
    return [run.attempt(number) for number in earlier[len(earlier) - num_comebacks(run) :]]


def _past(attempt: AttemptDir) -> PreviousAttempt:
    end = read_end(attempt)
    if end is None:
        # It died with its host, without a word.
        return PreviousAttempt("node_fail", mark_of(attempt))
    verdict = end.get("verdict")
    step = end.get("step")
    return PreviousAttempt(
        cause=end.get("cause"),
        mark=int(end.get("mark") or 0),
        step=step if isinstance(step, int) else None,
        failure=failure_of(verdict) if isinstance(verdict, dict) else None,
    )


def failure_of(verdict: Mapping[str, Any]) -> Failure | None:
    """A verdict as what may happen again; None for what strikes from outside."""
    code = verdict.get("exit_code")
    killed = isinstance(code, int) and code > 128 and code != signal_exit_code(6)
    if killed or verdict.get("type") in RANDOM_TYPES:
        return None
    step = verdict.get("step")
    return Failure(
        what=f"{verdict.get('type')}: {verdict.get('message')}",
        step=step if isinstance(step, int) else None,
        final=bool(verdict.get("final")),
    )


def mark_of(attempt: AttemptDir) -> int:
    """How far the run has come: the step of its newest checkpoint; without any, how often it ran for long."""
    checkpoints = published(attempt.run.checkpoints_dir)
    if checkpoints:
        return checkpoints[-1].step
    before = [number for number in attempt.run.attempt_numbers() if number < attempt.number]
    last = (read_end(attempt.run.attempt(before[-1])) or {}).get("mark") if before else None
    return (last if isinstance(last, int) else 0) + (_seconds(attempt) >= LONG_S)


def reached_its_stop(attempt: AttemptDir) -> bool:
    """Whether the run's newest checkpoint is the one at which `train.stop_at_step` ends the attempt."""
    checkpoints = published(attempt.run.checkpoints_dir)
    if not checkpoints:
        return False
    # Imported only here, where there is seldom need for it: it takes its time.
    from trainkit.config import read_effective

    return read_effective(attempt.config_file).train.stop_at_step == checkpoints[-1].step


def _seconds(attempt: AttemptDir) -> float:
    """How long an attempt has run; one that has ended, as far as its logs tell."""
    entry = find_entry(attempt.run, attempt.number) or {}
    is_newest = attempt.number == max(attempt.run.attempt_numbers())
    ended = datetime.now(timezone.utc) if is_newest else last_sign(attempt)
    return seconds_between(entry.get("started_at") or entry.get("submitted_at"), ended) or 0.0


def last_sign(attempt: AttemptDir) -> datetime | None:
    """When an attempt last wrote to one of its logs; None when there is none."""
    logs = (attempt.supervisor_log, *attempt.logs_dir.glob("*"))
    times = [log.stat().st_mtime for log in logs if log.is_file()]
    return datetime.fromtimestamp(max(times), timezone.utc) if times else None


def last_step(attempt: AttemptDir, verdict: Mapping[str, Any] | None) -> int | None:
    """The step at which an attempt ended: that of the failure, else the last that it has logged or saved."""
    if verdict is not None and isinstance(verdict.get("step"), int):
        return int(verdict["step"])
    steps = [
        record["step"]
        for file in (attempt.run.metrics_file, attempt.run.events_file)
        for record in read_jsonl(file)
        if record.get("attempt") == attempt.number and isinstance(record.get("step"), int)
    ]
    return max(steps, default=None)
