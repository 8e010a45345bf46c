"""The step and phase that a rank is in, for the watchdog and for error records.

The training thread writes, other threads read. Each update assigns one tuple, so readers see either the old
or the new state without a lock. A step makes a handful of updates.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Literal, NamedTuple

Phase = Literal[
    "start",
    "rendezvous",
    "build",
    "load",
    "begin",
    "data",
    "forward",
    "backward",
    "forward_backward",
    "update",
    "record",
    "evaluate",
    "save",
    "end",
    "unwatched",
]
"""The phases of a rank, in order.

A pipeline alternates forward and backward passes: `forward_backward` covers both. `record` writes metrics. A
loop of the user's own is `unwatched` where it says so, and after its last step.
"""

NUM_RECENT = 64


class CurrentPhase(NamedTuple):
    """The step and phase of a rank at one moment."""

    step: int | None
    """The step being computed; None before the first."""
    phase: Phase
    phase_index: int
    """Phases entered since the step began; before the first step, since the process started."""
    since_s: float
    """Monotonic time at which the phase was entered."""


@dataclass(frozen=True)
class RankInfo:
    """Which rank this process is, as its records of failures and hangs say it."""

    rank: int
    node_rank: int
    host: str


class Progress:
    """Tracks the step and phase of this rank, and the duration of its recent steps."""

    def __init__(self) -> None:
        self._current: tuple[int | None, Phase, int, float] = (None, "start", 0, monotonic())
        self._completed: set[Phase] = set()
        self._began_s = 0.0
        self._num_steps = 0
        self._recent_s = [0.0] * NUM_RECENT

    def enter(self, phase: Phase) -> None:
        """Enter the next phase of the step."""
        step, before, index, _ = self._current
        self._completed.add(before)
        self._current = (step, phase, index + 1, monotonic())

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Enter a phase for the duration of the block, and afterwards the phase before it again."""
        before = self._current[1]
        self.enter(phase)
        yield
        self.enter(before)

    def begin_step(self, step: int) -> None:
        """Begin a step, in phase `data`."""
        self._completed.add(self._current[1])
        self._began_s = now = monotonic()
        self._current = (step, "data", 0, now)

    def end_step(self) -> None:
        """Record the duration of the step and enter phase `record`, which is not part of it."""
        self.enter("record")
        self._recent_s[self._num_steps % NUM_RECENT] = self._current[3] - self._began_s
        self._num_steps += 1

    @property
    def current(self) -> CurrentPhase:
        return CurrentPhase(*self._current)

    @property
    def last_step_s(self) -> float:
        """The duration of the last step in seconds."""
        return self._recent_s[(self._num_steps - 1) % NUM_RECENT]

    @property
    def median_step_s(self) -> float | None:
        """The median duration of the recent steps in seconds; None before the first has ended."""
        num_steps = self._num_steps
        return statistics.median(self._recent_s[:num_steps]) if num_steps else None

    def has_completed(self, phase: Phase) -> bool:
        """Whether this process has completed this phase at least once; the first time may take long."""
        return phase in self._completed
