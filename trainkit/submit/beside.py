"""Work in a process of its own while this one goes on: for what takes a while and only touches files."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from trainkit.errors import TrainkitError

T = TypeVar("T")


class TracebackThere(Exception):
    """Where in the other process an error happened, as text."""


@contextmanager
def beside(work: Callable[[], T]) -> Iterator[Callable[[], T]]:
    """Do `work` in a forked process; what is yielded waits for it, and gives or raises what it did.

    Who leaves the block without having waited stops the work, wherever it is. It is stopped by Ctrl-C in this
    way alone, and prints nothing. A process with several threads does the work itself, when it is waited for:
    a fork takes one thread along, and what the others hold at that moment would stay held for ever. So does
    one that may not have another process.
    """
    forked = _fork(work) if threading.active_count() == 1 else None
    if forked is None:
        yield work
        return
    pid, reading = forked
    with open(reading, "rb") as answer:
        over = False

        def result() -> T:
            nonlocal over
            told = answer.read()
            _, status = os.waitpid(pid, 0)
            over = True
            value: T = _result(told, status)
            return value

        try:
            yield result
        finally:
            if not over:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _fork(work: Callable[[], object]) -> tuple[int, int] | None:
    """The process that does the work, and where its answer is read; None when it cannot be had."""
    reading, writing = os.pipe()
    # Ctrl-C in the middle of this would be raised in both.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        pid = os.fork()
        if pid == 0:
            _work_and_exit(work, writing, before)
    except OSError:
        os.close(reading)
        return None
    finally:
        os.close(writing)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid, reading


def _work_and_exit(work: Callable[[], object], writing: int, mask: set[int | signal.Signals]) -> NoReturn:
    # However it ends, nothing of what this process was about to do is done twice.
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with open(writing, "wb") as answer:
            try:
                answer.write(pickle.dumps((work(), None, "")))
            except Exception as error:
                import traceback

                answer.write(pickle.dumps((None, error, traceback.format_exc())))
        os._exit(0)
    finally:
        os._exit(1)


def _result(told: bytes, status: int) -> Any:
    code = os.waitstatus_to_exitcode(status)
    if code != 0:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise TrainkitError(f"the process that was to do it ended with {how}", hint="is there memory left?")
    value, error, where = pickle.loads(told)  # written by this very program
    if error is not None:
        raise error from TracebackThere(where)
    return value
