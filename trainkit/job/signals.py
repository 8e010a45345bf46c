"""The signals between supervisor, agents and workers, and the exit codes that answer them.

In a worker, receiving a signal sets a flag and nothing else. A Python signal handler does not run while the
main thread is inside a collective, so a rank that is stuck there would not notice the signal. The C-level
handler does run, and writes the signal's number to a wake-up pipe, which a thread reads at once. All ranks
agree at a step boundary how to act on the flag.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType

from trainkit.errors import EXIT_INTERRUPTED, EXIT_NO_RESTART, EXIT_OK, EXIT_STOPPED

NOTICE_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
"""SIGTERM: preempted, cancelled or out of time. SIGUSR2: early notice. SIGINT: Ctrl-C.

Not SIGUSR1: NCCL has been seen to catch it.
"""

STACKS_SIGNAL = signal.SIGURG
"""Asks a worker for its stacks; the default action of other processes is to ignore it."""


class StopRequest:
    """Whether, when and by which signal this process was asked to stop or to report its stacks."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self.received_monotonic_s: float | None = None
        self.received = threading.Event()
        self.stacks_requested = threading.Event()
        """Set by each `STACKS_SIGNAL`; the thread that answers clears it."""

    def __bool__(self) -> bool:
        return self.signal_name is not None

    def install(self) -> None:
        """Install the handlers; call from the main thread, once per process.

        A second SIGINT ends the process at once, whatever its threads are doing.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (*NOTICE_SIGNALS, STACKS_SIGNAL):
            signal.signal(number, _ignore)
        threading.Thread(target=self._watch, args=(reader,), name="signal-watch", daemon=True).start()
        # The agent starts workers with these signals blocked, so that one that arrives while the
        # interpreter starts is not fatal; it is delivered here.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTICE_SIGNALS)

    def request(self, reason: str) -> None:
        """Ask this process to stop as if it had received a signal of that name."""
        if self.signal_name is None:
            self.received_monotonic_s = time.monotonic()
            self.signal_name = reason
            self.received.set()

    def _watch(self, reader: int) -> None:
        interrupts = 0
        while True:
            for number in os.read(reader, 64):
                if number == STACKS_SIGNAL:
                    self.stacks_requested.set()
                if number not in NOTICE_SIGNALS:
                    continue
                interrupts += number == signal.SIGINT
                if interrupts > 1:
                    os._exit(EXIT_INTERRUPTED)
                self.request(signal.Signals(number).name)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Replaces the default action, which would end the process; the watcher thread reads the signal."""


def signal_exit_code(number: int) -> int:
    """The exit code that stands for a death by signal, as in shells."""
    return 128 + number


def is_death_by_notice(code: int) -> bool:
    """Whether an exit code is that of a process that a notice signal has killed."""
    return code in map(signal_exit_code, NOTICE_SIGNALS)


def combine_exit_codes(codes: Sequence[int]) -> int:
    """One exit code for several workers, given in the order in which they ended.

    78 if any worker has it; else the first failure; else 75 if any worker saved; else 0.
    """
    if EXIT_NO_RESTART in codes:
        return EXIT_NO_RESTART
    for code in codes:
        if code not in (EXIT_OK, EXIT_STOPPED):
            return code
    return EXIT_STOPPED if EXIT_STOPPED in codes else EXIT_OK


def describe_exit(code: int) -> str:
    """An exit code for a message: ``exit code 3`` or ``SIGKILL``."""
    if code > 128:
        try:
            return signal.Signals(code - 128).name
        except ValueError:
            pass
    return f"exit code {code}"
