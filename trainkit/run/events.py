"""Read and write events.jsonl (the events of a run) and metrics.jsonl (the logged steps of a run)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from trainkit.run.end import Best, RankFailure
from trainkit.run.files import (
    MAX_RECORD_BYTES,
    Record,
    append_jsonl,
    parse_records,
    read_jsonl,
    read_jsonl_reversed,
    read_record,
    reversed_lines,
    sampled_lines,
    utc_now,
)
from trainkit.run.rundir import RunDir
from trainkit.shipped import metrics_files

SAVE_EVENTS = ("checkpoint_commit", "checkpoint_failed")
NOT_FINITE = (None, math.inf, -math.inf)
"""Values in metrics.jsonl that represent a non-finite loss. NaN is written as null; Infinity is written as
1e999, which JSON parsers read as infinity."""
MAX_WITHOUT = 200
"""Stop the search for a metric after this many consecutive records without the metric."""
MAX_OTHERS = 100 * MAX_WITHOUT
"""Stop the search for a metric after this many events of other kinds, such as saves."""
FAILED_SAVES = 2
"""Number of consecutive failed saves after which a warning is shown; a single failure may be temporary."""


class Entry(Record):
    """A line of events.jsonl or metrics.jsonl."""

    __slots__ = ()

    @property
    def time(self) -> str | None:
        return self.text("time")

    @property
    def attempt(self) -> int | None:
        """Return the attempt number; None if a COMMAND wrote the line without a number."""
        return self.count("attempt")


class Event(Entry):
    """An event of a run, such as a save or a failure."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return str(self.values["event"])

    @property
    def step(self) -> int | None:
        return self.count("step")

    @property
    def rank(self) -> int | None:
        """Return the rank; None if the event concerns the whole run."""
        return self.count("rank")

    @property
    def host(self) -> str | None:
        return self.text("host")

    @property
    def reason(self) -> str | None:
        """Return the reason for the event, as a sentence for the user."""
        return self.text("reason")

    @property
    def failure(self) -> RankFailure:
        """Parse the failure in a ``rank_failed`` event."""
        return read_record(RankFailure, self.values)

    @property
    def clock(self) -> str:
        """Return the time of day; an empty string if the time is unknown."""
        return (self.time or "")[11:19]

    @property
    def content(self) -> str:
        """Format the name and values of the event, for example ``checkpoint_commit step=100``."""
        fields = [
            f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in self.values.items()
            if key not in ("time", "attempt", "event", "reason", "failed_at")
            and value is not None
            and value is not False
            and not isinstance(value, dict)
        ]
        parts = (self.name, " ".join(fields), f"({self.reason})" if self.reason else "")
        return "  ".join(filter(None, parts))

    @property
    def line(self) -> str:
        """Format the event with its time, for example ``12:00:01 attempt 1 checkpoint_commit step=100``."""
        return "  ".join(filter(None, (self.clock, f"attempt {self.attempt}", self.content)))


WHOLE_BYTES = 2**23
"""If events.jsonl is larger than this number of bytes, only the lines around the start and end of each
attempt and the last lines are read."""
EDGE_BYTES, LAST_BYTES = 2**16, 2**21
MAX_EDGES = 100


def event_lines(stream: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
    """Yield complete lines of `events.jsonl` between two offsets; leave the stream positioned after them.

    If the range is larger than `WHOLE_BYTES`, yield only the lines around the start and end of each attempt,
    and the lines in the last `LAST_BYTES`. Most omitted lines are events that are logged at every step:
    reading them would take minutes, and they are rarely needed.
    """
    spans = [(begin, end)]
    if end - begin > WHOLE_BYTES:
        start = _start_of_last(stream, begin, end)
        edges = [begin, *_attempt_edges(stream, begin, start)]
        spans = [*((max(begin, edge - EDGE_BYTES), edge + EDGE_BYTES) for edge in edges), (start, end)]
    position = begin
    for first, last in spans:
        if first > position:
            stream.seek(first - 1)  # A line may begin exactly at `first`.
            stream.readline(MAX_RECORD_BYTES)
            position = stream.tell()
        stream.seek(position)
        while position < last:
            line = stream.readline(MAX_RECORD_BYTES)
            if not line.endswith(b"\n") and len(line) < MAX_RECORD_BYTES:
                break
            position += len(line)
            yield line
    stream.seek(position)


def _start_of_last(stream: BinaryIO, begin: int, end: int) -> int:
    """Return the offset of the last `LAST_BYTES` bytes, ignoring lines that are too long for a record."""
    start, num_bytes = end, 0
    for line in reversed_lines(stream, end, MAX_RECORD_BYTES):
        start -= len(line)
        is_whole = line.endswith(b"\n") and len(line) < MAX_RECORD_BYTES
        num_bytes += len(line) if is_whole else 0
        if num_bytes >= LAST_BYTES or start <= begin:
            break
    return max(begin, start)


def _attempt_edges(stream: BinaryIO, begin: int, end: int) -> list[int]:
    """Return the approximate offset of the first event of each attempt.

    The offsets are found by bisection, because attempt numbers never decrease within the file.
    """
    found, todo = list[int](), [(begin, _attempt_at(stream, begin), end, _attempt_at(stream, end))]
    while todo and len(found) < MAX_EDGES:
        first, before, last, after = todo.pop()
        if before == after:
            continue
        if last - first < EDGE_BYTES:
            found.append(last)
            continue
        middle = (first + last) // 2
        between = _attempt_at(stream, middle)
        # Push the newer half last, so that it is bisected first: if there are more than `MAX_EDGES` attempts,
        # the older attempts are omitted.
        todo += [(first, before, middle, between), (middle, between, last, after)]
    return found[::-1]


def _attempt_at(stream: BinaryIO, position: int) -> int | None:
    """Return the attempt number of the first event after a file offset; None if it is unknown."""
    found = events_of(parse_records(sampled_lines(stream, position, position, 1)))
    return next((event.attempt for event in found), None)


def log_event(run: RunDir, attempt: int, event: str, **fields: Any) -> None:
    """Append one event to the run's `events.jsonl`."""
    append_jsonl(run.events_file, {"time": utc_now(), "attempt": attempt, "event": event, **fields})


def read_events(run: RunDir, *names: str, attempt: int | None = None) -> Iterator[Event]:
    """Yield the events of a run, oldest first; `names` and `attempt` select only matching events."""
    for event in events_of(read_jsonl(run.events_file, names)):
        if (not names or event.name in names) and attempt in (None, event.attempt):
            yield event


def events_of(records: Iterable[Mapping[str, object]]) -> Iterator[Event]:
    """Yield the valid events in records of `events.jsonl`; skip damaged records."""
    for record in records:
        attempt, step = record.get("attempt"), record.get("step")
        has_counts = (attempt is None or type(attempt) is int) and (step is None or type(step) is int)
        if has_counts and isinstance(record.get("event"), str):
            yield Event(record)


class StepRecord(Entry):
    """A logged training step."""

    __slots__ = ()

    @property
    def step(self) -> int:
        step = self.values["step"]
        assert isinstance(step, int)
        return step

    @property
    def samples_per_s(self) -> float | None:
        """Return the samples per second if the task counts losses per sample, not per token; else None.

        The trainer always logs the value as ``tokens_per_s``, because it does not know whether losses are
        counted per token or per sample.
        """
        counted, seen = self.count("tokens"), self.count("samples_seen")
        counts_samples = counted is not None and counted == seen
        return self.number("tokens_per_s" if counts_samples else "samples_per_s")


def read_steps(run: RunDir) -> Iterator[StepRecord]:
    """Yield the logged steps of a run in file order; a recomputed step occurs twice."""
    return steps_of(read_jsonl(run.metrics_file))


def steps_of(records: Iterable[Mapping[str, object]]) -> Iterator[StepRecord]:
    """Yield the valid steps in records of `metrics.jsonl`; skip damaged records."""
    return (StepRecord(record) for record in records if type(record.get("step")) is int)


def later_records(run: RunDir) -> list[StepRecord]:
    """Return the records of metrics that capabilities measured after the training step, in order of time."""
    records = (record for file in metrics_files(run.path) for record in steps_of(read_jsonl(file)))
    return sorted(records, key=lambda record: record.time or "")


def later_metrics(run: RunDir) -> dict[str, dict[int, float]]:
    """Map each metric that capabilities measure after the training step to its values by step, in order.

    The names differ from all names in metrics.jsonl; see `trainkit.shipped.Shipped.metrics_file`.
    """
    found: dict[str, dict[int, float]] = {}
    for record in later_records(run):
        for name in record.values.keys() - {"step", "time"}:
            if (value := record.number(name)) is not None:
                found.setdefault(name, {})[record.step] = value
    return {name: dict(sorted(found[name].items())) for name in sorted(found)}


def newest_step(run: RunDir, begins: Mapping[int, int] = {}) -> int | None:
    """Return the last step that a run has logged; None if it has not logged any.

    `begins` is the result of `first_steps`; it excludes stale steps, which the newest attempt recomputes.
    """
    records = steps_of(read_jsonl_reversed(run.metrics_file))
    return next((record.step for record in records if not _is_stale(record, begins)), None)


def training_curve(run: RunDir) -> list[StepRecord]:
    """Return the logged steps of a run in ascending order; for a recomputed step, only its last record."""
    by_step = {record.step: record for record in read_steps(run)}
    return [by_step[step] for step in sorted(by_step)]


def read_metrics(run: RunDir) -> list[dict[str, object]]:
    """Return the records of the `training_curve` as plain dictionaries."""
    return [dict(record.values) for record in training_curve(run)]


def diverged_since(run: RunDir, attempt: int | None = None) -> int | None:
    """Return the step at which a run's losses became non-finite; None if the newest loss is finite.

    If the training losses are finite, the validation losses are checked. With `attempt`, the function also
    returns None if the newest losses belong to another attempt. Without `attempt`, the function ignores steps
    that a later attempt recomputes.
    """
    since = _diverged_since(run, attempt)
    if since is None or attempt is not None:
        return since
    begins = first_steps(run, read_events(run, *BEGINNINGS))
    return _diverged_since(run, None, begins) if begins else since


def _diverged_since(run: RunDir, attempt: int | None, begins: Mapping[int, int] = {}) -> int | None:
    since = diverged_in(run.metrics_file, "loss", attempt, begins)
    return diverged_in(run.events_file, "val_loss", attempt, begins) if since is None else since


def diverged_in(
    file: str | Path, metric: str, attempt: int | None = None, begins: Mapping[int, int] = {}
) -> int | None:
    """Return the step at which a metric in a file became non-finite; None if the newest value is finite.

    With `attempt`, the function also returns None if the newest value belongs to another attempt. `begins` is
    the result of `first_steps`; it excludes steps that a later attempt recomputes.
    """
    since: int | None = None
    num_without = num_others = 0
    for record in steps_of(read_jsonl_reversed(file)):
        if _is_stale(record, begins):
            continue
        if metric not in record.values:
            is_expected = record.values.get("event", "evaluated") == "evaluated"
            num_without += is_expected
            num_others += not is_expected
            if num_without > MAX_WITHOUT or num_others > MAX_OTHERS:
                break
            continue
        if since is None and attempt is not None and record.attempt not in (None, attempt):
            return None
        if record.values[metric] not in NOT_FINITE:
            break
        since = record.step if since is None else min(since, record.step)  # a step may be computed twice
    return since


def with_divergence(reason: str | None, since: int | None) -> str | None:
    """Append to a run's reason that its loss is non-finite since a step; return None if both are None."""
    if since is None:
        return reason
    said = f"diverged since step {since}"
    return f"{said}; {reason}" if reason else said


BEGINNINGS = ("training", "resumed", "first_step")
"""Names of the events that contain the first step of an attempt; used by `first_steps`."""


def first_steps(run: RunDir, events: Iterable[Event]) -> dict[int, int]:
    """Return the first step that each attempt computes, by attempt number, as found in `BEGINNINGS` events.

    A COMMAND logs none of the `BEGINNINGS` events, so the first step of its newest attempt is read from
    metrics.jsonl.
    """
    found: dict[int, int] = {}
    for event in events:
        if event.name in BEGINNINGS and event.attempt is not None and event.step is not None:
            found[event.attempt] = event.step + (event.name != "first_step")
    records = steps_of(read_jsonl_reversed(run.metrics_file))
    last = next(records, None)
    if last is not None and last.attempt is not None and last.attempt > 1 and last.attempt not in found:
        own = itertools.takewhile(lambda record: record.attempt == last.attempt, records)
        found[last.attempt] = min([last.step, *(record.step for record in own)])
    return found


def _is_stale(record: Entry, begins: Mapping[int, int]) -> bool:
    """Return whether a later attempt recomputes the step of a record."""
    attempt, step = record.attempt, record.count("step")
    if attempt is None or step is None:
        return False
    return any(later > attempt and first <= step for later, first in begins.items())


def by_step(records: Iterable[Entry], metric: str, begins: Mapping[int, int] = {}) -> dict[int, float | None]:
    """Map each step to the last value of a metric at that step; a non-finite value becomes None.

    `begins` is the result of `first_steps`; it excludes stale values even if the later attempt never logged
    the metric.
    """
    found: dict[int, float | None] = {}
    attempt = None
    for record in records:
        if _is_stale(record, begins):
            continue
        if record.attempt != attempt:
            attempt, step = record.attempt, record.count("step")
            for stale in [one for one in found if step is not None and one >= step]:
                del found[stale]  # The new attempt recomputes these steps.
        value, step = record.values.get(metric, ""), record.count("step")
        if step is not None and (value is None or type(value) in (int, float)):
            found[step] = record.number(metric)
    return dict(sorted(found.items()))


def best_result(run: RunDir) -> Best | None:
    """Return the lowest validation loss of a run, or its newest training loss if it has no validation loss.

    Returns None for a run that has no loss or has diverged.
    """
    if diverged_since(run) is not None:
        return None
    return best_of(run, read_events(run, "evaluated", *BEGINNINGS))


def best_of(run: RunDir, events: Iterable[Event]) -> Best | None:
    """Return the lowest validation loss of a run, or else its newest training loss; None if it has neither.

    `events` must include all ``evaluated`` events.
    """
    events = list(events)
    begins = first_steps(run, events)
    values = by_step((event for event in events if event.name == "evaluated"), "val_loss", begins)
    evaluated = [Best("val_loss", value, step) for step, value in values.items() if value is not None]
    if evaluated:
        return min(evaluated, key=lambda best: best.value)
    for record in map(Record, read_jsonl_reversed(run.metrics_file, ["loss"])):
        if (loss := record.number("loss")) is not None and not _is_stale(Entry(record.values), begins):
            return Best("loss", loss, record.count("step"))
    return None
