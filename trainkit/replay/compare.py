"""Compares a replay with what the run recorded, and says what differs and on which rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainkit.plan.launch import LaunchPlan
from trainkit.replay.run_replay import SAMPLES_FILE, ReplayPlan, recorded_steps
from trainkit.replay.steps import StepSample
from trainkit.rundir import AttemptDir, RunDir, read_json, read_jsonl

EQUAL, DIFFERENT, UNKNOWN = "equal", "different", "unknown"
TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 5e-2}
"""Relative difference of loss and gradient norm that another layout may have, by `precision.dtype`."""
VALUES = ("loss", "grad_norm")


@dataclass(frozen=True)
class ComparedStep:
    """A step as the run recorded it and as the replay computed it; a value is None if it was not finite."""

    step: int
    attempt: int | None
    """The attempt that recorded it; None if it was not recorded."""
    recorded: dict[str, float | None] | None
    replayed: dict[str, float | None]
    is_equal: bool | None
    """To the last digit, or with another layout within rounding; None if it was not recorded."""


@dataclass(frozen=True)
class Culprit:
    """Where a step became different, as far as the records of the ranks tell."""

    ranks: tuple[int, ...]
    """Empty if they do not tell."""
    hosts: tuple[str, ...]
    """Of these ranks; without any, all hosts that may be it."""
    what: str
    """What differs, as a sentence."""


@dataclass(frozen=True)
class Comparison:
    """The result of a replay."""

    verdict: str
    """``equal``, ``different`` or ``unknown``."""
    is_exact: bool
    """Whether values were compared to the last digit."""
    start_step: int
    steps: tuple[ComparedStep, ...]
    culprit: Culprit | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def first_different(self) -> ComparedStep | None:
        return next((step for step in self.steps if step.is_equal is False), None)


def compare(what: ReplayPlan, copy: RunDir) -> Comparison:
    """Compare all steps since the checkpoint; a difference before the requested steps explains theirs."""
    recorded = recorded_steps(what.run, what.start_step + 1, what.last)
    replayed = recorded_steps(copy, what.start_step + 1, what.last)
    attempts = {int(str(record["attempt"])) for record in recorded.values()}
    is_exact = what.has_same_layout and all(
        _layout_of(what.run, attempt) == what.plan.layout for attempt in attempts
    )
    tolerance = None if is_exact else TOLERANCE[what.config.precision.dtype]
    steps = []
    for step, record in sorted(replayed.items()):
        was, now_values = recorded.get(step), _values(record)
        if was is None:
            steps.append(ComparedStep(step, None, None, now_values, None))
            continue
        was_values = _values(was)
        is_equal = all(_is_equal(was_values[name], now_values[name], tolerance) for name in VALUES)
        steps.append(ComparedStep(step, int(str(was["attempt"])), was_values, now_values, is_equal))
    verdict = UNKNOWN
    if any(step.is_equal is False for step in steps):
        verdict = DIFFERENT
    elif any(step.is_equal for step in steps if step.step >= what.first):
        verdict = EQUAL
    found = Comparison(verdict, is_exact, what.start_step, tuple(steps), None)
    bad = found.first_different
    if bad is None or bad.attempt is None:
        return found
    culprit = _culprit(what, copy, found, bad, what.run.attempt(bad.attempt))
    return replace(found, culprit=culprit)


def _layout_of(run: RunDir, attempt: int) -> object:
    return LaunchPlan.from_dict(read_json(run.attempt(attempt).plan_file)).layout


def _values(record: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: record[name] for name in VALUES}


def _is_equal(recorded: float | None, replayed: float | None, tolerance: float | None) -> bool:
    if recorded is None or replayed is None or tolerance is None:
        return recorded == replayed
    return math.isclose(recorded, replayed, rel_tol=tolerance)


def _culprit(
    what: ReplayPlan, copy: RunDir, found: Comparison, bad: ComparedStep, attempt: AttemptDir
) -> Culprit:
    """Which rank computed something else first, by what each recorded before and after the reduction."""
    num_ranks = LaunchPlan.from_dict(read_json(attempt.plan_file)).world_size
    ranks = range(num_ranks)
    was = [rank_record(attempt, rank, bad.step) for rank in ranks]
    hosts = tuple(str(record["host"]) if record else "" for record in was)
    all_hosts = tuple(sorted({host for host in hosts if host}))
    if not found.is_exact or num_ranks != what.plan.world_size:
        return Culprit((), all_hosts, "the layout is another one, so the ranks cannot be compared")
    if not all(was):
        return Culprit((), all_hosts, f"the ranks have no records of step {bad.step}")
    now = [rank_record(copy.attempt(1), rank, bad.step) for rank in ranks]
    before = [step.step for step in found.steps if step.step < bad.step and step.is_equal]
    last_equal = max(before, default=what.start_step)

    def other(name: str) -> list[int]:
        return [rank for rank in ranks if (was[rank] or {}).get(name) != (now[rank] or {}).get(name)]

    if bad.step - last_equal > 1 and len(other("loss_sum")) == num_ranks:
        between = f"between the steps {last_equal} and {bad.step}, which were not recorded"
        return Culprit((), all_hosts, f"the weights had changed already {between}; see train.log_every")
    for name, label in (
        ("loss_sum", "its loss: the forward pass"),
        ("local_gradient", "its gradient before the reduction: the backward pass"),
        ("square_sum", "its part of the gradient after the reduction"),
    ):
        differing = other(name)
        if not differing:
            continue
        if len(differing) < num_ranks or num_ranks == 1:
            return Culprit(tuple(differing), _hosts_of(differing, hosts), label)
        return Culprit((), all_hosts, f"of all ranks {label}")
    return Culprit((), all_hosts, "only the sum over the ranks")


def _hosts_of(ranks: Sequence[int], hosts: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(hosts[rank] for rank in ranks))


def rank_record(attempt: AttemptDir, rank: int, step: int) -> dict[str, Any] | None:
    """What a rank recorded of a step; None if it did not, or if the record is gone."""
    found = None
    for record in read_jsonl(attempt.rank_record(rank)):
        if record.get("step") == step:
            found = record
    return found


@dataclass(frozen=True)
class JudgedSample:
    """A sample with its loss."""

    step: int
    loss: float | None
    """Mean over its tokens, infinite if it is not finite; None for a user's task."""
    sample: StepSample


def worst_samples(copy: RunDir, samples: Mapping[int, Sequence[StepSample]]) -> list[JudgedSample]:
    """The samples of the steps with their losses, the worst first."""
    losses = {record["step"]: record["losses"] for record in read_jsonl(copy.path / SAMPLES_FILE)}
    found = [
        JudgedSample(step, None if loss is None else float(loss), sample)
        for step, own in samples.items()
        for loss, sample in zip(losses.get(step, [None] * len(own)), own, strict=True)
    ]
    return sorted(found, key=lambda item: item.loss or 0.0, reverse=True)
