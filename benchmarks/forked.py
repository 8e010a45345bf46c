"""Run trainkit's processes as forks of this process, so that a command or an agent starts in milliseconds.

`forked_modules` forks this process instead of starting ``python -m trainkit.…``. Other programs start as
usual.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

MODULES = (
    *("trainkit.cli.main", "trainkit.cli.control", "trainkit.cli.resume", "trainkit.cli.submit"),
    *("trainkit.cli.run", "trainkit.cli.status", "trainkit.control.cancel", "trainkit.control.resume"),
    *("trainkit.launch.create", "trainkit.launch.plan_run", "trainkit.launch.submission"),
    *("trainkit.backends.local.backend", "trainkit.job.supervisor", "trainkit.job.node.agent"),
)
_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_signature = inspect.signature(_execute)


def preload() -> None:
    """Import the modules that the forks need."""
    for name in MODULES:
        importlib.import_module(name)


def fork(
    action: Callable[[], int | None],
    *,
    streams: Sequence[int] = (),
    environ: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    prepare: Callable[[], None] | None = None,
    own_session: bool = False,
) -> int:
    """Return the pid of a fork that calls `action` and exits with the code that `action` returns.

    `streams` become the file descriptors 0, 1 and 2 of the fork.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code: Any = 1
    try:
        for target, source in enumerate(streams):
            if source >= 0:
                os.dup2(source, target)
        os.closerange(3, 256)
        for number in (*range(1, signal.SIGKILL), *range(signal.SIGKILL + 1, signal.SIGSTOP)):
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if own_session:
            os.setsid()
        if prepare is not None:
            prepare()
        if environ is not None:
            os.environ.clear()
            os.environ.update(environ)
        if cwd is not None:
            os.chdir(cwd)
        for name, number in (("stdout", 1), ("stderr", 2)):
            raw = io.FileIO(number, "w", closefd=False)
            setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), line_buffering=True))
        code = action() or 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        with contextlib.suppress(OSError):
            traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def forked_modules(before: Callable[[str], None] = lambda module: None) -> Iterator[None]:
    """Let forks of this process run ``python -m trainkit.…`` within the block, after a call of `before`."""

    def execute(child: subprocess.Popen[bytes], *args: Any) -> None:
        given = _signature.bind(child, *args).arguments
        argv = [os.fspath(word) for word in given["args"]]
        module = argv[argv.index("-m") + 1] if argv[:1] == [sys.executable] and "-m" in argv else ""
        if not module.startswith("trainkit.") or given["shell"]:
            _execute(child, *args)
            return

        def run() -> int:
            sys.argv = [module, *argv[argv.index("-m") + 2 :]]
            before(module)
            return int(importlib.import_module(module).main() or 0)

        ends = (given["p2cread"], given["c2pwrite"], given["errwrite"])
        child.pid = fork(
            run,
            streams=ends,
            environ=given["env"],
            cwd=given["cwd"],
            prepare=given["preexec_fn"],
            own_session=given["start_new_session"],
        )
        child._child_created = True  # type: ignore[attr-defined]
        child._close_pipe_fds(*(given[name] for name in PIPES))  # type: ignore[attr-defined]

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess.Popen._execute_child = _execute  # type: ignore[attr-defined]


PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


class Command:
    """A `trainkit` command that runs in a fork, with its output and exit code."""

    def __init__(
        self,
        *argv: str,
        cwd: Path,
        environ: Mapping[str, str],
        log: Path,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.argv, self._log = argv, log
        self.code: int | None = None

        def run() -> int:
            from trainkit.cli.main import main

            sys.argv = ["trainkit", *argv]
            before()
            return main(list(argv))

        output = os.open(log, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        null = os.open(os.devnull, os.O_RDONLY)
        self.pid = fork(run, streams=(null, output, output), environ=environ, cwd=cwd, own_session=True)
        os.close(output)
        os.close(null)

    def poll(self) -> int | None:
        """Return the exit code, -N if signal N killed the command, or None while it is running."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    @property
    def printed_at(self) -> float:
        """The time of the last output, in seconds since the epoch."""
        return self._log.stat().st_mtime

    @property
    def said(self) -> str:
        """The output of the command."""
        return self._log.read_text(errors="replace")
