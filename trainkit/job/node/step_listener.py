"""Tells whether Slurm has signalled the ranks of a node as well as their agent."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path

from trainkit.job import processes
from trainkit.job.signals import NOTICE_SIGNALS

PATIENCE_S = 0.5
"""How long after the agent its ranks may receive a signal that Slurm sends to both."""


class StepListener:
    """A child of the agent that notes the notices it receives: its ranks have received the same.

    Whom Slurm signals depends on its `ProctrackType`, on the version and on how it was asked.
    """

    def __init__(self) -> None:
        """Start it; call after the ranks, with the notice signals blocked."""
        self._reader, writer = os.pipe()
        self._heard: set[int] = set()
        before_listening = processes.dies_with(os.getpid(), signal.SIGKILL)
        if os.fork() == 0:
            try:
                os.setpgid(0, 0)  # as the ranks
                before_listening()
                # A connection of the agent ends when the last process that has it closes it.
                for file in list(Path("/proc/self/fd").iterdir()):
                    if int(file.name) > 2 and int(file.name) != writer:
                        with contextlib.suppress(OSError):  # that of the listing itself
                            os.close(int(file.name))
                while True:
                    os.write(writer, bytes([signal.sigwait(NOTICE_SIGNALS)]))
            finally:
                os._exit(1)
        os.close(writer)

    def has_heard(self, number: signal.Signals) -> bool:
        """Whether the ranks have received a signal that the agent has just received."""
        deadline_s = time.monotonic() + PATIENCE_S
        while number not in self._heard and (left_s := deadline_s - time.monotonic()) > 0:
            if select.select([self._reader], [], [], left_s)[0]:
                received = os.read(self._reader, 64)
                if not received:
                    return False  # it was killed
                self._heard.update(received)
        return number in self._heard
