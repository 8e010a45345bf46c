"""Reduces the metrics of a run to buckets, each covering a range of steps.

The buckets limit the size of charts for long runs, but preserve each spike and the first non-finite value.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from typing import BinaryIO

from pydantic_core import from_json

from trainkit.capabilities.report.curves import LAST_STEP
from trainkit.capabilities.report.plot import LARGEST
from trainkit.observe.ranking import NOT_METRICS
from trainkit.run.events import later_metrics, read_events
from trainkit.run.files import MAX_RECORD_BYTES, MAX_SAMPLE_BYTES, opened, parse_records, read_jsonl_reversed
from trainkit.run.rundir import RunDir

MAX_BUCKETS = 512
"""Maximum number of buckets of a curve. If a curve needs more buckets, the bucket width is doubled."""
MAX_METRICS = 128
"""Maximum number of metrics per run. If a run logs more metrics, those logged first are kept."""
POSITIONS = NOT_METRICS | {"epoch", "samples_seen"}
"""Numeric keys that give the position of a record in the training and are therefore not metrics."""
NUMBERS = frozenset({int, float})
CHUNK_BYTES = 2**17
"""Number of bytes to read and parse at once, small enough for the parsed records to stay in the CPU cache."""
NUM_CHUNKS = 512
"""Number of chunks to read from a file that is too large to be read completely."""
Point = tuple[float, float]
"""A step and a value; non-finite values are nan or -inf."""


@dataclass(slots=True)
class Bucket:
    """A summary of one metric's values over a range of steps."""

    low: Point
    high: Point
    total: float
    count: int
    """Number of finite values in the bucket. If `count` is 0, `low` and `high` are meaningless."""
    last: int
    """The last step in the bucket."""
    broken: Point | None
    """The first step with a non-finite value, and this value (-inf or nan)."""

    @property
    def mean(self) -> Point:
        """The last step and the mean of the finite values; the mean is nan or -inf if there are none."""
        if self.count:
            return self.last, self.total / self.count
        return self.last, math.nan if self.broken is None else self.broken[1]

    def merge(self, other: Bucket) -> None:
        """Merge another bucket into this bucket."""
        if other.count and self.count:
            self.low, self.high = (
                min(self.low, other.low, key=itemgetter(1)),
                max(self.high, other.high, key=itemgetter(1)),
            )
        elif other.count:
            self.low, self.high = other.low, other.high
        self.total, self.count = self.total + other.total, self.count + other.count
        self.last = max(self.last, other.last)
        broken = [point for point in (self.broken, other.broken) if point is not None]
        self.broken = min(broken, key=itemgetter(0), default=None)


class Thinned:
    """The metrics of a run or of one attempt, reduced to buckets of equal width."""

    def __init__(self, most: int = MAX_BUCKETS) -> None:
        self.most = most
        self.width = 1
        """Number of steps per bucket. The bucket width is a power of two, so that buckets of different runs
        can be aligned."""
        self.buckets: dict[str, dict[int, Bucket]] = {}
        """Maps each metric to its buckets, keyed by ``step // width``."""

    def add(self, records: Iterable[Mapping[str, object]]) -> None:
        """Add records from metrics.jsonl; if a metric has several values for a step, use the newest one."""
        known: Sequence[int] = ()
        parts: list[tuple[int, slice]] = []
        for name, steps, values in _columns(list(records)):
            if name in POSITIONS or (name not in self.buckets and len(self.buckets) == MAX_METRICS):
                continue
            if steps is not known:
                known, parts = steps, _parts(steps, self.width)
            self._add(name, steps, values, parts)
        while max(map(len, self.buckets.values()), default=0) > self.most:
            self.widen(2 * self.width)

    def _add(
        self, name: str, steps: Sequence[int], values: Sequence[object], parts: Iterable[tuple[int, slice]]
    ) -> None:
        """Add the values of a metric; `parts` are the number of each bucket and the slice of its values."""
        are_numbers = set(map(type, values)) <= NUMBERS
        for place, part in parts:
            found = _bucket(steps[part], values[part], are_numbers)
            if found is None:
                continue
            own = self.buckets.setdefault(name, {})
            if place in own and self.width > 1:
                own[place].merge(found)
            else:
                own[place] = found

    def widen(self, width: int) -> None:
        """Merge adjacent buckets until each is `width` steps wide."""
        factor, self.width = width // self.width, width
        for name, narrow in self.buckets.items() if factor > 1 else ():
            wide: dict[int, Bucket] = {}
            for place, bucket in narrow.items():
                if (known := wide.setdefault(place // factor, bucket)) is not bucket:
                    known.merge(bucket)
            self.buckets[name] = wide

    @property
    def names(self) -> list[str]:
        """The metrics that have at least one finite value, and all losses.

        A loss without any finite value has diverged. Any other metric without a finite value was not
        measured.
        """
        return [
            name
            for name, own in self.buckets.items()
            if name.endswith("loss") or any(bucket.count for bucket in own.values())
        ]

    def points(self, name: str) -> list[Point]:
        """Return the lowest and the highest value of each bucket, and its first non-finite value."""
        found = list[Point]()
        for _, bucket in sorted(self.buckets.get(name, {}).items()):
            own = {bucket.low, bucket.high} if bucket.count else set()
            if bucket.broken is not None:
                own.add(bucket.broken)
            found += sorted(own, key=itemgetter(0))
        return found

    def means(self, name: str) -> dict[int, Point]:
        """Map the number of each bucket to its mean; see `Bucket.mean`."""
        return {place: bucket.mean for place, bucket in sorted(self.buckets.get(name, {}).items())}


def _columns(
    records: Sequence[Mapping[str, object]],
) -> Iterator[tuple[str, Sequence[int], Sequence[object]]]:
    """Yield each key with the steps and values of the records that contain it."""
    if not records:
        return
    first, *others = map(tuple, records)
    if all(keys == first for keys in others):  # Fast path: most runs log the same metrics at each step.
        columns = dict(zip(first, zip(*(record.values() for record in records), strict=True), strict=True))
        steps: Sequence[int] = columns["step"]
        yield from ((name, steps, values) for name, values in columns.items())
        return
    for name in dict.fromkeys(chain.from_iterable(records)):
        having = [record for record in records if name in record]
        yield name, [record["step"] for record in having], [record[name] for record in having]  # type: ignore[misc]


def _parts(steps: Sequence[int], width: int) -> list[tuple[int, slice]]:
    """Divide consecutive steps into buckets; return the number of each bucket and the indices of its steps.

    If the width is 1, the indices of a bucket select only the newest record of its step.
    """
    found, begin = list[tuple[int, slice]](), 0
    for place, own in groupby(steps if width == 1 else [step // width for step in steps]):
        end = begin + len(list(own))
        found.append((place, slice(begin if width > 1 else end - 1, end)))
        begin = end
    return found


def _bucket(steps: Sequence[int], values: Sequence[object], are_numbers: bool) -> Bucket | None:
    """Summarize a metric's values in a bucket, or return None if no value is a number or null."""
    finite: Sequence[float] = values  # type: ignore[assignment]
    broken: Point | None = None
    low = high = math.inf
    if are_numbers:
        low, high = min(finite), max(finite)
    if not -LARGEST <= low <= high <= LARGEST:
        pairs = [
            pair for pair in zip(steps, values, strict=True) if pair[1] is None or type(pair[1]) in NUMBERS
        ]
        good = [(step, value) for step, value in pairs if value is not None and abs(value) <= LARGEST]  # type: ignore[arg-type]
        bad = next((pair for pair in pairs if pair[1] is None or abs(pair[1]) > LARGEST), None)  # type: ignore[arg-type]
        if bad is not None:
            is_negative = isinstance(bad[1], int | float) and bad[1] < 0
            broken = bad[0], -math.inf if is_negative else math.nan
        if not good:
            last = max((step for step, _ in pairs), default=0)
            return None if broken is None else Bucket((0, math.nan), (0, math.nan), 0.0, 0, last, broken)
        steps, finite = zip(*good, strict=True)
        low, high = min(finite), max(finite)
    return Bucket(
        (steps[finite.index(low)], low),
        (steps[finite.index(high)], high),
        math.fsum(finite),
        len(finite),
        steps[-1],
        broken,
    )


@dataclass(frozen=True)
class Wanted:
    """A run whose metrics will be drawn."""

    folder: str
    kept: Mapping[int, float]
    """Maps each attempt to its last step that was neither recomputed nor lost."""
    most_buckets: int
    """Maximum number of buckets of a curve."""
    most_bytes: int
    """Size of metrics.jsonl up to which the file is read completely. A larger file is read in chunks."""


def read_thinned(wanted: Wanted) -> Thinned:
    """Read the metrics of a run, including validation losses, which a COMMAND logs as events."""
    run, found = RunDir(wanted.folder), Thinned(wanted.most_buckets)
    with opened(run.metrics_file) as stream:
        for number, chunk in enumerate(() if stream is None else _chunks(stream, wanted.most_bytes)):
            records = _kept(_records(chunk), wanted.kept)
            if number == 0 and records and stream is not None:
                num_lines = os.fstat(stream.fileno()).st_size * len(records) // len(chunk)
                found.widen(_first_width(records[0]["step"], run, num_lines, wanted.most_buckets))
            found.add(records)
    if "val_loss" not in found.buckets:
        events = (event.values for event in read_events(run, "evaluated") if event.step is not None)
        found.add(
            {"step": values["step"], "val_loss": values["val_loss"]}
            for values in _kept(events, wanted.kept)
            if "val_loss" in values
        )
    for name, values in later_metrics(run).items():
        found.add({"step": step, name: value} for step, value in values.items())
    return found


def _first_width(first_step: object, run: RunDir, num_lines: int, most: int) -> int:
    """Return the bucket width that a run will probably need, so that few buckets have to be merged later.

    The estimated number of steps is reduced by a fifth, because a width that is too large would lose detail.
    """
    last_step = next(read_jsonl_reversed(run.metrics_file), {}).get("step")
    if not isinstance(first_step, int) or not isinstance(last_step, int):
        return 1
    num_steps = max(0, min(last_step - first_step, num_lines))
    return 1 << max(0, (8 * num_steps // (5 * most)).bit_length() - 1)


def _records(lines: bytes) -> Iterable[dict[str, object]]:
    """Parse lines as JSON objects, all at once for speed, or one by one if a line is damaged."""
    text = b"[%b]" % lines.rstrip(b"\n").replace(b"\n", b",")
    try:
        # Search for one byte first, because most files do not contain the byte, and searching for a word is
        # much slower.
        if (b"N" in text or b"I" in text) and (b"NaN" in text or b"Infinity" in text):
            found = json.loads(text, parse_constant=lambda name: None)
        elif b"\\" in text and b"\\ud" in text.lower():
            found = []
        else:
            found = from_json(text, cache_strings="keys")
    except (ValueError, RecursionError):
        return parse_records(lines.split(b"\n"))
    whole = [record for record in found if isinstance(record, dict)]
    is_whole = len(whole) == lines.count(b"\n") + (not lines.endswith(b"\n"))
    return whole if is_whole else parse_records(lines.split(b"\n"))


def _kept(records: Iterable[Mapping[str, object]], kept: Mapping[int, float]) -> list[Mapping[str, object]]:
    """Return the records of steps that were not rolled back; `kept` is the last such step of each attempt."""
    limits = {attempt: step for attempt, step in kept.items() if step < LAST_STEP}
    found = []
    for record in records:
        step = record.get("step")
        if type(step) is not int or not -LAST_STEP < step < LAST_STEP:
            continue
        attempt = record.get("attempt") if limits else None
        if type(attempt) is not int or step <= limits.get(attempt, LAST_STEP):
            found.append(record)
    return found


def _chunks(stream: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    """Yield a file in chunks of whole lines.

    If the file is larger than `most_bytes`, yield only evenly spaced chunks of it. The last chunk ends at the
    end of the file.
    """
    size = os.fstat(stream.fileno()).st_size
    if size <= most_bytes:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk + stream.readline(MAX_RECORD_BYTES)
        return
    length = most_bytes // NUM_CHUNKS
    for number in range(NUM_CHUNKS + 1):
        begin = (size - length) * number // NUM_CHUNKS
        stream.seek(begin)
        if begin:
            stream.readline(MAX_SAMPLE_BYTES)
        if (rest := begin + length - stream.tell()) > 0:
            yield stream.read(rest) + stream.readline(MAX_SAMPLE_BYTES)


def read_all(wanted: Sequence[Wanted], num_bytes: int) -> list[Thinned]:
    """Read the metrics of several runs, using one process per core if that is faster.

    `num_bytes` is the total size of the files to read.
    """
    cores = len(os.sched_getaffinity(0))
    if num_bytes < 2**24 or min(cores, len(wanted)) < 2:
        return list(map(read_thinned, wanted))
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(min(cores, len(wanted)), get_context("fork")) as readers:
        return list(readers.map(read_thinned, wanted))


def joined(attempts: Iterable[Thinned]) -> dict[str, list[Point]]:
    """Merge the attempts of a run: return the points of each metric, sorted by step."""
    found = dict[str, list[Point]]()
    for thinned in attempts:
        for name in thinned.names:
            found.setdefault(name, []).extend(thinned.points(name))
    return {name: sorted(points, key=itemgetter(0)) for name, points in found.items()}
