"""The backend of a run whose ranks another launcher has started."""

from __future__ import annotations

import os

from trainkit.backend import NewAttempt
from trainkit.backends.local.backend import LocalBackend
from trainkit.run.events import log_event
from trainkit.run.record import AttemptRecord
from trainkit.run.rundir import AttemptDir, RunDir


class LauncherBackend(LocalBackend):
    """This process is rank 0 of another launcher, such as torchrun, and records the end."""

    def start(self, run: RunDir, new: NewAttempt) -> AttemptRecord:
        entry = super().start(run, new)
        log_event(run, entry.attempt, "started", world_size=new.plan.world_size, nodes=new.plan.num_nodes)
        return entry

    def _supervisor(self, attempt: AttemptDir, new: NewAttempt) -> int:
        return os.getpid()
