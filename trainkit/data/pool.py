"""Runs independent jobs in worker processes that never outlive the command."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
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
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_begin_worker)
    try:
        numbers = {pool.submit(function, job): number for number, job in enumerate(jobs)}
        results: dict[int, R] = {}
        for future in as_completed(numbers):
            results[numbers[future]] = future.result()
            on_done(numbers[future])
    except BrokenProcessPool:
        raise TrainkitError(
            "a worker process was killed, most likely for want of memory",
            hint="start the same command again with fewer --workers: it goes on where it was",
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return [results[number] for number in range(len(jobs))]


def _run_here(function: Callable[[J], R], job: J, number: int, on_done: Callable[[int], None]) -> R:
    result = function(job)
    on_done(number)
    return result


def _begin_worker() -> None:
    """Die with the parent, die at once of Ctrl-C, and leave the other cores to the other workers."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
