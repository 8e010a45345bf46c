"""Whether an attempt was deleted while it ran."""

from __future__ import annotations

import time

from trainkit.rundir import AttemptDir

GONE_S = 10.0
"""A filesystem that is mounted anew is away for less."""


class DeletedAttempt:
    """An attempt whose folder was deleted: whatever it still computes, nobody can ever find."""

    def __init__(self, attempt: AttemptDir) -> None:
        self.attempt = attempt
        self._since_s: float | None = None

    def look(self) -> bool:
        """Whether its folder has not been there for some time. Raises OSError when that cannot be seen."""
        if self.attempt.path.is_dir():
            self._since_s = None
        elif self._since_s is None:
            self._since_s = time.monotonic()
        return self._since_s is not None and time.monotonic() >= self._since_s + GONE_S
