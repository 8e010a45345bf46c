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
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from trainkit.plan.launch import Layout
from trainkit.trainer.distributed import World

Phase = Literal["data", "compute"]
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


def _elapsed_s(first: Any, last: Any) -> float:
    """The seconds between two results of `StepClock._now`."""
    return float(last - first if isinstance(first, float) else first.elapsed_time(last) / 1e3)


@dataclass
class Slowdown:
    """A rank that seems slow; `SlowRanks.add` returns it once it certainly is, and when that is over."""

    rank: int
    host: str
    since_step: int
    phase: Phase = "compute"
    """Where most of the difference is."""
    own_s: float = 0.0
    """Seconds of a step before its first collective."""
    usual_s: float = 0.0
    """The seconds of the other ranks."""
    is_over: bool = False
    level: int = 0
    """Rises with each window that is slow, up to `WINDOWS`, and falls with each other one."""
    slow_s: float = 0.0
    is_certain: bool = False

    @property
    def ratio(self) -> float:
        return self.own_s / self.usual_s if self.usual_s else math.inf

    def changes(self, *, is_slow: bool, window_s: float) -> bool:
        """Count a window; returns whether the slowdown has become certain, or a certain one has ended."""
        self.is_over = not is_slow
        if self.is_over:
            self.level -= 1
            return self.is_certain and self.level == 0
        self.level = min(WINDOWS, self.level + 1)
        self.slow_s += window_s
        if self.is_certain or self.level < WINDOWS or self.slow_s < MIN_SLOW_S:
            return False
        self.is_certain = True
        return True


class SlowRanks:
    """Compares the times of the ranks, on rank 0."""

    def __init__(self, layout: Layout, hosts: Sequence[str], *, on_gpu: bool) -> None:
        self._hosts = hosts
        self._has_local_forward = has_local_forward(layout)
        self._groups: dict[int, list[int]] = defaultdict(list)
        """Ranks that do the same work, by pipeline stage."""
        # On CPUs, other processes of the host disturb an update more than a slow CPU does.
        if on_gpu or self._has_local_forward:
            for rank in range(layout.world_size):
                self._groups[layout.place(rank).pp].append(rank)
        self._steps_s: list[float] = []
        self._slow: dict[int, Slowdown] = {}
        self._has_started = False
        self.slowest: dict[str, float | str] | None = None
        """The rank with the longest time before its first collective in the newest window, slow or not, as
        values for a record of the metrics; None where ranks are not compared."""

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
        self._steps_s = []
        if not self._has_started:
            # The first whole window has what compiling and first accesses to files and memory take.
            self._has_started = len(steps_s) >= WINDOW
            return []
        changed, first = [], step - len(steps_s) + 1
        share = MIN_EXCESS_SHARE if self._has_local_forward else 0.0
        min_excess_s = max(MIN_EXCESS_S, share * statistics.median(steps_s))
        largest_s = -math.inf
        for group in self._groups.values():
            if len(group) < 2:
                continue
            usual = _median_times(own[rank] for rank in group)
            for rank in group:
                if len(group) < FEW:
                    usual = _median_times(own[other] for other in group if other != rank)
                own_s, usual_s = sum(own[rank]), sum(usual)
                if own_s - usual_s > largest_s:
                    largest_s = own_s - usual_s
                    self.slowest = {
                        "slowest_rank": rank,
                        "slowest_host": self._hosts[rank],
                        "slowest_rank_s": round(own_s, 6),
                        "other_ranks_s": round(usual_s, 6),
                    }
                is_slow = own_s > RATIO * usual_s and own_s - usual_s > min_excess_s
                if not (is_slow or rank in self._slow):
                    continue
                found = self._slow.setdefault(rank, Slowdown(rank, self._hosts[rank], first))
                waits = own[rank][0] - usual[0] > own[rank][1] - usual[1]
                found.phase, found.own_s, found.usual_s = "data" if waits else "compute", own_s, usual_s
                if found.changes(is_slow=is_slow, window_s=sum(steps_s)):
                    changed.append(found)
                if found.level == 0:
                    del self._slow[rank]
        return changed
