"""Finds ranks that hold the others up, from how long each computes before it first waits for another.

A slow rank makes all ranks slow, because of the collectives, so the duration of a step tells none apart. What
differs is the time between the last collective of a step and the first of the next one: the update, the wait
for data, and without sharded parameters the forward pass. At the end of a window of steps, every rank adds
its mean times to the all-reduce that each step has anyway, and rank 0 compares them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from trainkit.plan.launch import Layout
from trainkit.trainer.distributed import World

Phase = Literal["data", "compute", "network"]
WINDOW = 10
"""Steps that are judged together."""
WINDOWS = 2
"""Windows in a row after which a rank is slow, or no longer slow."""
RATIO = 1.4
"""A rank is slow if its own time is this many times that of the others."""
MIN_EXCESS_S = 2e-3
MIN_EXCESS_SHARE = 0.02
"""Smallest difference that counts: in seconds, and as a share of the step where the forward pass is measured.

Sharded ranks measure little more than their update: it shows how fast they are, not how long they compute.
"""
MIN_SLOW_S = 3.0
"""How long it must be slow: on busy hosts, short steps differ for a moment."""
RUN_RATIO = 1.5
"""The run is slow if its steps take this many times the median of its earlier windows."""
RUN_WINDOWS = 3
BASE_WINDOWS = 5
"""Windows to know before the run is compared with its own past."""
MAX_PAST = 100
FEW = 4
"""Ranks below which a slow one changes the median, so that it is compared with the others alone."""
NUM_TIMES = 2
"""Times of a rank in a report: waiting for data, and computing."""
Times = tuple[float, float]
LAG = 2
"""Steps after which the events of a GPU are certainly complete: the host runs at most one step ahead."""


def has_local_forward(layout: Layout) -> bool:
    """Whether a forward pass has no collective."""
    return layout.world_size == layout.dp_replicate


def _median_times(times: Iterable[Times]) -> Times:
    data_s, compute_s = map(statistics.median, zip(*times, strict=True))
    return data_s, compute_s


def _usual_times(group: Sequence[int], rank: int, own: Sequence[Times], median: Times) -> Times:
    """The times that a rank of a group is compared with; `median` is that of the group."""
    if len(group) >= FEW:
        return median
    return _median_times([own[other] for other in group if other != rank])


def is_reported(step: int, world: World) -> bool:
    """Whether the all-reduce of a step has the times of the ranks: the last one of a window."""
    return world.size > 1 and step % WINDOW == 0


def typical_times(steps: Sequence[Times]) -> Times:
    """The mean of the times of some steps, without the longest: a page fault or a signal is no slow rank."""
    if len(steps) < 2:
        return steps[0] if steps else (0.0, 0.0)
    longest = max(steps, key=sum)
    data_s, compute_s = (
        sum(times) - most for times, most in zip(zip(*steps, strict=True), longest, strict=True)
    )
    return data_s / (len(steps) - 1), compute_s / (len(steps) - 1)


class StepClock:
    """Measures the times of this rank; never waits for the device.

    On a GPU the times are those of its stream.
    """

    def __init__(self, world: World, layout: Layout) -> None:
        self._world = world
        self._uses_events = world.device.type == "cuda" and world.size > 1
        self._has_local_forward = has_local_forward(layout)
        self._data_s = 0.0
        self._marks: list[float | torch.cuda.Event] = []
        self._past: list[tuple[float, list[float | torch.cuda.Event]]] = []
        """Of the completed steps that are not reported yet."""

    def begin_step(self, data_wait_s: float) -> None:
        """Call once the batch is there, before the forward pass."""
        self._data_s = data_wait_s
        self._marks = [self._now(), self._now()]

    def end_forward(self) -> None:
        """Call before the first collective of the backward pass."""
        if self._has_local_forward:
            self._marks[1] = self._now()

    def begin_update(self) -> None:
        """Call after the last collective of the step."""
        self._marks.append(self._now())

    def end_update(self) -> None:
        """Call after the update."""
        self._marks.append(self._now())
        if self._world.size > 1:
            self._past.append((self._data_s, self._marks))

    def report(self) -> torch.Tensor:
        """The times since the last report as the terms of this rank, float64 [ranks x 2].

        Zeros if no step was completed since.
        """
        num_ready = max(0, len(self._past) - (LAG - 1 if self._uses_events else 0))
        ready, self._past = self._past[:num_ready], self._past[num_ready:]
        times = typical_times(
            [
                (data_s, _elapsed_s(marks[0], marks[1]) + _elapsed_s(marks[2], marks[3]))
                for data_s, marks in ready
            ]
        )
        terms = torch.zeros(self._world.size, NUM_TIMES, dtype=torch.float64, device="cpu")
        terms[self._world.rank] = torch.tensor(times, dtype=torch.float64)
        terms = terms.view(-1)
        if not self._uses_events:
            return terms
        return terms.pin_memory().to(self._world.device, non_blocking=True)

    def _now(self) -> float | torch.cuda.Event:
        if not self._uses_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _elapsed_s(first: float | torch.cuda.Event, last: float | torch.cuda.Event) -> float:
    if isinstance(first, float) or isinstance(last, float):
        assert isinstance(first, float)
        assert isinstance(last, float)
        return last - first
    return float(first.elapsed_time(last)) / 1e3


@dataclass(frozen=True)
class Slowdown:
    """A rank, or with `rank` None the whole run, that became slow, or is no longer slow."""

    rank: int | None
    is_over: bool
    phase: Phase
    """Where most of the difference is."""
    ratio: float
    """Its time over that of the others, or of the run's past."""
    since_step: int
    own_s: float
    """Its time of a step, in seconds, of a rank before its first collective."""
    usual_s: float
    """The time of the other ranks, or of the run's past."""


@dataclass(frozen=True)
class SlowestRank:
    """The rank with the longest time before its first collective in a window, slow or not."""

    rank: int
    own_s: float
    """Its mean time of a step, in seconds."""
    usual_s: float
    """The mean time of a step of the other ranks, in seconds."""

    @property
    def excess_s(self) -> float:
        return self.own_s - self.usual_s

    def to_record(self, hosts: Sequence[str]) -> dict[str, float | str]:
        """The values for a record of the metrics; `hosts` are those of all ranks."""
        return {
            "slowest_rank": self.rank,
            "slowest_host": hosts[self.rank],
            "slowest_rank_s": round(self.own_s, 6),
            "other_ranks_s": round(self.usual_s, 6),
        }


@dataclass
class _Episode:
    """A rank, or the run, that seems slow, and the windows in a row that say so or no longer do."""

    since_step: int
    num_slow: int = 0
    slow_s: float = 0.0
    num_normal: int = 0
    is_reported: bool = False


class SlowRanks:
    """Compares the times of the ranks, on rank 0."""

    def __init__(self, layout: Layout, *, on_gpu: bool) -> None:
        stages = [layout.place(rank).pp for rank in range(layout.world_size)]
        self._has_local_forward = has_local_forward(layout)
        # On CPUs, other processes of the host disturb an update more than a slow CPU does.
        self._compares_ranks = on_gpu or self._has_local_forward
        self._groups = [
            [rank for rank, own in enumerate(stages) if own == stage] for stage in range(layout.pp)
        ]
        """Ranks that do the same work: those of each pipeline stage."""
        self._steps_s: list[float] = []
        self._past: list[tuple[float, float, float]] = []
        """Of earlier windows: seconds of a step, and the ranks' median seconds of data and computing."""
        self._episodes: dict[int | None, _Episode] = {}
        self._has_started = False
        self._window_s = 0.0
        self.slowest: SlowestRank | None = None
        """Of the newest window; None where ranks are not compared."""

    def add(self, step: int, times: Sequence[float], step_s: float) -> list[Slowdown]:
        """Add a step; returns what changed, at the end of a window.

        `times` are those that the ranks have reported in this step, [ranks x 2], or empty. `step_s` is the
        duration of the step, without saves and validation.
        """
        self._steps_s.append(step_s)
        if not times:
            return []
        # Lists, since most of NumPy's time is that of a call, and this is on the path of every rank.
        own, steps_s = list(zip(times[::NUM_TIMES], times[1::NUM_TIMES], strict=True)), self._steps_s
        self._window_s, self._steps_s = sum(steps_s), []
        if not self._has_started:
            # The first whole window has what compiling and first accesses to files and memory take.
            self._has_started = len(steps_s) >= WINDOW
            return []
        first = step - len(steps_s) + 1
        duration_s = statistics.median(steps_s)
        found = list(self._of_ranks(own, first, duration_s)) if self._compares_ranks else []
        if None in self._episodes or not self._episodes:
            found += self._of_run(own, first, duration_s)  # unless a slow rank explains it
        return [slowdown for slowdown in found if slowdown is not None]

    def _of_ranks(self, own: Sequence[Times], first: int, step_s: float) -> Iterator[Slowdown | None]:
        min_excess_s = max(MIN_EXCESS_S, MIN_EXCESS_SHARE * step_s if self._has_local_forward else 0.0)
        self.slowest = None
        for group in self._groups:
            if len(group) < 2:
                continue
            median = _median_times([own[rank] for rank in group])
            self._note_slowest(group, own, median)
            limit = sum(median) * (1.0 if len(group) < FEW else RATIO)
            for rank in group:
                total_s = sum(own[rank])
                if total_s <= limit and rank not in self._episodes:
                    continue
                usual = _usual_times(group, rank, own, median)
                usual_s = sum(usual)
                is_slow = total_s > RATIO * usual_s and total_s - usual_s > min_excess_s
                if is_slow or rank in self._episodes:
                    waits = own[rank][0] - usual[0] > own[rank][1] - usual[1]
                    phase: Phase = "data" if waits else "compute"
                    yield self._judge(rank, is_slow, first, WINDOWS, phase, total_s, usual_s)

    def _note_slowest(self, group: Sequence[int], own: Sequence[Times], median: Times) -> None:
        rank = max(group, key=lambda rank: sum(own[rank]))
        usual = _usual_times(group, rank, own, median)
        found = SlowestRank(rank, sum(own[rank]), sum(usual))
        if self.slowest is None or found.excess_s > self.slowest.excess_s:
            self.slowest = found

    def _of_run(self, own: Sequence[Times], first: int, step_s: float) -> Iterator[Slowdown | None]:
        data_s, compute_s = _median_times(own)
        if len(self._past) >= BASE_WINDOWS:
            usual_s, usual_data_s, usual_compute_s = map(statistics.median, zip(*self._past, strict=True))
            is_slow = step_s > RUN_RATIO * usual_s
            excess_s = step_s - usual_s
            if data_s - usual_data_s > excess_s / 2:
                phase: Phase = "data"
            else:
                phase = "compute" if compute_s > RUN_RATIO * usual_compute_s else "network"
            yield self._judge(None, is_slow, first, RUN_WINDOWS, phase, step_s, usual_s)
            if is_slow:
                return  # not what is usual
        self._past = [*self._past[-MAX_PAST:], (step_s, data_s, compute_s)]

    def _judge(
        self,
        rank: int | None,
        is_slow: bool,
        first: int,
        num_windows: int,
        phase: Phase,
        own_s: float,
        usual_s: float,
    ) -> Slowdown | None:
        """Count a window of a rank or the run; returns a slowdown if it has just begun or ended."""
        episode = self._episodes.get(rank)
        if episode is None:
            if not is_slow:
                return None
            episode = self._episodes[rank] = _Episode(first)
        ratio = own_s / usual_s if usual_s else math.inf
        slowdown = Slowdown(rank, not is_slow, phase, ratio, episode.since_step, own_s, usual_s)
        if is_slow:
            episode.num_slow, episode.num_normal = episode.num_slow + 1, 0
            episode.slow_s += self._window_s
            if episode.is_reported or episode.num_slow < num_windows or episode.slow_s < MIN_SLOW_S:
                return None
            episode.is_reported = True
            return slowdown
        episode.num_normal += 1
        if not episode.is_reported or episode.num_normal >= num_windows:
            del self._episodes[rank]
            return slowdown if episode.is_reported else None
        return None
