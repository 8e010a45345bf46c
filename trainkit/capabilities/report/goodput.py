"""Computes how a run spent its allocated time, and the run's curves, in a single pass over metrics.jsonl."""

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
    "lost": "Steps recomputed or not saved",
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
"""Maps each category of allocated time to its label, in the order the report lists them."""
NUM_BUCKETS = 800
"""Number of batches into which the records of a file are divided for processing."""
WHOLE_BYTES, CHUNK_BYTES = 2**26, 2**16
"""Size up to which a file is read completely, and the chunk size for reading a larger file; in bytes."""


@dataclass
class Curves:
    """Downsampled curves, and the time that each attempt spent in each category."""

    spent: dict[int, dict[str, float]]
    """Maps an attempt to the seconds in each category, whose sum is the attempt's allocated time."""
    num_records: int
    num_steps_lost: int
    is_measured: bool = False
    """True if the records of any attempt contain step durations."""
    thinned: dict[int, Thinned] = field(default_factory=dict)
    """Maps an attempt to its metrics, excluding steps that a later attempt recomputed."""

    @property
    def series(self) -> dict[str, dict[int, list[Point]]]:
        """The finite points of each metric in `CURVES`, grouped by attempt and sorted by step."""
        return {
            name: {
                number: [point for point in own.points(name) if math.isfinite(point[1])]
                for number, own in self.thinned.items()
            }
            for name in CURVES
        }

    @property
    def metrics(self) -> dict[str, list[Point]]:
        """The points of each metric, sorted by step; non-finite values are nan or -inf."""
        return joined(own for _, own in sorted(self.thinned.items()))


def read_curves(path: Path, attempts: Sequence[Attempt]) -> Curves:
    """Read the curves from metrics.jsonl, and compute how each attempt spent its time."""
    by_number = {attempt.number: attempt for attempt in attempts}
    spent = {number: dict.fromkeys(CATEGORIES, 0.0) for number in by_number}
    curves, newest = Curves(spent, 0, 0), max(by_number, default=0)
    clocks: dict[int, tuple[float, int]] = {}
    """Maps an attempt to the time and the step up to which its allocated time has already been
    categorized."""
    for records, num_lines in _buckets(path):
        curves.num_records += num_lines
        for number, own in _by_attempt(records).items():
            attempt = by_number.get(number)
            if attempt is None:
                continue
            # Also draw steps that the last attempt did not save, because they may show why it failed.
            drawn = (
                own if number == newest else [record for record in own if record.step <= attempt.kept_step]
            )
            curves.thinned.setdefault(number, Thinned()).add(record.values for record in drawn)
            begin = attempt.training or attempt.started
            is_timed = number in clocks or any(record.number("step_s") is not None for record in own)
            if begin is None or attempt.ended is None or not is_timed:
                continue  # Logs of a COMMAND seldom contain step durations.
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
    """Assign the time between consecutive step records to categories.

    Return the new clock (the time and step of the last record) and the number of lost steps.
    """
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
    """Return the category for the time between two records that was not spent on steps."""
    # A step's record is written after its evaluation and before its save. A save that has the same timestamp
    # as a step's record is therefore placed after the record.
    evaluated = bisect_right(attempt.evaluations, end) > bisect_right(attempt.evaluations, begin)
    saved = bisect_left(attempt.saves, end) > bisect_left(attempt.saves, begin)
    if evaluated and saved:
        return "evaluation_and_saving"
    return "evaluation" if evaluated else "saving" if saved else "other"


def _add_ends(spent: dict[str, float], attempt: Attempt, clock: tuple[float, int] | None) -> None:
    """Categorize the time before the first and after the last record; without records, the entire time."""
    if attempt.started is None or attempt.ended is None:
        return
    if clock is None:
        # A COMMAND does not report its first step, so it is unknown when its startup ended.
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
    """Yield a file's records in about `NUM_BUCKETS` lists, each with the number of records it represents.

    Files larger than `WHOLE_BYTES` are read only in part, in evenly spaced chunks. A chunk represents all
    records up to the next chunk.
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
            while chunk := list(islice(lines, count)):
                if records := list(steps_of(parse_records(chunk))):
                    yield records, len(records)
            return
        for chunk in _spaced(stream, size):
            if records := list(steps_of(parse_records(chunk))):
                yield records, len(records) * (size // NUM_BUCKETS) // sum(map(len, chunk))


def _spaced(stream: BinaryIO, size: int) -> Iterator[list[bytes]]:
    """Yield the lines in evenly spaced chunks of a large file; the last chunk ends at the end of the file."""
    for begin in (*range(0, size - CHUNK_BYTES, size // NUM_BUCKETS), size - CHUNK_BYTES):
        stream.seek(begin)
        if begin:
            stream.readline(MAX_SAMPLE_BYTES)
        chunk = list[bytes]()
        while stream.tell() < begin + CHUNK_BYTES and (line := stream.readline(CHUNK_BYTES)):
            chunk.append(line)
        yield chunk
