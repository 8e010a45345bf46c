"""Where the allocated time of a run went, and its curves: one pass over metrics.jsonl."""

from __future__ import annotations

import math
import os
import signal
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from typing import Any

from trainkit.run.events import StepRecord
from trainkit.run.files import DECODER, parse_records
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
PART_BYTES = 32 * 1024 * 1024
"""A file of at least twice this size is read by several processes."""
MAX_READERS = 8
OVERLAP_BYTES = 65_536
"""How far before its part a process looks for the previous records."""
MERGED_RECORDS = 50
"""In buckets of at least this many records, those without an event in between are added up at once."""
Point = tuple[float, float]


@dataclass
class Curves:
    """Downsampled curves, and the time of each category by attempt."""

    series: dict[str, dict[int, list[Point]]]
    """Name -> attempt -> points by step; the lowest and highest value of each bucket are kept."""
    spent: dict[int, dict[str, float]]
    """Attempt -> category -> seconds; they add up to its allocated time."""
    num_records: int
    num_steps_lost: int


def read_curves(path: Path, attempts: Sequence[Attempt], part_bytes: int = PART_BYTES) -> Curves:
    """Read metrics.jsonl once: its curves and, with the attempts' events, where the time went.

    Processes read the parts of a large file in parallel, as most of the time is spent parsing lines.
    """
    parts = file_parts(path, part_bytes)
    read = partial(_read_part, path, attempts)
    if len(parts) == 1:
        found = [read(parts[0])]
    else:
        # Ctrl-C reaches the whole process group: only this process reports it.
        ignored = signal.SIGINT, signal.SIG_IGN
        spawn = get_context("spawn")
        with ProcessPoolExecutor(len(parts), spawn, signal.signal, ignored) as readers:
            found = list(readers.map(read, parts))
    curves, clocks = _joined(found)
    for attempt in attempts:
        _add_ends(curves.spent[attempt.number], attempt, clocks.get(attempt.number))
    return curves


Clocks = dict[int, tuple[float, int]]
"""Attempt -> the time and step up to which its time has been divided."""


@dataclass(frozen=True)
class Part:
    """A part of a file, from the start of a line on."""

    start: int
    end: int
    num_buckets: int


def file_parts(path: Path, part_bytes: int) -> list[Part]:
    """Parts of about equal size, one for each process that may run; a single one for a small file."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return [Part(0, 0, NUM_BUCKETS)]
    count = max(1, min(MAX_READERS, len(os.sched_getaffinity(0)), size // part_bytes))
    cuts = [0]
    with path.open("rb") as stream:
        for index in range(1, count):
            stream.seek(size * index // count)
            stream.readline()
            cuts.append(stream.tell())
    return [Part(*ends, NUM_BUCKETS // count) for ends in pairwise([*cuts, size])]


def _joined(found: Sequence[tuple[Curves, Clocks]]) -> tuple[Curves, Clocks]:
    """The curves of all parts of a file, in order."""
    (curves, clocks), *others = found
    for following, later in others:
        for name, by_attempt in following.series.items():
            for number, points in by_attempt.items():
                curves.series[name].setdefault(number, []).extend(points)
        for number, spent in following.spent.items():
            for category, spent_s in spent.items():
                curves.spent[number][category] += spent_s
        curves.num_records += following.num_records
        curves.num_steps_lost += following.num_steps_lost
        clocks |= later
    return curves, clocks


def _read_part(path: Path, attempts: Sequence[Attempt], part: Part) -> tuple[Curves, Clocks]:
    """Read one part of metrics.jsonl; start-up and shutdown of the attempts are not added yet."""
    by_number = {attempt.number: attempt for attempt in attempts}
    spent = {number: dict.fromkeys(CATEGORIES, 0.0) for number in by_number}
    series: dict[str, dict[int, list[Point]]] = {name: {} for name in CURVES}
    clocks = _clocks_before(path, part.start)
    count = lost = 0
    for records in _buckets(path, part):
        count += len(records)
        for number, own in _by_attempt(records).items():
            attempt = by_number.get(number)
            if attempt is None:
                continue
            kept = [record for record in own if record.step <= attempt.kept_step]
            for name, points in series.items():
                points.setdefault(number, []).extend(_extremes(kept, name))
            begin = attempt.training or attempt.started
            if begin is None or attempt.ended is None:
                continue
            clock = clocks.get(number, (begin, attempt.start_step))
            clock, num_lost = _add_steps(spent[number], attempt, own, clock)
            clocks[number], lost = clock, lost + num_lost
    return Curves(series, spent, count, lost), clocks


def _clocks_before(path: Path, position: int) -> Clocks:
    """The clocks of the attempts whose records are just before a position."""
    if position == 0:
        return {}
    with path.open("rb") as stream:
        stream.seek(max(0, position - OVERLAP_BYTES))
        lines = stream.read(min(position, OVERLAP_BYTES)).split(b"\n")
    clocks = {}
    for record in _parsed(lines):  # the first may be cut off
        time = timestamp(record.time)
        if time is not None:
            clocks[record.attempt or 0] = time, record.step
    return clocks


def idle_gaps(attempts: Sequence[Attempt]) -> float:
    """Seconds between attempts within one allocation: a restart keeps it, a requeue gives it back."""
    total = 0.0
    for attempt, following in pairwise(attempts):
        is_held = attempt.action == "restart" and attempt.ended is not None and following.started is not None
        if is_held:
            total += max(0.0, following.started - attempt.ended)  # type: ignore[operator]
    return total


def _add_steps(
    spent: dict[str, float], attempt: Attempt, records: Sequence[StepRecord], clock: tuple[float, int]
) -> tuple[tuple[float, int], int]:
    """Divide the time between records into steps and what was between them; returns the new clock."""
    before, step_before = clock
    if len(records) >= MERGED_RECORDS:
        merged = _merged(attempt, records, before, step_before)
        if merged is None:  # halves without the event that is in between can still be added up at once
            half = len(records) // 2
            clock, num_lost = _add_steps(spent, attempt, records[:half], clock)
            clock, num_lost_after = _add_steps(spent, attempt, records[half:], clock)
            return clock, num_lost + num_lost_after
        records = merged
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


def _merged(
    attempt: Attempt, records: Sequence[StepRecord], begin: float, step_before: int
) -> list[StepRecord] | None:
    """One record with the mean of many evenly spaced ones without an event; None for any others."""
    steps = [record.step for record in records]
    every = steps[0] - step_before
    end = timestamp(records[-1].time)
    is_even = every > 0 and steps == list(range(steps[0], steps[-1] + 1, every))
    if not is_even or end is None or steps[-1] > attempt.kept_step:
        return None
    if _evaluated(attempt, begin, end) or _saved(attempt, begin, end):
        return None
    means = {}
    for key in ("step_s", "data_wait_s"):
        values: list[Any] = [record.values.get(key) for record in records]
        means[key] = sum(value or 0.0 for value in values) / len(values)
    return [StepRecord({"step": steps[-1], "time": records[-1].time, **means})]


def _between_steps(attempt: Attempt, begin: float, end: float) -> str:
    """What happened between two records besides steps."""
    # A record is written after the evaluation of its step and before the save.
    evaluated, saved = _evaluated(attempt, begin, end), _saved(attempt, begin, end)
    if evaluated and saved:
        return "evaluation_and_saving"
    return "evaluation" if evaluated else "saving" if saved else "other"


def _evaluated(attempt: Attempt, begin: float, end: float) -> bool:
    return bisect_right(attempt.evaluations, end) > bisect_right(attempt.evaluations, begin)


def _saved(attempt: Attempt, begin: float, end: float) -> bool:
    # A save that begins in the millisecond of a record follows it.
    return bisect_left(attempt.saves, end) > bisect_left(attempt.saves, begin)


def _add_ends(spent: dict[str, float], attempt: Attempt, clock: tuple[float, int] | None) -> None:
    """Add start-up and shutdown, or all of the time of an attempt without records."""
    if attempt.started is None or attempt.ended is None:
        return
    if clock is None:
        until = attempt.training or attempt.first_step or attempt.ended
        # A COMMAND reports no first step: when its start-up ended is unknown.
        if attempt.training is None and attempt.first_step is None:
            spent["unmeasured"] += attempt.allocated_s
            return
        spent["startup"] += max(0.0, until - attempt.started)
        spent["unmeasured"] += max(0.0, attempt.ended - until)
        return
    spent["startup"] += max(0.0, (attempt.training or attempt.started) - attempt.started)
    spent["shutdown"] += max(0.0, attempt.ended - clock[0])


def _extremes(records: Sequence[StepRecord], name: str) -> list[Point]:
    """The points with the lowest and the highest value, in order; all that is finite of a single record."""
    values: list[Any] = [record.values.get(name) for record in records]
    try:
        if math.isfinite(sum(values)):
            ends = sorted({values.index(min(values)), values.index(max(values))}) if values else []
            return [(records[index].step, values[index]) for index in ends]
    except TypeError:
        pass  # one is null or missing
    points: list[Point] = [
        (record.step, value)
        for record, value in zip(records, values, strict=True)
        if isinstance(value, (int, float)) and math.isfinite(value)
    ]
    if len(points) < 2:
        return points
    low, high = min(points, key=itemgetter(1)), max(points, key=itemgetter(1))
    return sorted({low, high})


def _by_attempt(records: Sequence[StepRecord]) -> dict[int, list[StepRecord]]:
    found: dict[int, list[StepRecord]] = {}
    first = records[0].attempt
    if all(record.values.get("attempt") == first for record in records):
        return {first or 0: list(records)}
    for record in records:
        found.setdefault(record.attempt or 0, []).append(record)
    return found


def _buckets(path: Path, part: Part) -> Iterator[list[StepRecord]]:
    """The records of a part of a file in about the number of lists that it names."""
    if part.end == part.start:
        return
    with path.open("rb") as stream:
        stream.seek(part.start)
        first = len(stream.readline()) or 1
        stream.seek(part.start)
        count = max(1, (part.end - part.start) // first // part.num_buckets)
        position = part.start
        while position < part.end:
            lines: list[bytes] = []
            while position < part.end and len(lines) < count:
                lines.append(stream.readline())
                position += len(lines[-1])
                if not lines[-1]:
                    return
            records = _parsed(lines)
            if records:
                yield records


def _parsed(lines: Sequence[bytes]) -> list[StepRecord]:
    """The records of some lines; parses them at once, which is faster, unless one was cut off by a crash."""
    try:
        values = DECODER.decode((b"[" + b",".join(lines) + b"]").decode())
    except ValueError:
        values = parse_records(lines)
    return [
        StepRecord(value) for value in values if isinstance(value, dict) and type(value.get("step")) is int
    ]
