"""Child processes that never outlive their parent, and the wait for what happens next.

The notice signals and SIGCHLD are blocked in supervisor and agents and taken from the kernel one at a time
with `wait_for_signal`. So nothing runs inside a signal handler, and because children inherit the blocked
mask, a stop signal that arrives while a child's interpreter is still starting waits instead of killing it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO

from trainkit.job.exit_codes import signal_exit_code
from trainkit.job.signals import NOTICE_SIGNALS

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GIVE_UP_S = 10.0
WATCHED = {signal.SIGCHLD, *NOTICE_SIGNALS}

_libc = ctypes.CDLL(None, use_errno=True)


def block_signals() -> None:
    """From now on notice signals and SIGCHLD are only seen by `wait_for_signal`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)


def wait_for_signal(timeout_s: float) -> signal.Signals | None:
    """The next notice signal or SIGCHLD; None when the time is over."""
    taken = signal.sigtimedwait(WATCHED, max(0.0, timeout_s))
    return None if taken is None else signal.Signals(taken.si_signo)


def wait_unless_told(delay_s: float) -> signal.Signals | None:
    """Wait before the run starts again; the notice that came meanwhile and that is to be obeyed.

    The one that asks for a new start is only a reason not to wait any longer.
    """
    deadline_s = time.monotonic() + delay_s
    while True:
        # What has come already is seen without any delay too.
        received = wait_for_signal(deadline_s - time.monotonic())
        if received in (None, signal.SIGUSR2):
            return None
        if received != signal.SIGCHLD:
            return received


def log_line(text: str) -> None:
    """Print a line; a disk that is full must not change what becomes of the job."""
    with contextlib.suppress(OSError):
        os.write(1, f"{text}\n".encode(errors="replace"))


def dies_with(
    parent_pid: int, number: signal.Signals, before_exec: Callable[[], None] | None = None
) -> Callable[[], None]:
    """What a child does between fork and exec so that it gets a signal when its parent dies."""

    def prepare() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent_pid:
            os._exit(signal_exit_code(number))
        if before_exec is not None:
            before_exec()

    return prepare


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that they can be found and ended."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start_child(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str],
    output: IO[bytes],
    keeps_mask: bool,
    ignored: Collection[signal.Signals] = (),
) -> subprocess.Popen[bytes]:
    """Start a process in a group of its own that is killed when this one dies.

    `keeps_mask` starts it with the notice signals blocked; it must unblock or await them itself. Those that
    are `ignored` do nothing to it, or to what it starts, unless that installs a handler.
    """

    def before_exec() -> None:
        os.setpgid(0, 0)
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD} if keeps_mask else WATCHED)

    return subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=dict(environ),
        preexec_fn=dies_with(os.getpid(), signal.SIGKILL, before_exec),
    )


def ended(child: subprocess.Popen[bytes]) -> bool:
    """Whether a child has ended; it is not reaped yet, so its pid and process group are still its own."""
    if child.returncode is not None:
        return True
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def exit_code(child: subprocess.Popen[bytes]) -> int:
    """Reap an ended child: its exit code, 128+n after death by signal n."""
    code = child.wait()
    return signal_exit_code(-code) if code < 0 else code


def kill_group(child: subprocess.Popen[bytes]) -> None:
    """SIGKILL for a child that is not reaped yet and everything in its process group."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def end_descendants() -> None:
    """Kill and reap everything below this process, except what the kernel does not let go of."""
    give_up_s = time.monotonic() + GIVE_UP_S
    while (found := descendants(os.getpid())) and time.monotonic() < give_up_s:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)


def ranks_below(pid: int) -> list[int]:
    """What a launcher has made ranks of: processes below it that have RANK, and whose parents have not."""
    ranks = {child for child in descendants(pid) if rank_of(child) is not None}
    return sorted(child for child in ranks if _parent(child) not in ranks)


def rank_of(pid: int) -> int | None:
    """The rank that a process was started as; None when it is none, or has ended."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return next((int(line[5:]) for line in variables if line.startswith(b"RANK=")), None)
    except (OSError, ValueError):
        return None


def state(pid: int) -> str | None:
    """The kernel's letter for the state of a process, ``T`` for stopped; None when it has ended."""
    fields = _stat(pid)
    return fields[0] if fields else None


def _parent(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on; empty when it has ended."""
    try:
        # The command name stands in brackets and may hold brackets and spaces itself.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    """All processes below one, nearest first, as they are at this moment."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (parent := _parent(int(folder.name))) is not None:
            children.setdefault(parent, []).append(int(folder.name))
    found = list(children.get(pid, []))
    for child in found:
        found.extend(children.get(child, []))
    return found
