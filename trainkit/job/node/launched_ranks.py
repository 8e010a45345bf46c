"""How the ranks of a launcher ended: it exits with 1 whatever they did, and DeepSpeed names none."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Mapping

from trainkit.errors import EXIT_OK, EXIT_STOPPED
from trainkit.job.failure.launcher_report import RankExit
from trainkit.job.processes import exit_code_of_zombie


class LaunchedRanks:
    """The processes of a launcher's ranks: a thread watches each, as only its parent can wait for it."""

    def __init__(self) -> None:
        self.first_exit: RankExit | None = None
        """The exit of the first rank that failed; None as long as none has."""
        self.codes: list[int | None] = []
        """The exit codes of the ranks that have ended; None where it came too late to see."""
        self._lock = threading.Lock()
        self._watched: set[int] = set()

    def __len__(self) -> int:
        return len(self._watched)

    @property
    def have_saved(self) -> bool:
        """Whether all that have ended say that they have saved or finished, and one that it has saved."""
        return EXIT_STOPPED in self.codes and set(self.codes) <= {EXIT_OK, EXIT_STOPPED}

    def watch(self, pids: Mapping[int, int]) -> None:
        """Watch these processes, by rank, in addition to those that are already watched."""
        for rank, pid in pids.items():
            if pid not in self._watched:
                self._watched.add(pid)
                with contextlib.suppress(OSError):  # it has ended, or the kernel is older than Linux 5.3
                    arguments = (rank, pid, os.pidfd_open(pid))
                    threading.Thread(target=self._await, args=arguments, name="rank", daemon=True).start()

    def _await(self, rank: int, pid: int, handle: int) -> None:
        try:
            select.select([handle], [], [])
        finally:
            os.close(handle)
        code = exit_code_of_zombie(pid)
        with self._lock:
            self.codes.append(code)
            if code and self.first_exit is None:
                self.first_exit = RankExit(code, rank)
