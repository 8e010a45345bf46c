"""The curve of a run as its metrics tell it, and what an interruption did to it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainkit.rundir import RunDir, read_jsonl


@dataclass(frozen=True)
class Point:
    """One computed step, as it was written down."""

    step: int
    loss: str
    """As it stands in the file: equal means equal to the last digit."""
    samples_seen: int | None = None
    attempt: int | None = None
    """None where the trainer does not say."""

    @property
    def value(self) -> tuple[str, int | None]:
        return self.loss, self.samples_seen


def read_points(run: RunDir) -> list[Point]:
    """Every step that was computed, in that order; one that was computed twice is there twice."""
    return points_of(read_jsonl(run.metrics_file))


def points_of(records: Iterable[Mapping[str, Any]]) -> list[Point]:
    """The points of the records of a ``metrics.jsonl``."""
    return [
        Point(record["step"], json.dumps(record["loss"]), record.get("samples_seen"), record.get("attempt"))
        for record in records
        if isinstance(record.get("step"), int) and "loss" in record
    ]


@dataclass(frozen=True)
class Comparison:
    """A curve beside the one of a run that nobody touched."""

    again: int
    """How many steps were computed more than once, counted as often as that."""
    difference: str
    """The first difference in words; empty when the curves are equal."""


def compare(reference: Sequence[Point], points: Sequence[Point]) -> Comparison:
    """Hold every computed step, those that were computed again too, against the reference."""
    expected = {point.step: point for point in reference}
    again = len(points) - len({point.step for point in points})
    for point in points:
        known = expected.get(point.step)
        if known is None:
            return Comparison(again, f"step {point.step} is not in the uninterrupted run")
        if point.loss != known.loss:
            return Comparison(again, f"loss {point.loss} at step {point.step} instead of {known.loss}")
        if point.samples_seen != known.samples_seen:
            words = f"{point.samples_seen} samples seen at step {point.step} instead of {known.samples_seen}"
            return Comparison(again, words)
    missing = sorted(set(expected) - {point.step for point in points})
    return Comparison(again, f"step {missing[0]} is missing" if missing else "")


def steps_while_saving(points: Sequence[Point], events: Sequence[Mapping[str, Any]]) -> int:
    """How many steps were computed while a save was being written that an interruption then cut off.

    Training goes on while a save is written, so these are lost on top of the interval between two saves.
    """
    return sum(
        _steps_while_saving(points, events, event["attempt"] - 1, event["step"])
        for event in events
        if event.get("event") == "training"
    )


def _steps_while_saving(
    points: Sequence[Point], events: Sequence[Mapping[str, Any]], attempt: int, resumed_step: int
) -> int:
    """Those of one attempt, when the next one went on from `resumed_step`."""
    done = [point.step for point in points if point.attempt == attempt]
    begun = [
        event["step"]
        for event in events
        if event.get("event") == "checkpoint_begin" and event.get("attempt") == attempt
    ]
    return done[-1] - begun[-1] if done and begun and begun[-1] > resumed_step else 0
