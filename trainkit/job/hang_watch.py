"""Notices that a rank has reported to come no further, and gives the others time to say where they are."""

from __future__ import annotations

import time

from trainkit.job.hangs import read_hangs
from trainkit.rundir import AttemptDir

GATHER_S = 5.0
"""Ranks that wait for each other notice it within a moment of each other."""


class HangWatch:
    """Looks for reports of one attempt."""

    def __init__(self, attempt: AttemptDir) -> None:
        self._attempt = attempt
        self._first_s: float | None = None

    def is_over(self) -> bool:
        """Whether there is a hang, and all who could tell of it have had the time to."""
        if self._first_s is None and read_hangs(self._attempt):
            self._first_s = time.monotonic()
        return self._first_s is not None and time.monotonic() > self._first_s + GATHER_S
