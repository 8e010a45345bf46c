"""Which processes handle a notice, as the kernel lists it, and which pass it on to what they have started.

Needs only the standard library: `trainkit.job.startup` loads this file in the interpreter of any script.
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
"""The signals by which a command is asked to save; of several that it handles, the first."""
SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
PASSED_ON_S = 5.0
"""How long after Slurm's signal another may come from what passes it on."""
FROM_TERMINAL = {signal.SIGINT, signal.SIGQUIT}
"""A shell without a terminal has what it starts with ``&`` ignore these."""


def _lines(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/status", errors="replace") as status:
            return status.read().splitlines()
    except OSError:
        return []  # it has ended, or is another user's


def signal_mask(pid: int, name: str) -> set[int]:
    """The signals in a mask of /proc/PID/status, such as SigCgt; empty when the process has ended."""
    mask = next((int(line.split()[1], 16) for line in _lines(pid) if line.startswith(f"{name}:")), 0)
    return {number for number in range(1, 65) if mask & 1 << number - 1}


def is_shell(pid: int) -> bool:
    """Whether a process is a shell."""
    try:
        program = os.readlink(f"/proc/{pid}/exe")  # noqa: PTH115
    except OSError:
        return False
    return program.rpartition("/")[2].rstrip("0123456789.-") in SHELLS


def is_in_foreground(pid: int) -> bool:
    """Whether a shell waits for this child of it, and calls its traps only when that has ended."""
    if signal_mask(pid, "SigIgn") & FROM_TERMINAL:
        return False
    return not signal_mask(pid, "SigCgt") >= FROM_TERMINAL  # handlers replace what was ignored


def hear_once(agent: int, own_handlers: Callable[[set[int]], set[int]]) -> None:
    """Have handlers called once for a signal that Slurm sends to all, and something above passes on as well.

    Does nothing in a process below an agent where nothing above handles a notice. `own_handlers` leaves out
    the signals that a process only filters.
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
    """Whether something between an agent and this process handles a notice, and can pass it on."""
    child, parent = os.getpid(), os.getppid()
    while parent not in (agent, 0, 1):
        is_waiting = is_shell(parent) and is_in_foreground(child)
        if not is_waiting and own_handlers(signal_mask(parent, "SigCgt")) & {*SAVES_ON}:
            return True
        above = next((line.split()[1] for line in _lines(parent) if line.startswith("PPid:")), "0")
        child, parent = parent, int(above)
    return False
