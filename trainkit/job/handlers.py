"""Determines from /proc which processes handle a stop signal and which may forward it.

This module imports only the standard library, because `trainkit.job.startup` loads it in the interpreter of
any script.
"""

from __future__ import annotations

import os
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

SAVES_ON = (signal.SIGTERM, signal.SIGUSR2)
"""The signals that can ask a command to save, in order of priority."""
SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
PASSED_ON_S = 5.0
"""Seconds after Slurm's signal during which a parent process may still forward the same signal."""
FROM_TERMINAL = {signal.SIGINT, signal.SIGQUIT}
"""Signals that a non-interactive shell sets to ignored for its background jobs (``&``)."""


def _lines(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/status", errors="replace") as status:
            return status.read().splitlines()
    except OSError:
        return []  # the process has exited or belongs to another user


def signal_mask(pid: int, name: str) -> set[int]:
    """Return the signals in a mask from /proc/PID/status, such as the mask SigCgt.

    The result is empty if the process has exited.
    """
    mask = next((int(line.split()[1], 16) for line in _lines(pid) if line.startswith(f"{name}:")), 0)
    return {number for number in range(1, 65) if mask & 1 << number - 1}


def is_shell(pid: int) -> bool:
    """Return whether a process is a shell."""
    try:
        program = os.readlink(f"/proc/{pid}/exe")  # noqa: PTH115
    except OSError:
        return False
    return program.rpartition("/")[2].rstrip("0123456789.-") in SHELLS


def is_in_foreground(pid: int) -> bool:
    """Return whether a shell runs this child in the foreground, which delays the shell's traps."""
    if signal_mask(pid, "SigIgn") & FROM_TERMINAL:
        return False
    # A background child may have installed handlers for signals that were ignored when it started.
    return not signal_mask(pid, "SigCgt") >= FROM_TERMINAL


def hear_once(agent: int, own_handlers: Callable[[set[int]], set[int]]) -> None:
    """Make a handler run only once if Slurm signals all processes and a parent also forwards the signal.

    Does nothing if no process between this process and the agent handles a stop signal. `own_handlers`
    removes signals that a process filters but does not handle.
    """
    if not _is_passed_on(agent, own_handlers):
        return
    install, get = signal.signal, signal.getsignal
    heard_s: dict[int, float] = {}

    def own(handler: Any) -> Any:
        return getattr(handler, "heard_once", handler)

    def install_once(number: int, handler: Any) -> Any:
        if number not in SAVES_ON or not callable(handler):
            return own(install(number, handler))

        def once(received: int, frame: object) -> object:
            now_s = time.monotonic()
            if now_s < heard_s.get(received, 0.0) + PASSED_ON_S:
                return None
            heard_s[received] = now_s
            return handler(received, frame)

        once.heard_once = handler  # type: ignore[attr-defined]
        return own(install(number, once))

    vars(signal).update(signal=install_once, getsignal=lambda number: own(get(number)))


def _is_passed_on(agent: int, own_handlers: Callable[[set[int]], set[int]]) -> bool:
    """Return whether a process between the agent and this one handles a stop signal and may forward it."""
    child, parent = os.getpid(), os.getppid()
    while parent not in (agent, 0, 1):
        is_waiting = is_shell(parent) and is_in_foreground(child)
        if not is_waiting and own_handlers(signal_mask(parent, "SigCgt")) & {*SAVES_ON}:
            return True
        above = next((line.split()[1] for line in _lines(parent) if line.startswith("PPid:")), "0")
        child, parent = parent, int(above)
    return False
