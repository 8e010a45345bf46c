"""Runs independent jobs in worker processes that never outlive the command."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TypeVar

from trainkit.errors import TrainkitError

J = TypeVar("J")
R = TypeVar("R")


def run_all(
    function: Callable[[J], R], jobs: Sequence[J], workers: int, on_done: Callable[[int], None]
) -> list[R]:
    """The results in the order of the jobs; `on_done` is called with the number of each job as it ends.

    One worker, or one job, runs in this process. The first failure ends the others and is raised;
    TrainkitError when a worker was killed.
    """
    num_workers = min(workers, len(jobs))
    if num_workers <= 1:
        return [_run_here(function, job, number, on_done) for number, job in enumerate(jobs)]
    lifeline, end = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, initializer=_begin_worker, initargs=(lifeline,))
    results: dict[int, R] = {}
    try:
        numbers = {pool.submit(function, job): number for number, job in enumerate(jobs)}
        for future in as_completed(numbers):
            results[numbers[future]] = future.result()
            on_done(numbers[future])
    except BrokenProcessPool:
        raise TrainkitError(
            "a worker process was killed, most likely for want of memory",
            hint="start the same command again with fewer workers: it goes on where it was",
        ) from None
    finally:
        if len(results) < len(jobs):
            end.close()  # nobody waits for work that is not wanted any more
        pool.shutdown(wait=True, cancel_futures=True)
        end.close()
        lifeline.close()
    return [results[number] for number in range(len(jobs))]


def _run_here(function: Callable[[J], R], job: J, number: int, on_done: Callable[[int], None]) -> R:
    result = function(job)
    on_done(number)
    return result


def _begin_worker(lifeline: Connection) -> None:
    """Leave signals to the parent, cores to the other workers, and die with the parent.

    A terminal or a scheduler signals the whole group; what the parent does then is its decision.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_follow, args=(lifeline,), daemon=True).start()


def _follow(lifeline: Connection) -> None:
    """Only the parent holds the other end, which closes when it dies."""
    with suppress(EOFError):
        lifeline.recv()
    os._exit(1)
