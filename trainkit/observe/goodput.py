"""Where the allocated time of a run went, and its curves: one pass over metrics.jsonl."""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from trainkit.rundir import parse_time

SERIES = ("loss", "grad_norm", "lr", "tokens_per_s")
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
MERGED_RECORDS = 50
"""In buckets of at least this many records, those without an event in between are added up at once."""
Point = tuple[float, float]


@dataclass
class Attempt:
    """One attempt as its events describe it; times are seconds since the epoch, None where unknown."""

    number: int
    submitted: float | None = None
    started: float | None = None
    training: float | None = None
    """When the loop began, after which steps are computed."""
    first_step: float | None = None
    ended: float | None = None
    """When it ended; for one that still runs, the time of the report."""
    state: str | None = None
    reason: str | None = None
    action: str | None = None
    start_step: int = 0
    """The step that it resumed from."""
    kept_step: float = math.inf
    """The last step that is part of the run's result; a later attempt computed the others again."""
    evaluations: list[float] = field(default_factory=list)
    saves: list[float] = field(default_factory=list)
    signals: list[float] = field(default_factory=list)

    @property
    def allocated_s(self) -> float:
        """Seconds from its start to its end; 0 when either is unknown."""
        if self.started is None or self.ended is None:
            return 0.0
        return max(0.0, self.ended - self.started)


@dataclass
class Curves:
    """Downsampled curves, and the time of each category by attempt."""

    series: dict[str, dict[int, list[Point]]]
    """Name -> attempt -> points by step; the lowest and highest value of each bucket are kept."""
    spent: dict[int, dict[str, float]]
    """Attempt -> category -> seconds; they add up to its allocated time."""
    num_records: int
    num_steps_lost: int
    last: dict[str, Any]


def read_attempts(events: Sequence[Mapping[str, Any]], now: float | None) -> list[Attempt]:
    """The attempts in a run's events, oldest first; `now` is the end of an attempt that still runs."""
    found: dict[int, Attempt] = {}
    for event in events:
        number, time = event.get("attempt"), seconds(event.get("time"))
        if not isinstance(number, int) or time is None:
            continue
        attempt, name = found.setdefault(number, Attempt(number)), event.get("event")
        if name in ("submitted", "started", "training", "first_step"):
            if getattr(attempt, str(name)) is None:
                setattr(attempt, str(name), time)
            if name == "training":
                attempt.start_step = int(event.get("step") or 0)
        elif name == "evaluated":
            attempt.evaluations.append(time)
        elif name == "checkpoint_begin":
            attempt.saves.append(time)
        elif name == "signal":
            attempt.signals.append(time)
        elif name == "requeue_decision":
            attempt.action = str(event.get("action"))
        elif name in ("stopped", "finished"):
            attempt.ended, attempt.state = time, str(event.get("state"))
            attempt.reason = event.get("reason")
    attempts = [found[number] for number in sorted(found)]
    kept = math.inf
    for attempt in reversed(attempts):
        attempt.kept_step = kept
        if attempt.training is not None:
            kept = min(kept, attempt.start_step)
    if attempts and attempts[-1].ended is None:
        attempts[-1].ended = now
    return attempts


def read_curves(path: Path, attempts: Sequence[Attempt]) -> Curves:
    """Read metrics.jsonl once: its curves and, with the attempts' events, where the time went."""
    by_number = {attempt.number: attempt for attempt in attempts}
    spent = {number: dict.fromkeys(CATEGORIES, 0.0) for number in by_number}
    series: dict[str, dict[int, list[Point]]] = {name: {} for name in SERIES}
    clocks: dict[int, tuple[float, int]] = {}
    count = lost = 0
    last: dict[str, Any] = {}
    for records in _buckets(path):
        count += len(records)
        for number, own in _by_attempt(records).items():
            attempt = by_number.get(number)
            if attempt is None:
                continue
            kept = [record for record in own if record["step"] <= attempt.kept_step]
            last = kept[-1] if kept else last
            for name, points in series.items():
                points.setdefault(number, []).extend(_extremes(kept, name))
            begin = attempt.training or attempt.started
            if begin is None or attempt.ended is None:
                continue
            clock = clocks.get(number, (begin, attempt.start_step))
            clock, num_lost = _add_steps(spent[number], attempt, own, clock)
            clocks[number], lost = clock, lost + num_lost
    for attempt in attempts:
        _add_ends(spent[attempt.number], attempt, clocks.get(attempt.number))
    return Curves(series, spent, count, lost, last)


def idle_gaps(attempts: Sequence[Attempt]) -> float:
    """Seconds between attempts within one allocation: a restart keeps it, a requeue gives it back."""
    total = 0.0
    for attempt, following in pairwise(attempts):
        is_held = attempt.action == "restart" and attempt.ended is not None and following.started is not None
        if is_held:
            total += max(0.0, following.started - attempt.ended)  # type: ignore[operator]
    return total


def _add_steps(
    spent: dict[str, float], attempt: Attempt, records: Sequence[Mapping[str, Any]], clock: tuple[float, int]
) -> tuple[tuple[float, int], int]:
    """Divide the time between records into steps and what was between them; returns the new clock."""
    before, step_before = clock
    num_lost = 0
    if len(records) >= MERGED_RECORDS:
        records = _merged(attempt, records, before, step_before) or records
    for record in records:
        time, step = seconds(record.get("time")), record["step"]
        num_steps = step - step_before
        if time is None or time < before or num_steps <= 0:
            continue
        wall_s = time - before
        steps_s = min(wall_s, float(record.get("step_s") or 0.0) * num_steps)
        wait_s = min(steps_s, float(record.get("data_wait_s") or 0.0) * num_steps)
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
    attempt: Attempt, records: Sequence[Mapping[str, Any]], begin: float, step_before: int
) -> list[dict[str, Any]] | None:
    """One record with the mean of many evenly spaced ones without an event; None for any others."""
    steps = [record["step"] for record in records]
    every = steps[0] - step_before
    end = seconds(records[-1].get("time"))
    is_even = every > 0 and steps == list(range(steps[0], steps[-1] + 1, every))
    if not is_even or end is None or steps[-1] > attempt.kept_step:
        return None
    if _evaluated(attempt, begin, end) or _saved(attempt, begin, end):
        return None
    means = {}
    for key in ("step_s", "data_wait_s"):
        values: list[Any] = [record.get(key) for record in records]
        means[key] = sum(value or 0.0 for value in values) / len(values)
    return [{"step": steps[-1], "time": records[-1]["time"], **means}]


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


def _extremes(records: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    """The points with the lowest and the highest value, in order; all that is finite of a single record."""
    values: list[Any] = [record.get(name) for record in records]
    try:
        if math.isfinite(sum(values)):
            ends = sorted({values.index(min(values)), values.index(max(values))}) if values else []
            return [(records[index]["step"], values[index]) for index in ends]
    except TypeError:
        pass  # one is null or missing
    points = [
        (record["step"], value)
        for record in records
        if isinstance(value := record.get(name), (int, float)) and math.isfinite(value)
    ]
    if len(points) < 2:
        return points
    low, high = min(points, key=_value), max(points, key=_value)
    return sorted({low, high})


def _value(point: Point) -> float:
    return point[1]


def _by_attempt(records: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    first = records[0].get("attempt")
    if all(record.get("attempt") == first for record in records):
        return {int(first or 0): list(records)}
    found: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        found.setdefault(int(record.get("attempt") or 0), []).append(record)
    return found


def _buckets(path: Path) -> Iterator[list[dict[str, Any]]]:
    """The records of a file in about `NUM_BUCKETS` lists."""
    try:
        size = path.stat().st_size
        stream = path.open("rb")
    except FileNotFoundError:
        return
    with stream:
        first = len(stream.readline()) or 1
        stream.seek(0)
        count = max(1, size // first // NUM_BUCKETS)
        while lines := list(islice(stream, count)):
            records = _parsed(lines)
            if records:
                yield records


def _parsed(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """The records of some lines; parses them at once, which is faster, unless one was cut off by a crash."""
    try:
        values = json.loads(b"[" + b",".join(lines) + b"]")
    except ValueError:
        values = []
        for line in lines:
            try:
                values.append(json.loads(line))
            except ValueError:
                continue
    return [value for value in values if isinstance(value, dict) and isinstance(value.get("step"), int)]


def seconds(text: object) -> float | None:
    """A time from a run's file as seconds since the epoch; None if it is not a time."""
    time: datetime | None = parse_time(text)
    return None if time is None else time.timestamp()
