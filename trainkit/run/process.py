"""Processes, by their host, boot id, pid and start time, because pids are reused.

Processes of other hosts cannot be seen from here.
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
"""Slurm and people end a process with one of these: a death by it says nothing about the host."""


class ProcessStat(NamedTuple):
    """A process as the kernel describes it in ``/proc/PID/stat``."""

    state: str
    """One letter, such as ``T`` for stopped and ``Z`` for a zombie."""
    parent_pid: int
    start_ticks: int
    """Start time in clock ticks since boot: together with the pid it identifies the process."""


PROC = Path("/proc")


def process_stat(pid: int) -> ProcessStat | None:
    """The kernel's state of a process; None if there is no such process. Raises OSError if unreadable."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name is in parentheses and may itself contain parentheses and spaces.
    fields = text.rpartition(")")[2].split()
    return ProcessStat(fields[0], int(fields[1]), int(fields[19]))


FIRST_PERSON = 1000
"""The lowest uid of a person, as useradd gives it; those below are of daemons."""


def other_people() -> list[str] | None:
    """The names, else uids, of other people with processes on this host; None if they cannot be seen."""
    if not (PROC / "1").exists():  # mounted with hidepid=2
        return None
    found = set()
    for entry in PROC.iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has ended
            if entry.name.isdecimal() and (uid := entry.stat().st_uid) >= FIRST_PERSON:
                found.add(uid)
    return sorted(_name_of(uid) for uid in found - {os.getuid()})


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def own_host(environ: Mapping[str, str] = os.environ) -> str:
    """The Slurm node name of this host if there is one, else its hostname; the two may differ.

    A step or a job can exclude a host only by its Slurm node name.
    """
    return environ.get("SLURMD_NODENAME") or os.uname().nodename


@dataclass(frozen=True)
class ProcessId:
    """A process of some host."""

    host: str = ""
    boot_id: str = ""
    pid: int = 0
    start_ticks: int | None = None

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """The identity of a process on this host; raises ProcessLookupError when there is none."""
        stat = process_stat(pid)
        if stat is None:
            raise ProcessLookupError(pid)
        return cls(os.uname().nodename, boot_id(), pid, stat.start_ticks)

    def alive(self) -> bool | None:
        """Whether the process is alive; None when this host cannot tell."""
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
        # The processes of a container on this host, which has a name of its own, cannot be seen.
        return False if is_named_so else None


def boot_id() -> str:
    """The id of the boot of this machine, which its containers share; empty if it cannot be read."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
