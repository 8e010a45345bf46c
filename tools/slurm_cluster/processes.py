"""Start daemons that outlive their parent, and kill daemons only if both pid and start time match."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class Pid:
    """A unique process, identified by its pid and its start time in clock ticks since boot."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> Pid:
        """Return the process that currently has the given pid; raise ProcessLookupError if there is none."""
        fields = _stat(pid)
        if fields is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(pid, int(fields[19]))

    def alive(self) -> bool:
        """Return whether the process is still running and is not a zombie."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        fields = _stat(self.pid)
        return fields is not None and fields[0] not in "ZX" and int(fields[19]) == self.start_ticks

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal, unless the process has exited."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def stop(self, timeout_s: float, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal and wait until the process exits; send SIGKILL after `timeout_s`."""
        self.kill(number)
        if not self.wait(timeout_s):
            self.kill()
            self.wait(10)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process exits; return whether it has exited within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


def start_daemon(argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Pid:
    """Start a process in a new session, so that it outlives this process, with its output in `log`."""
    with log.open("ab") as stream:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env={**os.environ, **(env or {})},
            start_new_session=True,
            cwd="/",
        )
    # Pid.alive() reaps the process; without this line, Popen would warn about a process that is still
    # running.
    process.returncode = 0
    return Pid.of(process.pid)


def child_of(parent: Pid, timeout_s: float) -> Pid:
    """Wait until a process starts a child, and return the child; raise TimeoutError if none starts."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError):  # the process has exited
            children = (PROC / f"{parent.pid}/task/{parent.pid}/children").read_text().split()
            if children:
                return Pid.of(int(children[0]))
        if time.monotonic() > deadline or not parent.alive():
            raise TimeoutError(f"process {parent.pid} has not started a child")
        time.sleep(0.005)


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the process name, or None if there is no such process."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
