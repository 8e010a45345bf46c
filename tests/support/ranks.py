"""Forks processes from one that has imported torch, so that they start at once instead of in seconds."""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ["tests.support.preloaded"]
CONTEXT.set_forkserver_preload(PRELOADED)


def preload(module: str) -> None:
    """Let ranks that start from now on have imported a module too."""
    if module not in PRELOADED:
        PRELOADED.append(module)
        CONTEXT.set_forkserver_preload(PRELOADED)
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # the next rank starts it again


def start_ranks(function: Callable[..., None], num_procs: int, *args: Any) -> list[ForkServerProcess]:
    """Start `function(rank, *args)` in this many processes. An exception ends a process with exit code 1."""
    return [_start(_as_rank, function, rank, args) for rank in range(num_procs)]


def start_worker(
    run_dir: Path, log: Path, environ: Mapping[str, str], first: Callable[[], None] | None = None
) -> ForkServerProcess:
    """Run the equivalent of ``python -m trainkit.trainer RUN_DIR`` with a separate environment and log.

    The process calls `first` before.
    """
    return _start(_as_worker, str(run_dir), str(log), dict(environ), first)


def start_script(
    folder: Path, argv: Sequence[str], log: Path, environ: Mapping[str, str]
) -> ForkServerProcess:
    """Run the equivalent of ``python ARGV`` in a folder, with a separate environment and log."""
    return _start(_as_script, str(folder), list(argv), str(log), dict(environ))


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
    """Return the exit codes of processes. A process that does not end is killed, and its code is None."""
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


def _as_worker(
    run_dir: str, log: str, environ: dict[str, str], first: Callable[[], None] | None = None
) -> None:
    _use(log, environ)
    sys.argv = ["trainkit.trainer", run_dir]
    if first is not None:
        first()

    from trainkit.trainer.__main__ import main

    main()


def _as_script(folder: str, argv: list[str], log: str, environ: dict[str, str]) -> None:
    _use(log, environ)
    os.chdir(folder)
    sys.argv = argv
    code: int | str | None = 0
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    # An interpreter runs these functions at its end, but a child of a fork server does not.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _use(log: str, environ: dict[str, str]) -> None:
    """Give this process a log, an environment and one thread."""
    os.environ.clear()
    os.environ.update(environ)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for number in (1, 2):
        os.dup2(descriptor, number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _use_one_thread()


def _use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)
