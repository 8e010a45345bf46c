"""Where a rank stands in its training, for the watchdog and for the record of a failure.

The training thread writes, others read. Every step passes a handful of these calls, so each is one assignment
of a tuple: whoever reads sees the old position or the new one, and nobody waits.
"""

from __future__ import annotations

import statistics
from time import monotonic
from typing import Literal, NamedTuple

Phase = Literal[
    "start",
    "meet",
    "build",
    "load",
    "begin",
    "data",
    "forward",
    "backward",
    "passes",
    "update",
    "record",
    "evaluate",
    "save",
    "end",
]
"""What a rank is doing, in the order of a training.

In a pipeline, which goes forward and backward in turns, `passes` stands for both; `record` is the writing of
metrics.
"""

NUM_RECENT = 64


class Position(NamedTuple):
    """Where a rank is."""

    step: int | None
    """The step that is being computed; None before the first."""
    phase: Phase
    beat: int
    """How many phases were entered since the step began, or since the start of the process before that."""
    since_s: float
    """Monotonic time at which the phase was entered."""


class Pulse:
    """The position of this rank, and how long its last steps took."""

    def __init__(self) -> None:
        self._at: tuple[int | None, Phase, int, float] = (None, "start", 0, monotonic())
        self._passed: set[Phase] = set()
        self._began_s = 0.0
        self._num_steps = 0
        self._recent_s = [0.0] * NUM_RECENT

    def enter(self, phase: Phase) -> None:
        """Say what comes next."""
        step, before, beat, _ = self._at
        self._passed.add(before)
        self._at = (step, phase, beat + 1, monotonic())

    def begin_step(self, step: int) -> None:
        """Say that a step begins: the wait for its data."""
        self._passed.add(self._at[1])
        self._began_s = now = monotonic()
        self._at = (step, "data", 0, now)

    def end_step(self) -> None:
        """Say that the step is done; what follows belongs to it, but not to how long it took."""
        self.enter("record")
        self._recent_s[self._num_steps % NUM_RECENT] = self._at[3] - self._began_s
        self._num_steps += 1

    @property
    def position(self) -> Position:
        return Position(*self._at)

    @property
    def usual_s(self) -> float | None:
        """The median of the last steps; None before the first has ended."""
        num_steps = self._num_steps
        return statistics.median(self._recent_s[:num_steps]) if num_steps else None

    def has_passed(self, phase: Phase) -> bool:
        """Whether this process was through such a phase before; the first time may take long."""
        return phase in self._passed
