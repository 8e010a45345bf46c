"""Identify processes by host, boot id, pid and start time, because a pid alone may be reused.

Processes on other hosts are not visible from this host.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that Slurm and users send to stop processes. If one of `ENDING_SIGNALS` kills a process, the host
is not considered faulty."""


class ProcessStat(NamedTuple):
    """The values in ``/proc/PID/stat`` that trainkit uses."""

    state: str
    """Process state as a letter, such as ``T`` for stopped or ``Z`` for a zombie."""
    parent_pid: int
    start_ticks: int
    """Start time in clock ticks since boot; identifies the process together with the pid."""


PROC = Path("/proc")


def process_stat(pid: int) -> ProcessStat | None:
    """Return the values in ``/proc/PID/stat``; None if there is no such process.

    Raises OSError if the file cannot be read.
    """
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name is in parentheses and may itself contain parentheses and spaces, so split after the
    # last closing parenthesis.
    fields = text.rpartition(")")[2].split()
    return ProcessStat(fields[0], int(fields[1]), int(fields[19]))


FIRST_PERSON = 1000
"""The lowest uid that useradd assigns to regular users; lower uids belong to system accounts."""


def other_people() -> list[str] | None:
    """Return the names of other users with processes on this host; None if their processes are hidden.

    If a uid has no user name, the uid is returned as text.
    """
    if not (PROC / "1").exists():  # With hidepid=2, /proc does not show the processes of other users.
        return None
    found = set()
    for entry in PROC.iterdir():
        with contextlib.suppress(FileNotFoundError):  # The process has exited in the meantime.
            if entry.name.isdecimal() and (uid := entry.stat().st_uid) >= FIRST_PERSON:
                found.add(uid)
    return sorted(_name_of(uid) for uid in found - {os.getuid()})


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def own_host(environ: Mapping[str, str] = os.environ) -> str:
    """Return the Slurm node name of this host, or its hostname outside of Slurm; the two may differ.

    Slurm needs the node name to exclude a host from a job or step.
    """
    return environ.get("SLURMD_NODENAME") or os.uname().nodename


@dataclass(frozen=True)
class ProcessId:
    """Identifies a process on any host."""

    host: str = ""
    boot_id: str = ""
    pid: int = 0
    start_ticks: int | None = None

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Return the identity of a process on this host; raise ProcessLookupError if it does not exist."""
        stat = process_stat(pid)
        if stat is None:
            raise ProcessLookupError(pid)
        return cls(os.uname().nodename, boot_id(), pid, stat.start_ticks)

    def alive(self) -> bool | None:
        """Return whether the process is alive; None if this host cannot determine it."""
        is_named_so, current = self.host == os.uname().nodename, boot_id()
        if not current or (self.boot_id != current and not is_named_so):
            return None
        if self.boot_id != current:
            return False
        try:
            stat = process_stat(self.pid)
        except OSError:
            return None
        if stat is not None and stat.state not in "ZX" and stat.start_ticks == self.start_ticks:
            return True
        # If only the hostname differs, the process may run in a container on this machine and thus be
        # invisible here.
        return False if is_named_so else None


def boot_id() -> str:
    """Return the boot id of this machine, which its containers share; "" if it cannot be read."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
