"""The signals between supervisor, agents and workers, and the exit codes that result from signals.

In a worker, a signal only sets a flag; at the next step boundary, all ranks agree on how to react. Python
signal handlers do not run while the main thread is inside a collective, so they do not run in a stuck rank.
The C-level handler does run, and writes the signal number to the wakeup file descriptor, which a thread
reads.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from trainkit.errors import EXIT_INTERRUPTED, EXIT_NO_RESTART, EXIT_OK, EXIT_STOPPED
from trainkit.job.spare_children import spare_children
from trainkit.run.process import ENDING_SIGNALS

NOTICE_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
"""The signals that ask a job to stop.

SIGTERM means that the job is being preempted, was cancelled or has run out of time. SIGUSR2 is either the
warning before the time limit or a request to restart. SIGINT means that the user pressed Ctrl-C.

SIGUSR1 is not used, because NCCL has been observed to catch it.
"""

STACKS_SIGNAL = signal.SIGURG
"""The signal that asks a worker for its stacks; processes without a handler ignore this signal by default."""


AGENT_SIGNAL = signal.SIGURG
"""The signal that agents treat as SIGUSR2; all other processes of a step ignore the signal by default.

In a command that uses `trainkit.loop`, a rank treats AGENT_SIGNAL as `STACKS_SIGNAL` and only writes its
stacks.
"""


class StopRequest:
    """A request for this process to stop or to report its stacks, including the signal and its time."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self.received_monotonic_s: float | None = None
        self.received = threading.Event()
        self.stacks_requested = threading.Event()
        """Set by every `STACKS_SIGNAL`, and cleared by the thread that writes the stacks."""

    def __bool__(self) -> bool:
        return self.signal_name is not None

    def install(self) -> None:
        """Install the signal handlers; must be called once per process, from the main thread.

        A second SIGINT kills the process immediately, regardless of what its threads are doing.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (*NOTICE_SIGNALS, STACKS_SIGNAL):
            signal.signal(number, _ignore)
        threading.Thread(target=self._watch, args=(reader,), name="signal-watch", daemon=True).start()
        # Without this hook, a signal to a forked process, for example from `Pool.terminate`, would be
        # recorded as a signal to this process.
        os.register_at_fork(after_in_child=_restore_in_child)
        spare_children()
        # The agent starts workers with the stop signals blocked, so that a stop signal cannot kill the
        # interpreter while it starts. A signal that arrived while the interpreter was starting is delivered
        # here.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTICE_SIGNALS)

    def request(self, reason: str) -> None:
        """Request a stop as if the signal `reason` had arrived; ignored if a stop was requested before."""
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


def _restore_in_child() -> None:
    signal.set_wakeup_fd(-1)  # without this call, the child's signals would be recorded in the parent process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.signal(STACKS_SIGNAL, signal.SIG_DFL)


@contextmanager
def exit_on_stop() -> Iterator[None]:
    """Raise SystemExit on SIGTERM or SIGHUP inside the block, so that the block's cleanup code runs.

    If SIGHUP is ignored, it remains ignored, as nohup requires.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(signal_exit_code(number))

    heard = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing. This handler only replaces the signal's default action; a thread handles the signal."""


def signal_exit_code(number: int) -> int:
    """Return the exit code for a process killed by a signal: 128+n, as in shells."""
    return 128 + number


def is_death_by_stop_signal(code: int) -> bool:
    """Return whether an exit code indicates that one of `ENDING_SIGNALS` killed the process."""
    return code in map(signal_exit_code, ENDING_SIGNALS)


def combine_exit_codes(codes: Sequence[int]) -> int:
    """Combine the exit codes of several workers. `codes` is in order of exit.

    The result is 78 if any worker exited with 78, else the first failure, else 75 if any worker saved, else
    0.
    """
    if EXIT_NO_RESTART in codes:
        return EXIT_NO_RESTART
    for code in codes:
        if code not in (EXIT_OK, EXIT_STOPPED):
            return code
    return EXIT_STOPPED if EXIT_STOPPED in codes else EXIT_OK


def describe_exit(code: int) -> str:
    """Return a description of an exit code, such as ``exit code 3`` or ``SIGKILL``."""
    if code > 128:
        try:
            return signal.Signals(code - 128).name
        except ValueError:
            pass
    return f"exit code {code}"
