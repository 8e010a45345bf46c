"""Keeps notices from the processes that a rank starts, whichever library starts them.

Slurm signals every process of a step, so the SIGTERM of a preemption also ends the workers of a DataLoader,
whose loss raises an error in the rank while it saves. A process that a rank has started therefore blocks
these signals, and a thread of it receives them: it drops what comes from Slurm, and delivers what comes from
anybody else, such as ``Process.terminate()`` of the rank.

Needs only the standard library: `trainkit.job.startup` loads this file in the interpreter of any script. It
imports little, for every Python in a job does.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

NOTICES = {signal.SIGTERM, signal.SIGUSR2, signal.SIGINT}
WAKE = signal.SIGURG
"""Interrupts a system call of the main thread; ignored by default."""
AGENT_VARIABLE = "TRAINKIT_JOB_AGENT_PID"
LAUNCHER_PID_VARIABLE = "TRAINKIT_JOB_LAUNCHER_PID"
RANK_PID_VARIABLE = "TRAINKIT_JOB_RANK_PID"
"""The process that hears notices: those below it are spared."""

RT_TGSIGQUEUEINFO = {"x86_64": 297, "aarch64": 240}
"""Numbers of the system call that sends a thread a signal with the sender of another.

The call that sends it to a process is allowed in the main thread only.
"""
SIGINFO_SIZE = 128

_before_fork = _thread._local()


def spare_children() -> None:
    """Spare the processes that this one forks; call in a rank, from the main thread."""
    if os.environ.get(RANK_PID_VARIABLE) == str(os.getpid()):
        return
    os.environ[RANK_PID_VARIABLE] = str(os.getpid())
    _register()


def spare_this_process(*, even_with_handler: bool = False) -> None:
    """Spare this process, which a rank or an agent has started; call from the main thread.

    A handler that it installs itself is called all the same, unless `even_with_handler`.
    """
    _register()
    signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)
    _receive(even_with_handler)


def _register() -> None:
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_spare_forked)


def _block() -> None:
    """Block notices before a fork: one that the child received too early would end it."""
    # Here, because another thread may hold a lock of the import at the moment of the fork.
    import ctypes  # noqa: F401

    _before_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before_fork.mask)


def _spare_forked() -> None:
    # A signal to this process would be noted in the one that it was forked from.
    signal.set_wakeup_fd(-1)
    if _runs_another_program():
        _unblock()
    else:
        _receive(even_with_handler=False)


def _runs_another_program() -> bool:
    """Whether the fork is that of `subprocess`, whose program would start with the signals blocked."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") in ("subprocess", "multiprocessing.util")


def _receive(even_with_handler: bool) -> None:
    """Start the thread that receives the signals, which this thread has blocked."""
    agent = os.environ.get(AGENT_VARIABLE, "") or os.environ[RANK_PID_VARIABLE]
    senders = set(_ancestors(int(agent)))
    inherited = {number: signal.getsignal(number) for number in NOTICES}
    if signal.getsignal(WAKE) == signal.SIG_DFL:
        signal.signal(WAKE, _wake)
    try:
        arguments = (_thread.get_ident(), senders, inherited, even_with_handler)
        _thread.start_new_thread(_filter, arguments)
    except RuntimeError:  # no more threads: as without this module
        signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTICES)
        return
    _unblock_in_programs()


def _filter(
    main_thread: int, senders: set[int], inherited: dict[signal.Signals, Any], even_with_handler: bool
) -> None:
    while True:
        received = signal.sigwaitinfo(NOTICES)
        number = signal.Signals(received.si_signo)
        # 0 stands for the kernel, and for a sender outside of a container.
        is_notice = received.si_pid == 0 or received.si_pid in senders
        handler = signal.getsignal(number)
        has_handler = callable(handler) and handler not in (inherited[number], signal.default_int_handler)
        if is_notice and (even_with_handler or not has_handler):
            continue
        _send_again(received)
        # Delivered here, to whatever handles it: the default action, or a handler of a C library.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        signal.pthread_sigmask(signal.SIG_BLOCK, {number})
        # A Python handler runs in the main thread, which may be in a system call.
        signal.pthread_kill(main_thread, WAKE)


def _send_again(received: signal.struct_siginfo) -> None:
    """Send a signal to this thread with its original sender, for which a DataLoader's worker looks."""
    import ctypes
    import struct

    call = RT_TGSIGQUEUEINFO.get(os.uname().machine)
    thread = (os.getpid(), _thread.get_native_id())
    info = ctypes.create_string_buffer(SIGINFO_SIZE)
    struct.pack_into("iii", info, 0, received.si_signo, received.si_errno, received.si_code)
    struct.pack_into("iI", info, 16, received.si_pid, received.si_uid)
    if call is None or ctypes.CDLL(None).syscall(call, *thread, received.si_signo, info) != 0:
        os.kill(os.getpid(), received.si_signo)


def _wake(number: int, frame: FrameType | None) -> None:
    """Does nothing: the system call that the signal has interrupted lets Python run its handlers."""


def _unblock_in_programs() -> None:
    """Have the programs that this process starts begin with the signals unblocked, as in any process."""
    import _posixsubprocess

    # `subprocess` has a name of its own for it.
    for module, name in (
        (_posixsubprocess, "fork_exec"),
        (sys.modules.get("subprocess"), "_fork_exec"),
        (os, "posix_spawn"),
        (os, "posix_spawnp"),
        (os, "execv"),
        (os, "execve"),
    ):
        call = getattr(module, name, None)
        if call is not None and getattr(call, "__module__", None) != __name__:
            setattr(module, name, _unblocked(call))


def _unblocked(call: Callable[..., Any]) -> Callable[..., Any]:
    def with_signals(*args: Any, **options: Any) -> Any:
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTICES)
        try:
            return call(*args, **options)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return with_signals


def _ancestors(pid: int) -> list[int]:
    """The ancestors of a process, nearest first, as far as they can be seen."""
    found: list[int] = []
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                pid = int(stat.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            break
        found.append(pid)
    return found
