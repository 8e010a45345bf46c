"""Finds slow ranks by comparing how long each rank computes before the first collective in a step.

Rank 0 compares the times of all ranks at the end of each window of steps; see `trainkit.trainer.step_clock`.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import Literal

from trainkit.capability import NewEvent, RankObserver, TimedRanks

log = getLogger(__name__)
Phase = Literal["data", "compute"]
WINDOWS = 2
"""Number of consecutive windows after which a rank is considered slow or, if it was slow, no longer slow."""
RATIO = 1.4
"""A rank is considered slow if its time exceeds the time of other ranks by more than this factor."""
MIN_EXCESS_S = 2e-3
MIN_EXCESS_SHARE = 0.02
"""Minimum time difference for a slow rank, in seconds and as a fraction of the step time.

The minimum fraction applies only if the measured time includes the forward pass. For sharded ranks, the
measured time covers little more than the optimizer update. The update shows the speed of a rank, but is a
small fraction of the step.
"""
MIN_SLOW_S = 3.0
"""Minimum time for which a rank must be slow before it is reported, in seconds, because the durations of
short steps vary on busy hosts."""
FEW = 4
"""In a group with fewer ranks than this, a rank is compared only with the other ranks, because its own time
would affect the median of the group."""


def _median_times(times: Iterable[tuple[float, float]]) -> tuple[float, float]:
    data_s, compute_s = map(statistics.median, zip(*times, strict=True))
    return data_s, compute_s


@dataclass
class Slowdown:
    """A rank that may be slow; `SlowRanks.compare` returns slowdowns that have become certain or ended."""

    rank: int
    host: str
    since_step: int
    phase: Phase = "compute"
    """The phase that accounts for most of the time difference."""
    own_s: float = 0.0
    """Seconds per step that this rank computes before the first collective."""
    usual_s: float = 0.0
    """Seconds per step that other ranks compute before the first collective."""
    is_over: bool = False
    level: int = 0
    """The level increases by one for each slow window, up to `WINDOWS`, and decreases by one for each other
    window."""
    slow_s: float = 0.0
    is_certain: bool = False

    @property
    def ratio(self) -> float:
        return self.own_s / self.usual_s if self.usual_s else math.inf

    def changes(self, *, is_slow: bool, window_s: float) -> bool:
        """Count one window; return whether the slowdown has just become certain or has just ended."""
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


class SlowRanks(RankObserver):
    """Compares the step times of all ranks on rank 0."""

    def __init__(self, ranks: TimedRanks) -> None:
        self._hosts, self._window, layout = ranks.hosts, ranks.window, ranks.layout
        self._has_local_forward = layout.has_local_forward
        self._groups: dict[int, list[int]] = defaultdict(list)
        """Maps a pipeline stage to its ranks, which all do the same work."""
        # On CPUs, the update time depends more on other processes on the host than on the speed of the CPU.
        if ranks.on_gpu or self._has_local_forward:
            for rank in range(layout.world_size):
                self._groups[layout.place(rank).pp].append(rank)
        self._steps_s: list[float] = []
        self._slow: dict[int, Slowdown] = {}
        self._has_started = False
        self.values: dict[str, float | str] = {}
        """Metrics that identify the rank with the longest time in the newest window, whether it is slow or
        not."""

    def add(self, step: int, times: Sequence[float], step_s: float) -> Iterator[NewEvent]:
        """Add a step's times; log and yield an event for each rank that has become slow or has recovered."""
        for found in self.compare(step, times, step_s):
            shown = f"step={step} rank {found.rank} on {found.host}"
            if found.is_over:
                log.info(f"{shown} is no longer slow")
            else:
                log.warning(
                    f"{shown} has been slow since step {found.since_step} ({found.phase}):"
                    f" {1e3 * found.own_s:.1f} ms per step, other ranks {1e3 * found.usual_s:.1f} ms"
                )
            at = {"rank": found.rank, "host": found.host, "step": step, "since_step": found.since_step}
            times_s = {"own_s": round(found.own_s, 6), "usual_s": round(found.usual_s, 6)}
            values = {**at, "phase": found.phase, **times_s, "ratio": round(found.ratio, 2)}
            yield "slow_rank_over" if found.is_over else "slow_rank", values

    def compare(self, step: int, times: Sequence[float], step_s: float) -> list[Slowdown]:
        """Add a step's times; at the end of a window, return slowdowns that have become certain or ended."""
        self._steps_s.append(step_s)
        if not times:
            return []
        # Use lists instead of NumPy, whose overhead per call would delay every rank.
        own, steps_s = list(zip(times[::2], times[1::2], strict=True)), self._steps_s
        self._steps_s = []
        if not self._has_started:
            # Skip the first complete window, which includes compilation and first-time file and memory
            # accesses.
            self._has_started = len(steps_s) >= self._window
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
                    self.values = {
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
