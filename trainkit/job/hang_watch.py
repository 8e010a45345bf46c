"""Notices that a rank has reported to come no further, and gives the others time to say where they are."""

from __future__ import annotations

import time

from trainkit.job.hangs import HangRecord, read_hangs
from trainkit.rundir import AttemptDir

GATHER_S = 5.0
"""Ranks that wait for each other notice it within a moment of each other."""


class HangWatch:
    """Looks for reports of one attempt."""

    def __init__(self, attempt: AttemptDir) -> None:
        self._attempt = attempt
        self._first_s: float | None = None

    def look(self) -> list[HangRecord]:
        """The reports of a hang, once all who could tell of it have had the time to; empty before."""
        records = read_hangs(self._attempt)
        if not records:
            self._first_s = None  # it went on after all
        elif self._first_s is None:
            self._first_s = time.monotonic()
        elif time.monotonic() > self._first_s + GATHER_S:
            return records
        return []
