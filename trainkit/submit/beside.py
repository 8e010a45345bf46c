"""Work in a process of its own while this one goes on: for what waits for files or other programs."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, NoReturn, TypeVar

from trainkit.errors import TrainkitError

T = TypeVar("T")


class TracebackThere(Exception):
    """Where in the other process an error happened, as text."""


@contextmanager
def beside(what: str, work: Callable[[], T]) -> Iterator[Callable[[], T]]:
    """Do `work` in a forked process; what is yielded waits for it, and gives or raises what it did.

    `what` says in a few words what is done. The work prints nothing. Who leaves the block without having
    waited ends it, with all that it has started: Ctrl-C reaches it in this way only.
    Where several threads of Python run, the work is done in this process when it is waited for: a fork takes
    one thread along, and what the others hold at that moment would stay held for ever. So it is where no
    other process can be had.
    """
    helper = _Helper(what, work)
    try:
        if threading.active_count() == 1:
            helper.start()
        yield helper.result
    finally:
        helper.end()


class _Helper(Generic[T]):
    """The other process; without one, until it is started or when it cannot be, this one."""

    def __init__(self, what: str, work: Callable[[], T]) -> None:
        self.what = what
        self.work = work
        self.pid: int | None = None
        self.reading: int | None = None

    def start(self) -> None:
        # Ctrl-C comes when the process is known, so that it is ended and not left behind.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with suppress(OSError):  # too many processes or files
                self._fork(before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _fork(self, mask: set[int | signal.Signals]) -> None:
        reading, writing = os.pipe()
        try:
            pid = os.fork()
            if pid == 0:
                os.close(reading)  # or it would wait for itself to read, were its parent killed
                _work_and_exit(self.work, writing, mask)
            self.pid, self.reading = pid, reading
            with suppress(OSError):
                os.setpgid(pid, pid)  # it does so itself, perhaps not yet
        finally:
            os.close(writing)
            if self.reading is None:
                os.close(reading)

    def result(self) -> T:
        """What the work gave; raises what it raised, TrainkitError when it ended without a word."""
        if self.reading is None:
            return self.work()
        with open(self.reading, "rb", closefd=False) as answer:
            told = answer.read()
        try:
            value, error, where = pickle.loads(told)  # written by this very program
        except (EOFError, pickle.UnpicklingError):
            message = f"the process that was {self.what} ended before it was done"
            raise TrainkitError(message, hint="is there memory left?") from None
        if error is not None:
            raise error from TracebackThere(where)
        result: T = value
        return result

    def end(self) -> None:
        """End the process, with all that it has started, if it still works."""
        if self.pid is None or self.reading is None:
            return
        os.close(self.reading)
        with suppress(ProcessLookupError, PermissionError):  # there is nothing left of it
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # taken care of where SIGCHLD is ignored
            os.waitpid(self.pid, 0)
        self.pid = None


def _work_and_exit(work: Callable[[], object], writing: int, mask: set[int | signal.Signals]) -> NoReturn:
    # However it ends, nothing of what this process was about to do is done twice.
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with open(writing, "wb") as answer:
            answer.write(_done(work))
    finally:
        os._exit(0)


def _done(work: Callable[[], object]) -> bytes:
    """What the work gave or raised, and where it was raised."""
    try:
        return pickle.dumps((work(), None, ""))
    except Exception as error:
        import traceback

        where = traceback.format_exc()
        try:
            told = pickle.dumps((None, error, where))
            pickle.loads(told)
        except Exception:  # an error that cannot be made again from what it keeps
            plain: Any = TrainkitError(f"{type(error).__name__}: {error}")
            return pickle.dumps((None, plain, where))
        return told
