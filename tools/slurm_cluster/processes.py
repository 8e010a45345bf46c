"""Daemons that outlive who started them, ended by their id and by nothing else."""

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
    """One process for good: its id, and when it was started in clock ticks since the machine's start."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> Pid:
        """The process that has this id now; raises ProcessLookupError."""
        fields = _stat(pid)
        if fields is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(pid, int(fields[19]))

    def alive(self) -> bool:
        """Whether it still runs; one that waits to be reaped does not."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        fields = _stat(self.pid)
        return fields is not None and fields[0] not in "ZX" and int(fields[19]) == self.start_ticks

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal, unless it has ended."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def stop(self, timeout_s: float, number: signal.Signals = signal.SIGTERM) -> None:
        """Ask it to end and wait until it has; SIGKILL when it takes longer than `timeout_s`."""
        self.kill(number)
        if not self.wait(timeout_s):
            self.kill()
            self.wait(10)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; whether it came."""
        deadline = time.monotonic() + timeout_s
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


def start_daemon(argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Pid:
    """Start a process in a session of its own that writes to `log`; it keeps running when this one ends."""
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
    # It is reaped in Pid.alive(); Popen would warn about a process that still runs.
    process.returncode = 0
    return Pid.of(process.pid)


def child_of(parent: Pid, timeout_s: float) -> Pid:
    """The first child of a process, waited for; raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while True:
        for entry in PROC.iterdir():
            fields = _stat(int(entry.name)) if entry.name.isdigit() else None
            if fields is not None and int(fields[1]) == parent.pid:
                return Pid.of(int(entry.name))
        if time.monotonic() > deadline or not parent.alive():
            raise TimeoutError(f"process {parent.pid} has started no other")
        time.sleep(0.005)


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third on (the second can hold spaces)."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
