"""The loss curve of a run, from its metrics, and its comparison with that of an uninterrupted run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainkit.run.events import Event, StepRecord, read_steps
from trainkit.run.rundir import RunDir


@dataclass(frozen=True)
class Point:
    """One computed step, as recorded."""

    step: int
    loss: str
    """The loss as JSON text: equal texts mean bit-identical losses."""
    samples_seen: int | None = None
    attempt: int | None = None
    """None if the trainer does not record it."""


def read_points(run: RunDir) -> list[Point]:
    """Every computed step of a run, in order of computation; a step computed twice appears twice."""
    return points_of(read_steps(run))


def points_of(records: Iterable[StepRecord]) -> list[Point]:
    """The points of the steps of a run that have a loss, in order of computation."""
    return [
        Point(record.step, json.dumps(record.values["loss"]), record.count("samples_seen"), record.attempt)
        for record in records
        if "loss" in record.values
    ]


@dataclass(frozen=True)
class Comparison:
    """The comparison of a curve with that of the uninterrupted run."""

    num_recomputed: int
    """Number of repeated computations of steps."""
    difference: str
    """The first difference as text; empty when the curves are equal."""


def compare(reference: Sequence[Point], points: Sequence[Point]) -> Comparison:
    """Compare every computed step, recomputed ones included, with the reference."""
    expected = {point.step: point for point in reference}
    num_recomputed = len(points) - len({point.step for point in points})
    for point in points:
        known = expected.get(point.step)
        if known is None:
            return Comparison(num_recomputed, f"step {point.step} is not in the uninterrupted run")
        if point.loss != known.loss:
            text = f"loss {point.loss} at step {point.step} instead of {known.loss}"
            return Comparison(num_recomputed, text)
        if point.samples_seen != known.samples_seen:
            text = f"{point.samples_seen} samples seen at step {point.step} instead of {known.samples_seen}"
            return Comparison(num_recomputed, text)
    missing = sorted(set(expected) - {point.step for point in points})
    return Comparison(num_recomputed, f"step {missing[0]} is missing" if missing else "")


def steps_while_saving(points: Sequence[Point], events: Sequence[Event]) -> int:
    """Number of steps computed while a save was being written that an interruption then cut off.

    Training continues during an asynchronous save, so these steps are lost in addition to one save interval.
    """
    total = 0
    for start in events:
        if start.name != "training":
            continue
        before = (start.attempt or 0) - 1
        done = [point.step for point in points if point.attempt == before]
        own = (event for event in events if event.name == "checkpoint_begin" and event.attempt == before)
        begun = [event.step or 0 for event in own]
        if done and begun and begun[-1] > (start.step or 0):
            total += done[-1] - begun[-1]
    return total
