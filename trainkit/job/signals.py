"""Stop signals: a handler sets a flag, nothing else.

What is done about the flag is agreed by all ranks at a step boundary; see `trainkit.trainer.agree`.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

NOTICE_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
"""SIGTERM: preempted, cancelled or out of time. SIGUSR2: early notice. SIGINT: Ctrl-C.

Not SIGUSR1: NCCL has been seen to catch it.
"""


class StopRequest:
    """Whether, when and by which signal this process was asked to stop."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self.received_monotonic_s: float | None = None
        self.received = threading.Event()

    def __bool__(self) -> bool:
        return self.signal_name is not None

    def install(self) -> None:
        """Watch for the notice signals from now on; call from the main thread."""
        for number in NOTICE_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is None:
            self.signal_name = signal.Signals(number).name
            self.received_monotonic_s = time.monotonic()
            self.received.set()
        if number == signal.SIGINT:
            # A second Ctrl-C stops at once, even when the main thread sits in a collective.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
