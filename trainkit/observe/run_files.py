"""The growing files of a run, read incrementally: a refresh costs as much as what was appended since."""

from __future__ import annotations

import math
import os
import statistics
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from trainkit.observe.restarts import RESTART_EVENTS, Restart, find_restarts
from trainkit.run.events import SAVE_EVENTS, SILENCE_EVENTS, SLOWDOWN_EVENTS, failed_in_a_row, still_slow
from trainkit.run.files import JsonlTail, parse_record
from trainkit.run.rundir import RunDir

RECENT_RECORDS = 200
NOTABLE_EVENTS = frozenset(
    {
        *("signal", "rank_failed", "hang", "slow_rank", "slow_run", "requeue_decision", "restart"),
        *("checkpoint_rejected", "checkpoint_failed", "stopped"),
    }
)
"""Events that the last warnings are made of."""
MAX_NOTABLE = 100
MAX_POINTS = 600
"""Points of a curve that are kept; with twice as many, every second one is dropped."""
SAMPLED_BYTES = 2 * 2**20
"""Up to this many new bytes are read; of more, `MAX_POINTS` evenly spaced lines and the newest ones."""
CURVES = ("loss", "grad_norm", "lr", "tokens_per_s")
SAMPLE_BYTES = 16_384
"""The end of a health file that contains its newest sample."""


class EventHistory:
    """What the status of a run needs of all of its events."""

    def __init__(self, path: Path) -> None:
        self._tail = JsonlTail(path, from_start=True)
        self._clear()

    def _clear(self) -> None:
        self._tail.position = 0
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT_RECORDS)
        self.notable: deque[dict[str, Any]] = deque(maxlen=MAX_NOTABLE)
        self.first_val_loss: float | None = None
        self.val_loss: float | None = None
        self.total_steps: int | None = None
        """As the trainer logged it last."""
        self.saved: dict[str, Any] | None = None
        """The newest ``checkpoint_commit``."""
        self.save_began: object = None
        """The time of its ``checkpoint_begin``: the state is that of this moment."""
        self._silence: dict[str, Any] = {}
        """The newest of `SILENCE_EVENTS`."""
        self._failed_saves: list[dict[str, Any]] = []
        """The newest saves, as far as all of them failed, in one attempt."""
        self._begun: dict[object, object] = {}
        self._firsts: dict[tuple[object, object], dict[str, Any]] = {}
        self._slowdowns: list[dict[str, Any]] = []
        self._for_restarts: list[dict[str, Any]] = []
        self._restarts: list[Restart] | None = []

    def update(self) -> None:
        """Read the events that were appended since the last call."""
        if self._tail.size() < self._tail.position:
            self._clear()  # another file
        for event in self._tail.read():
            self._add(event)

    def _add(self, event: dict[str, Any]) -> None:
        name = event.get("event")
        if not isinstance(name, str) or not all(_is_count(event.get(key)) for key in ("attempt", "step")):
            return  # damaged
        self.recent.append(event)
        self._firsts.setdefault((event.get("attempt"), name), event)
        if isinstance(event.get("total_steps"), int):
            self.total_steps = event["total_steps"]
        if name in NOTABLE_EVENTS:
            self.notable.append(event)
        if name in SLOWDOWN_EVENTS:
            self._slowdowns.append(event)
        if name in RESTART_EVENTS:
            self._for_restarts.append(event)
            self._restarts = None
        if name in SILENCE_EVENTS:
            self._silence = event
        if name in SAVE_EVENTS:
            self._failed_saves = failed_in_a_row(self._failed_saves, event)
        if name == "evaluated":
            self.val_loss = event["val_loss"] if is_number(event.get("val_loss")) else None
            if self.first_val_loss is None:
                self.first_val_loss = self.val_loss
        elif name == "checkpoint_begin":
            self._begun[event.get("step")] = event.get("time")
        elif name == "checkpoint_commit":
            self.saved = event
            self.save_began = self._begun.pop(event.get("step"), event.get("time"))

    @property
    def restarts(self) -> list[Restart]:
        if self._restarts is None:
            self._restarts = find_restarts(self._for_restarts)
        return self._restarts

    def slowdowns(self, attempt: int) -> list[dict[str, Any]]:
        """The events of ranks of an attempt, or of the whole run, that became slow and still are."""
        return still_slow(self._slowdowns, attempt)

    def silence(self, attempt: int) -> Mapping[str, Any] | None:
        """The event of a silence of an attempt that lasts; None without one."""
        is_open = self._silence.get("event") == "silent" and self._silence.get("attempt") == attempt
        return self._silence if is_open else None

    def failed_saves(self, attempt: int) -> list[dict[str, Any]]:
        """The newest saves of an attempt, as far as all of them failed."""
        return [event for event in self._failed_saves if event.get("attempt") == attempt]

    def first(self, attempt: int | None, name: str) -> Mapping[str, Any]:
        """The first event of this name of an attempt; empty without one."""
        return self._firsts.get((attempt, name), {})


def _is_count(value: object) -> bool:
    return value is None or isinstance(value, int)


class MetricsHistory:
    """The newest records of metrics.jsonl, and evenly spaced ones of the whole run."""

    def __init__(self, path: Path) -> None:
        self._tail = JsonlTail(path, from_start=True)
        self._clear()

    def _clear(self) -> None:
        self._tail.position = 0
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT_RECORDS)
        self.points: list[dict[str, Any]] = []
        """``step`` and `CURVES` of some records, by step."""
        self._every = 1
        """Of new records, every how many become a point."""
        self._count = 0

    def update(self) -> None:
        """Read what was appended since the last call, or a sample of it if that is much."""
        size = self._tail.size()
        if size < self._tail.position:
            self._clear()
        if size - self._tail.position > SAMPLED_BYTES:
            self._sample(size)
        for record in self._tail.read():
            self._count += 1
            self._add(record, self._count % self._every == 0)

    def _sample(self, size: int) -> None:
        begin, end = self._tail.position, size - SAMPLED_BYTES // 8
        lines = 0
        with self._tail.path.open("rb") as stream:
            for index in range(MAX_POINTS):
                stream.seek(begin + (end - begin) * index // MAX_POINTS)
                if stream.tell():
                    stream.readline()
                line = stream.readline()
                lines += len(line)
                record = parse_record(line)
                if record is not None:
                    self._add(record, True)
            stream.seek(end)
            stream.readline()
            self._tail.position = stream.tell()
        between = (end - begin) / MAX_POINTS
        self._every = max(self._every, round(between / max(1.0, lines / MAX_POINTS)))

    def _add(self, record: dict[str, Any], is_point: bool) -> None:
        step = record.get("step")
        if not isinstance(step, int):
            return
        self.recent.append(record)
        while self.points and self.points[-1]["step"] >= step:
            self.points.pop()  # computed again by a later attempt
        if is_point:
            self.points.append({"step": step, **{name: record.get(name) for name in CURVES}})
        if len(self.points) >= 2 * MAX_POINTS:
            self.points = self.points[1::2]
            self._every *= 2

    def curve(self, name: str) -> list[tuple[int, float]]:
        """The finite points of a curve, with the newest record as the last one."""
        points = [*self.points, *list(self.recent)[-1:]]
        found = {point["step"]: point.get(name) for point in points}
        return [(step, float(value)) for step, value in found.items() if is_number(value)]

    def median(self, name: str) -> float | None:
        """The median of a curve over the run."""
        values = [value for _, value in self.curve(name)]
        return statistics.median(values) if values else None


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class HealthFiles:
    """The newest sample of each node; reads the end of the files that have changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, tuple[int, int]] = {}
        self.newest: dict[str, dict[str, Any]] = {}
        """Host -> its newest sample."""

    def update(self) -> None:
        """Read the samples that were written since the last call."""
        try:
            entries = [entry for entry in os.scandir(self._folder) if entry.name.endswith(".jsonl")]
        except FileNotFoundError:
            entries = []
        names = {entry.name for entry in entries}
        for name in self._seen.keys() - names:
            del self._seen[name]
            self.newest.pop(Path(name).stem, None)
        for entry in entries:
            state = entry.stat()
            key = (state.st_mtime_ns, state.st_size)
            if self._seen.get(entry.name) != key:
                self._seen[entry.name] = key
                sample = newest_sample(Path(entry.path))
                if sample is not None:
                    self.newest[entry.name.removesuffix(".jsonl")] = sample


def newest_sample(file: Path) -> dict[str, Any] | None:
    """The last complete record of a file; None without one in its last `SAMPLE_BYTES` bytes."""
    with file.open("rb") as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - SAMPLE_BYTES))
        lines = stream.read().split(b"\n")[:-1]
    return next((record for record in map(parse_record, reversed(lines)) if record is not None), None)


def gpus_of(sample: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The GPUs in a health sample."""
    gpus = sample.get("gpus")
    return [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []


class RunFiles:
    """The growing files of a run."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.events = EventHistory(run.events_file)
        self.metrics = MetricsHistory(run.metrics_file)
        self.health = HealthFiles(run.path / "health")

    def update(self) -> None:
        """Read what was written since the last call; raises OSError for files that cannot be read."""
        self.events.update()
        self.metrics.update()
        self.health.update()
