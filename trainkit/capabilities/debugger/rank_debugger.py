"""Implements the debugger inside a rank, for `breakpoint()`, `trainkit run --debug` and `trainkit debug`.

Ranks normally have no terminal. The rank selected by `trainkit run --debug` uses the terminal of that
command. Any other rank waits at `breakpoint()` until `trainkit debug` passes a terminal to the rank through a
socket. `rank_start.py` loads this file even if trainkit is not installed in the rank's Python, so the file
imports only the standard library. A debugger is imported only when a rank stops.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from select import POLLIN, poll
from shlex import quote
from types import FrameType, TracebackType
from typing import Any

DEBUG_VARIABLE = "TRAINKIT_JOB_DEBUG"
"""Environment variable that contains the `DebugPlan`: the rank, then ``pdb``, ``post-mortem`` or ``debugpy``,
then debugpy's port."""
FOLDER_VARIABLE = "TRAINKIT_JOB_DEBUGGER_FOLDER"
"""Environment variable with the path of the folder where each waiting or debugged process writes a file
``rank-0005-PID.json``."""
TERMINAL_VARIABLE = "TRAINKIT_JOB_TERMINAL"
"""Environment variable with the path of the terminal of `trainkit run`; `trainkit.job.rank_env` defines the
same name."""
CHOSEN_FILE = "rank"
"""File in the folder of `FOLDER_VARIABLE` that contains the rank that a user debugs. Once this file exists,
only the rank in the file waits at breakpoints."""
AT_PROMPT, RUNNING = b"p", b"r"
"""Messages from a rank to `trainkit debug`: the debugger waits for input, or the program is running."""
POLL_S = 1.0
LONGEST_FOLDER = 70
"""Maximum length of the path of the folder that contains a socket. Linux limits the path of a socket to 107
characters."""
TORCH_CONSTANTS = "torch.distributed.constants"


def mode_of_rank() -> str | None:
    """Return the debug mode of this rank, or ``off`` if ``--debug`` selects another rank.

    Returns None in a run without ``--debug``.
    """
    words = os.environ.get(DEBUG_VARIABLE, "").split()
    if not words:
        return None
    return words[1] if words[0] == os.environ.get("RANK", "0") else "off"


def install(*, is_rank: bool, after_import: Callable[[str, Callable[[Any], None]], None]) -> None:
    """Prepare a rank in a run with ``--debug``, or one of its child processes, before any other code runs."""
    mode, (rank, _, *port) = mode_of_rank(), os.environ[DEBUG_VARIABLE].split()
    after_import(TORCH_CONSTANTS, _lengthen_timeouts)
    if mode == "off":
        sys.breakpointhook = lambda *args, **kwargs: None
    elif mode == "debugpy":
        if not is_rank:
            return  # debugpy itself attaches to the child processes of a rank
        import debugpy

        debugpy.listen(("127.0.0.1", int(port[0])))
        debugpy.wait_for_client()
    elif is_rank:
        log = os.dup(1)
        terminal = os.open(os.environ[TERMINAL_VARIABLE], os.O_RDWR | os.O_NOCTTY)
        for descriptor in (0, 1, 2):
            os.dup2(terminal, descriptor)
        os.write(log, f"rank {rank} uses the terminal of `trainkit run --debug`\n".encode())
        sys.excepthook = partial(_uncaught, log, mode == "post-mortem")
    if mode in ("pdb", "post-mortem") and not os.environ.get("PYTHONBREAKPOINT"):
        sys.breakpointhook = lambda *args, **kwargs: stop_at(sys._getframe(1))


def _lengthen_timeouts(constants: Any) -> None:
    """Set the default timeout of PyTorch process groups to one week.

    A timeout that the user's script sets takes precedence.
    """
    constants.default_pg_timeout = constants.default_pg_nccl_timeout = timedelta(days=7)


def _uncaught(
    log: int, stops: bool, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print the exception that terminates a rank to the terminal, and to the log file for the agent."""
    import bdb
    import traceback

    if isinstance(error, OSError) and error.errno == errno.EIO and not os.isatty(0):
        kind = bdb.BdbQuit
        error = kind("the terminal was closed")
    os.write(log, "".join(traceback.format_exception(kind, error, trace)).encode(errors="replace"))
    if kind is not bdb.BdbQuit:
        sys.__excepthook__(kind, error, trace)
        if stops:
            stop_at(trace)


def stop_at(
    place: FrameType | TracebackType | None,
    terminal: str | None = None,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Start the debugger at a frame, or at the frame where an exception was raised.

    If `terminal` (a path) is given, the debugger reads from that terminal. If `terminal` is None, the rank
    selected by `--debug` reads from standard input, and any other rank reads from the terminal that `trainkit
    debug` connects. The context manager `around` is active while the debugger reads input.
    """
    import pdb

    frame = place if isinstance(place, FrameType) else None
    where = "an exception" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
    own: Any = None
    if terminal is None and DEBUG_VARIABLE in os.environ:
        # standard input of a DataLoader worker process is not a terminal
        if sys.stdin is None or not sys.stdin.isatty():
            terminal = os.environ[TERMINAL_VARIABLE]
    elif terminal is None:
        own = attached
        with around():
            if not attached.is_connected() and not attached.wait(where):
                return
    if terminal is not None:
        own = Terminal(os.open(terminal, os.O_RDWR | os.O_NOCTTY))

    class Debugger(pdb.Pdb):
        def interaction(self, *args: Any, **kwargs: Any) -> None:
            with around(), nullcontext() if own is None else own.at_prompt(where):
                super().interaction(*args, **kwargs)

    if own is not attached:  # `trainkit debug` has already recorded that the rank is being debugged
        with suppress(FileExistsError):
            Path(os.environ[FOLDER_VARIABLE]).mkdir()
        Path(os.environ[FOLDER_VARIABLE], CHOSEN_FILE).write_text(os.environ.get("RANK", "0"))
    debugger = Debugger(stdin=own, stdout=own, nosigint=True)
    if frame is not None:
        debugger.set_trace(frame)
    else:
        debugger.reset()
        debugger.interaction(None, place)


class Terminal:
    """Reads from and writes to a terminal.

    If the terminal is closed, reads return an empty string (end of file) and writes are ignored.
    """

    def __init__(self, descriptor: int) -> None:
        self._stream: Any = os.fdopen(descriptor, errors="replace")

    @contextmanager
    def at_prompt(self, where: str) -> Iterator[None]:
        """Lock the terminal while the debugger reads input, so that only one process reads at a time."""
        fcntl.flock(self._stream, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._stream, fcntl.LOCK_UN)

    def readline(self) -> str:
        try:
            return str(self._stream.readline())
        except OSError:
            return ""

    def write(self, text: str) -> None:
        with suppress(OSError):
            os.write(self._stream.fileno(), text.encode(errors="replace"))

    def flush(self) -> None:
        """Do nothing, because `write` is unbuffered."""


@contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """Collect the stop signals that arrive during the `with` block.

    The program's own signal handlers are still called.
    """
    received: list[int] = []
    own = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        handler = own[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)

    handled = [number for number, handler in own.items() if callable(handler)]
    if threading.current_thread() is not threading.main_thread():
        handled = []  # Python allows only the main thread to set signal handlers
    for number in handled:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number in handled:
            signal.signal(number, own[number])


class Attached(Terminal):
    """A terminal that `trainkit debug` has connected to this process.

    When a `trainkit debug` command exits, another `trainkit debug` command can connect its terminal.
    """

    def __init__(self) -> None:
        self._stream: Any = None
        self._connection: Any = None
        self._where = ""
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Stop using the terminal in a forked child process, leaving it to the parent."""
        self._stream = self._connection = None

    def is_connected(self) -> bool:
        if self._connection is None or not self._stream.isatty():
            return False
        try:
            return bool(self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError as error:
            return isinstance(error, BlockingIOError)

    def readline(self) -> str:
        """Return the next line that the user types.

        If the terminal is closed, wait for another terminal and return the pdb command ``w``, so that the
        debugger prints the current position in the new terminal.
        """
        if self.is_connected():
            either = poll()
            either.register(self._stream, POLLIN)
            either.register(self._connection, POLLIN)  # `trainkit debug` closes the connection when it exits
            either.poll()
            if self.is_connected():
                return super().readline()
        return "w\n" if self.wait(self._where) else "c\n"

    def write(self, text: str) -> None:
        if self.is_connected():
            super().write(text)

    @contextmanager
    def at_prompt(self, where: str) -> Iterator[None]:
        """Record that the debugger is waiting for input, so that the wait is not considered a hang."""
        self._where = where
        self._record(where, "")
        self._send_state(AT_PROMPT)
        try:
            yield
        finally:
            self._send_state(RUNNING)
            self._file.unlink(missing_ok=True)

    def wait(self, where: str) -> bool:
        """Wait for a terminal; return False if another rank was chosen or a stop signal arrived."""
        import tempfile

        short = None if len(tempfile.gettempdir()) < LONGEST_FOLDER else "/tmp"

        rank, run = os.environ.get("RANK", "0"), os.environ["TRAINKIT_JOB_RUN_DIR"]
        chosen, is_first = self._file.with_name(CHOSEN_FILE), True
        with (
            tempfile.TemporaryDirectory(prefix="trainkit-debug-", dir=short) as folder,
            self._listen(folder) as server,
            _stop_requests() as requests,
        ):
            while True:
                if requests or (chosen.exists() and chosen.read_text() != rank):
                    self._file.unlink(missing_ok=True)
                    return False
                if is_first:
                    self._record(where, server.getsockname())
                    command = f"trainkit debug {quote(run)} --rank {rank}"
                    print(f"breakpoint() in {where}: rank {rank} waits until you run `{command}`", flush=True)
                is_first = False
                with suppress(TimeoutError):
                    connection = server.accept()[0]
                    descriptors = socket.recv_fds(connection, 1, 1)[1]
                    if descriptors:
                        break
        self._connection = connection
        self._stream = os.fdopen(descriptors[0], errors="replace")
        self._record(where, "")
        self._send_state(AT_PROMPT)
        return True

    @staticmethod
    def _listen(folder: str) -> socket.socket:
        server = socket.socket(socket.AF_UNIX)
        server.bind(f"{folder}/socket")  # only the run's user can access the socket's folder
        Path(folder, "socket").chmod(0o600)
        server.listen(1)
        server.settimeout(POLL_S)
        return server

    @property
    def _file(self) -> Path:
        return Path(
            os.environ[FOLDER_VARIABLE], f"rank-{int(os.environ.get('RANK', '0')):04d}-{os.getpid()}.json"
        )

    def _record(self, where: str, path: str) -> None:
        node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        with suppress(FileExistsError):
            self._file.parent.mkdir()
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps({"node": node, "socket": path, "where": where}))
        new.replace(self._file)

    def _send_state(self, state: bytes) -> None:
        with suppress(OSError):
            if self._connection is not None:
                self._connection.send(state)


attached = Attached()
