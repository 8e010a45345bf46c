"""Measure how long each rank computes before it first has to wait for another rank.

Collectives make every rank as slow as the slowest rank, so step durations do not show which rank is slow. The
time from the last collective of a step to the first collective of the next step shows which rank is slow. The
measured time includes the optimizer update, the wait for data and, unless parameters are sharded, the forward
pass. At the end of each window of steps, every rank adds its mean times to the step's all-reduce, and
capabilities on rank 0 receive the times of all ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from logging import getLogger
from typing import Any

import torch

from trainkit.capability import RankObserver, TimedRanks
from trainkit.plan.launch import LaunchPlan, Layout
from trainkit.run.process import own_host
from trainkit.run.rundir import AttemptDir
from trainkit.shipped import Guard
from trainkit.trainer.distributed import World, gather_from_all, record_event

log = getLogger(__name__)
WINDOW = 10
"""Number of steps whose mean times are reported together."""
NUM_TIMES = 2
"""Number of times that each rank reports: the wait for data and the computation."""
Times = tuple[float, float]
LAG = 2
"""Number of steps after which a step's GPU events are complete, since the host is at most one step ahead."""


def is_reported(step: int, world: World) -> bool:
    """Return whether a step's all-reduce includes the ranks' times; True at the end of each window."""
    return world.size > 1 and step % WINDOW == 0


def typical_times(steps: Sequence[Times]) -> Times:
    """Return the mean times of the steps, excluding the longest step, which may include page faults."""
    if len(steps) < 2:
        return steps[0] if steps else (0.0, 0.0)
    longest = max(steps, key=sum)
    data_s, compute_s = (
        sum(times) - most for times, most in zip(zip(*steps, strict=True), longest, strict=True)
    )
    return data_s / (len(steps) - 1), compute_s / (len(steps) - 1)


class StepClock:
    """Measures this rank's times; on a GPU, uses events on its stream, without waiting for the device."""

    def __init__(self, world: World, layout: Layout) -> None:
        self._world = world
        self._uses_events = world.device.type == "cuda" and world.size > 1
        self._has_local_forward = layout.has_local_forward
        self._data_s = 0.0
        self._marks: list[float | torch.cuda.Event] = []
        self._past: list[tuple[float, list[float | torch.cuda.Event]]] = []
        """The times of completed steps that have not been reported yet."""

    def begin_step(self, data_wait_s: float) -> None:
        """Start measuring a step; call this when the batch is available, before the forward pass."""
        self._data_s = data_wait_s
        self._marks = [self._now(), self._now()]

    def end_forward(self) -> None:
        """Stop measuring the forward pass; call this before the first collective of the backward pass."""
        if self._has_local_forward:
            self._marks[1] = self._now()

    def begin_update(self) -> None:
        """Start measuring the update; call this after the last collective of the step."""
        self._marks.append(self._now())

    def end_update(self) -> None:
        """Stop measuring the optimizer update."""
        self._marks.append(self._now())
        if self._world.size > 1:
            self._past.append((self._data_s, self._marks))

    def report(self) -> torch.Tensor:
        """Return this rank's times since the last report, float64 [ranks x 2], to be summed across the ranks.

        The entries for other ranks are 0; if no step was completed since the last report, all entries are 0.
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
    """Return the number of seconds between two results of `StepClock._now`."""
    return float(last - first if isinstance(first, float) else first.elapsed_time(last) / 1e3)


class RankObservers:
    """The capabilities on rank 0 that observe the times of all ranks; their errors do not stop the run."""

    def __init__(self, attempt: AttemptDir, plan: LaunchPlan, world: World) -> None:
        """Set up the observers; this gathers all host names, so every rank must call it."""
        hosts = gather_from_all(own_host(), world)
        self._attempt, self._own = attempt, list[tuple[str, RankObserver]]()
        if world.is_main and world.size > 1:
            ranks = TimedRanks(plan.layout, hosts, WINDOW, world.device.type == "cuda")
            self._guard = Guard(plan.parts, log.warning)
            self._own = self._guard.each(lambda one: one.rank_observer(plan, ranks))

    def add(self, step: int, times: Sequence[float], step_s: float) -> None:
        """Pass a step's times to the observers, and record the events that the observers return."""
        for name, observer in self._own:
            for event, values in self._guard.call(name, _events, observer, step, times, step_s) or ():
                record_event(self._attempt, event, **values)

    @property
    def values(self) -> dict[str, float | str]:
        """Return the observers' values for the next metrics record."""
        found: dict[str, float | str] = {}
        for name, observer in self._own:
            found |= self._guard.call(name, _values, observer) or {}
        return found


def _events(
    observer: RankObserver, step: int, times: Sequence[float], step_s: float
) -> list[tuple[str, Mapping[str, object]]]:
    """Return an observer's events; raise an error if an event cannot be recorded."""
    found = [(event, dict(values)) for event, values in observer.add(step, times, step_s)]
    json.dumps(found)
    for event, values in found:
        if reserved := {"time", "attempt", "event"} & values.keys():
            raise ValueError(f"event {event} has the reserved keys {', '.join(sorted(reserved))}")
    return [*found]


def _values(observer: RankObserver) -> dict[str, float | str]:
    """Return an observer's values; raise an error if a value cannot be recorded."""
    found = dict(observer.values)
    json.dumps(found)
    return found
