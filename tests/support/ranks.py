"""Processes that are forks of one that has imported torch: they begin at once, where others take seconds."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.support.preloaded"])


def start_ranks(function: Callable[..., None], num_procs: int, *args: Any) -> list[ForkServerProcess]:
    """Begin `function(rank, *args)` in so many processes; one that raises ends with exit code 1."""
    return [_start(_as_rank, function, rank, args) for rank in range(num_procs)]


def start_worker(run_dir: Path, log: Path, environ: Mapping[str, str]) -> ForkServerProcess:
    """Begin what ``python -m trainkit.trainer RUN_DIR`` does, with an environment and a log of its own."""
    return _start(_as_worker, str(run_dir), str(log), dict(environ))


class ForkedWorker:
    """A process of `start_worker` with the methods of Popen."""

    def __init__(self, proc: ForkServerProcess) -> None:
        assert proc.pid is not None
        self.proc, self.pid = proc, proc.pid

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.proc.kill()

    def poll(self) -> int | None:
        return self.proc.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.proc.join(timeout)
        if self.proc.exitcode is None:
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        return self.proc.exitcode


def _start(function: Callable[..., None], *args: Any) -> ForkServerProcess:
    proc = CONTEXT.Process(target=function, args=args)
    proc.start()
    return proc


def wait_for_all(procs: Sequence[ForkServerProcess], timeout_s: float) -> list[int | None]:
    """The exit codes of processes that end by themselves; those of others, which are killed, are None."""
    try:
        for proc in procs:
            proc.join(timeout_s)
        return [proc.exitcode for proc in procs]
    finally:
        for proc in procs:
            if proc.exitcode is None:
                proc.kill()
                proc.join()


def _as_rank(function: Callable[..., None], rank: int, args: Sequence[Any]) -> None:
    _use_one_thread()
    try:
        function(rank, *args)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _as_worker(run_dir: str, log: str, environ: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for number in (1, 2):
        os.dup2(descriptor, number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _use_one_thread()
    sys.argv = ["trainkit.trainer", run_dir]

    from trainkit.trainer.__main__ import main

    main()


def _use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)
