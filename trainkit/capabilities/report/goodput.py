"""Where the allocated time of a run went, and its curves: one pass over metrics.jsonl."""

from __future__ import annotations

import math
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from trainkit.capabilities.report.thinned import Point, Thinned, joined
from trainkit.run.events import StepRecord, steps_of
from trainkit.run.files import MAX_RECORD_BYTES, MAX_SAMPLE_BYTES, forward_lines, open_file, parse_records
from trainkit.run.history import CURVES, Attempt, timestamp

CATEGORIES = {
    "productive": "Steps that count",
    "lost": "Steps computed again or not saved",
    "data_wait": "Waiting for data",
    "startup": "Start-up",
    "evaluation": "Evaluation",
    "saving": "Saving",
    "evaluation_and_saving": "Evaluation and saving",
    "shutdown": "Shutdown and last save",
    "idle": "Between restarts in the allocation",
    "other": "Between steps",
    "unmeasured": "Not measured",
}
"""Category of allocated time -> its label, in the order in which they are shown."""
NUM_BUCKETS = 800
WHOLE_BYTES, PART_BYTES = 2**26, 2**16
"""Up to this size a file is read as a whole; of a larger one, so much of each bucket."""


@dataclass
class Curves:
    """Downsampled curves, and the time of each category by attempt."""

    spent: dict[int, dict[str, float]]
    """Attempt -> category -> seconds; they add up to its allocated time."""
    num_records: int
    num_steps_lost: int
    is_measured: bool = False
    """Whether the records of an attempt say how long its steps took."""
    thinned: dict[int, Thinned] = field(default_factory=dict)
    """Attempt -> what it logged, without the steps that a later one computed again."""

    @property
    def series(self) -> dict[str, dict[int, list[Point]]]:
        """Each of `CURVES` -> attempt -> the finite points by step."""
        return {
            name: {
                number: [point for point in own.points(name) if math.isfinite(point[1])]
                for number, own in self.thinned.items()
            }
            for name in CURVES
        }

    @property
    def metrics(self) -> dict[str, list[Point]]:
        """Each metric that was logged -> its points by step, nan where it was not finite."""
        return joined(own for _, own in sorted(self.thinned.items()))


def read_curves(path: Path, attempts: Sequence[Attempt]) -> Curves:
    """Read metrics.jsonl once: its curves and, with the attempts' events, where the time went."""
    by_number = {attempt.number: attempt for attempt in attempts}
    spent = {number: dict.fromkeys(CATEGORIES, 0.0) for number in by_number}
    curves, newest = Curves(spent, 0, 0), max(by_number, default=0)
    clocks: dict[int, tuple[float, int]] = {}
    """Attempt -> the time and step up to which its time has been divided."""
    for records, num_lines in _buckets(path):
        curves.num_records += num_lines
        for number, own in _by_attempt(records).items():
            attempt = by_number.get(number)
            if attempt is None:
                continue
            # What the last attempt has not saved is lost, but nothing else shows why it failed.
            drawn = (
                own if number == newest else [record for record in own if record.step <= attempt.kept_step]
            )
            curves.thinned.setdefault(number, Thinned()).add(record.values for record in drawn)
            begin = attempt.training or attempt.started
            is_timed = number in clocks or any(record.number("step_s") is not None for record in own)
            if begin is None or attempt.ended is None or not is_timed:
                continue  # the log of a COMMAND seldom says how long its steps took
            clock = clocks.get(number, (begin, attempt.start_step))
            clocks[number], num_lost = _add_steps(spent[number], attempt, own, clock)
            curves.num_steps_lost += num_lost
    for attempt in attempts:
        _add_ends(spent[attempt.number], attempt, clocks.get(attempt.number))
    curves.is_measured = bool(clocks)
    return curves


def _add_steps(
    spent: dict[str, float], attempt: Attempt, records: Sequence[StepRecord], clock: tuple[float, int]
) -> tuple[tuple[float, int], int]:
    """Divide the time between records into steps and what was between them; returns the new clock."""
    before, step_before = clock
    num_lost = 0
    for record in records:
        time, step = timestamp(record.time), record.step
        num_steps = step - step_before
        if time is None or time < before or num_steps <= 0:
            continue
        wall_s = time - before
        steps_s = min(wall_s, (record.number("step_s") or 0.0) * num_steps)
        wait_s = min(steps_s, (record.number("data_wait_s") or 0.0) * num_steps)
        num_kept = max(0.0, min(step, attempt.kept_step) - step_before)
        share = num_kept / num_steps
        num_lost += num_steps - round(num_kept)
        spent["lost"] += steps_s * (1 - share)
        spent["data_wait"] += wait_s * share
        spent["productive"] += (steps_s - wait_s) * share
        if wall_s > steps_s:
            spent[_between_steps(attempt, before, time)] += wall_s - steps_s
        before, step_before = time, step
    return (before, step_before), num_lost


def _between_steps(attempt: Attempt, begin: float, end: float) -> str:
    """What happened between two records besides steps."""
    # A record is written after the evaluation of its step and before the save: one that begins in the
    # millisecond of a record follows it.
    evaluated = bisect_right(attempt.evaluations, end) > bisect_right(attempt.evaluations, begin)
    saved = bisect_left(attempt.saves, end) > bisect_left(attempt.saves, begin)
    if evaluated and saved:
        return "evaluation_and_saving"
    return "evaluation" if evaluated else "saving" if saved else "other"


def _add_ends(spent: dict[str, float], attempt: Attempt, clock: tuple[float, int] | None) -> None:
    """Add start-up and shutdown, or all of the time of an attempt without records."""
    if attempt.started is None or attempt.ended is None:
        return
    if clock is None:
        # A COMMAND reports no first step: when its start-up ended is unknown.
        until = attempt.training or attempt.first_step or attempt.started
        spent["startup"] += max(0.0, until - attempt.started)
        spent["unmeasured"] += max(0.0, attempt.ended - until)
        return
    spent["startup"] += max(0.0, (attempt.training or attempt.started) - attempt.started)
    spent["shutdown"] += max(0.0, attempt.ended - clock[0])


def _by_attempt(records: Sequence[StepRecord]) -> dict[int, list[StepRecord]]:
    found: dict[int, list[StepRecord]] = {}
    for record in records:
        found.setdefault(record.attempt or 0, []).append(record)
    return found


def _buckets(path: Path) -> Iterator[tuple[list[StepRecord], int]]:
    """The records of a file in about `NUM_BUCKETS` lists, each with how many it stands for.

    Of a file with more than `WHOLE_BYTES`, evenly spaced ones, each for the steps since the one before.
    """
    try:
        stream = open_file(path)
    except FileNotFoundError:
        return
    with stream:
        size = os.fstat(stream.fileno()).st_size
        count = max(1, size // (len(stream.readline(MAX_RECORD_BYTES)) or 1) // NUM_BUCKETS)
        stream.seek(0)
        lines = forward_lines(stream)
        if size <= WHOLE_BYTES:
            while part := list(islice(lines, count)):
                if records := list(steps_of(parse_records(part))):
                    yield records, len(records)
            return
        for part in _spaced(stream, size):
            if records := list(steps_of(parse_records(part))):
                yield records, len(records) * (size // NUM_BUCKETS) // sum(map(len, part))


def _spaced(stream: BinaryIO, size: int) -> Iterator[list[bytes]]:
    """Evenly spaced lines of a large file, and its last ones."""
    for begin in (*range(0, size - PART_BYTES, size // NUM_BUCKETS), size - PART_BYTES):
        stream.seek(begin)
        if begin:
            stream.readline(MAX_SAMPLE_BYTES)
        part = list[bytes]()
        while stream.tell() < begin + PART_BYTES and (line := stream.readline(PART_BYTES)):
            part.append(line)
        yield part
