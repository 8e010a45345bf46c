"""The signals between supervisor, agents and workers, and the exit codes that they lead to.

In a worker, a signal only sets a flag; at the next step boundary, all ranks agree what to do about it. Python
signal handlers do not run while the main thread is inside a collective, so a stuck rank would not notice the
signal. The C-level handler does run; it writes the signal number to the wakeup fd, which a thread reads.
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

SIGTERM means that the job is preempted, cancelled or out of time. SIGUSR2 is the warning before the time
limit, or a request to restart. SIGINT means Ctrl-C.

SIGUSR1 is not used, because NCCL has been seen to catch it.
"""

STACKS_SIGNAL = signal.SIGURG
"""The signal that asks a worker for its stacks; processes without a handler ignore it by default."""


AGENT_SIGNAL = signal.SIGURG
"""The signal that means SIGUSR2 to agents; all other processes of a step ignore it by default.

A rank of a command that uses `trainkit.loop` handles AGENT_SIGNAL like `STACKS_SIGNAL`, so it only writes its
stacks.
"""


class StopRequest:
    """A request that this process stop or report its stacks, with the signal and its time."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self.received_monotonic_s: float | None = None
        self.received = threading.Event()
        self.stacks_requested = threading.Event()
        """Set by every `STACKS_SIGNAL`; the thread that writes the stacks clears it."""

    def __bool__(self) -> bool:
        return self.signal_name is not None

    def install(self) -> None:
        """Install the signal handlers; call this once per process, from the main thread.

        A second SIGINT ends the process immediately, whatever its threads are doing.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (*NOTICE_SIGNALS, STACKS_SIGNAL):
            signal.signal(number, _ignore)
        threading.Thread(target=self._watch, args=(reader,), name="signal-watch", daemon=True).start()
        # Without this hook, a signal to a forked process, for example from `Pool.terminate`, would count as a
        # signal to this process.
        os.register_at_fork(after_in_child=_restore_in_child)
        spare_children()
        # The agent starts workers with the stop signals blocked, so that no stop signal kills the interpreter
        # while it starts. A signal that has arrived since the start of the interpreter is delivered here.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTICE_SIGNALS)

    def request(self, reason: str) -> None:
        """Request a stop as if the signal `reason` had arrived; only the first request counts."""
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
    signal.set_wakeup_fd(-1)  # otherwise, the parent process would record signals of this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.signal(STACKS_SIGNAL, signal.SIG_DFL)


@contextmanager
def exit_on_stop() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise SystemExit inside the block, so that cleanup code in the block runs.

    An ignored SIGHUP stays ignored, because nohup relies on that.
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
    """Do nothing; replaces the signal's default action, because the watcher thread handles the signal."""


def signal_exit_code(number: int) -> int:
    """Return the exit code of a process killed by a signal: 128+n, as in shells."""
    return 128 + number


def is_death_by_notice(code: int) -> bool:
    """Return whether an exit code means that one of `ENDING_SIGNALS` killed the process."""
    return code in map(signal_exit_code, ENDING_SIGNALS)


def combine_exit_codes(codes: Sequence[int]) -> int:
    """Combine the exit codes of several workers, given in the order the workers ended.

    The result is 78 if any worker returned 78, else the first failure, else 75 if any worker saved, else 0.
    """
    if EXIT_NO_RESTART in codes:
        return EXIT_NO_RESTART
    for code in codes:
        if code not in (EXIT_OK, EXIT_STOPPED):
            return code
    return EXIT_STOPPED if EXIT_STOPPED in codes else EXIT_OK


def describe_exit(code: int) -> str:
    """Return an exit code as text, such as ``exit code 3`` or ``SIGKILL``."""
    if code > 128:
        try:
            return signal.Signals(code - 128).name
        except ValueError:
            pass
    return f"exit code {code}"
