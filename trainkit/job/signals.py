"""What a worker is told by signals: receiving one sets a flag, nothing else.

A Python signal handler does not run while the main thread sits inside a collective, so a rank that is
stuck there would never learn that it has to leave. The C-level handler does run, and writes the signal's
number to a wake-up pipe; a thread reads it from there at once. What is done about the flag is agreed by
all ranks at a step boundary.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

from trainkit.errors import EXIT_INTERRUPTED

NOTICE_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
"""SIGTERM: preempted, cancelled or out of time. SIGUSR2: early notice. SIGINT: Ctrl-C.

Not SIGUSR1: NCCL has been seen to catch it.
"""

WHERE_SIGNAL = signal.SIGURG
"""Asks a worker where it is. A process that does not listen for it never notices it."""


class StopRequest:
    """Whether, when and by which signal this process was asked to stop; and whether to say where it is."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self.received_monotonic_s: float | None = None
        self.received = threading.Event()
        self.asked_where = threading.Event()
        """Set whenever `WHERE_SIGNAL` came; whoever answers clears it."""

    def __bool__(self) -> bool:
        return self.signal_name is not None

    def install(self) -> None:
        """Watch for these signals from now on; call from the main thread, once a process.

        A second SIGINT ends the process at once, whatever its threads are doing.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (*NOTICE_SIGNALS, WHERE_SIGNAL):
            signal.signal(number, _noted_by_the_watcher)
        threading.Thread(target=self._watch, args=(reader,), name="signal-watch", daemon=True).start()
        # The agent starts workers with these signals blocked, so that one which comes while the
        # interpreter starts is not fatal; it is delivered here.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTICE_SIGNALS)

    def request(self, reason: str) -> None:
        """Ask this process to stop as if a signal of that name had come."""
        if self.signal_name is None:
            self.received_monotonic_s = time.monotonic()
            self.signal_name = reason
            self.received.set()

    def _watch(self, reader: int) -> None:
        interrupts = 0
        while True:
            for number in os.read(reader, 64):
                if number == WHERE_SIGNAL:
                    self.asked_where.set()
                if number not in NOTICE_SIGNALS:
                    continue
                interrupts += number == signal.SIGINT
                if interrupts > 1:
                    os._exit(EXIT_INTERRUPTED)
                self.request(signal.Signals(number).name)


def _noted_by_the_watcher(number: int, frame: FrameType | None) -> None:
    """Keep the signal's default action from ending the process."""
