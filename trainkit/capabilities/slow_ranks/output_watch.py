"""Measures how long a running attempt has made no progress, based on changes to the files that it writes."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from trainkit.job.hangs import GATHER_S
from trainkit.run.files import refresh_listing
from trainkit.run.rundir import AttemptDir

SILENCE_POLL_S = 10.0


class OutputWatch:
    """Watches files that change while a run makes progress."""

    def __init__(self, attempt: AttemptDir, limit_s: float, *, with_logs: bool) -> None:
        """Watch the log files of the ranks if `with_logs` is true, otherwise the trainer's events.

        `limit_s` is the number of seconds without changes that the caller wants to detect, and determines the
        polling interval.
        """
        self._attempt = attempt
        self._with_logs = with_logs
        self._pause_s = min(SILENCE_POLL_S, limit_s / 4)
        # Measure time with this host's clock, because file timestamps come from other hosts' clocks.
        self._changed_s = self._polled_s = time.monotonic()
        self._seen: dict[str, tuple[int, int]] = {}
        self._at_start: dict[str, tuple[int, int]] | None = None

    @property
    def has_output(self) -> bool:
        """Return whether any rank has printed output or written metrics or a heartbeat."""
        run, before = self._attempt.run, self._at_start or {}
        signs = (str(run.metrics_file), str(run.heartbeat_file))
        # Ignore log files of nodes, because an agent writes to them before its ranks start.
        logs = (size for name, (size, _) in self._seen.items() if Path(name).name.startswith("rank-"))
        return any(logs) or any(self._seen.get(name) != before.get(name) for name in signs)

    def poll(self) -> float | None:
        """Return the seconds since the last change, or None if the polling interval has not yet passed.

        Raises OSError if the watched files cannot be read.
        """
        now_s = time.monotonic()
        if now_s < self._polled_s + self._pause_s:
            return None
        was_suspended, self._polled_s = now_s > self._polled_s + 2 * self._pause_s + GATHER_S, now_s
        seen = self._files()
        self._at_start = seen if self._at_start is None else self._at_start
        if seen != self._seen or was_suspended:
            self._seen, self._changed_s = seen, now_s
        return now_s - self._changed_s

    def reset(self) -> None:
        """Restart the timer, so that `poll` returns the seconds since this call until a file changes."""
        self._changed_s = time.monotonic()

    def _files(self) -> dict[str, tuple[int, int]]:
        """Return the size and modification time of each watched file."""
        run, logs = self._attempt.run, self._attempt.logs_dir
        files = [run.metrics_file, run.heartbeat_file]
        if self._with_logs:
            refresh_listing(logs)
            files += [*logs.glob("rank-*.log"), *logs.glob("node-*.log")]
        else:
            files.append(run.events_file)
        found = {}
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                status = file.stat()
                found[str(file)] = status.st_size, status.st_mtime_ns
        return found
