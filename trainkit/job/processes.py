"""Starts child processes that never outlive their parent, and handles signals synchronously in the parent.

The supervisor and the agents block the stop signals and SIGCHLD, and receive them one at a time with
`wait_for_signal`. As a result, no trainkit code in the supervisor and the agents runs inside a signal
handler. Children inherit the signal mask, so a stop signal that arrives while a child's interpreter starts
remains pending instead of killing the child.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, ClassVar, TypeVar

from trainkit.errors import EXIT_OK, EXIT_STOPPED, TrainkitError
from trainkit.formats import mask_secrets
from trainkit.job.handlers import FROM_TERMINAL, signal_mask
from trainkit.job.signals import AGENT_SIGNAL, NOTICE_SIGNALS, signal_exit_code
from trainkit.job.spare_children import own_handlers
from trainkit.run.files import utc_now
from trainkit.run.process import PROC, process_stat

if TYPE_CHECKING:
    from ctypes import CDLL


PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SIGSET_BYTES = 128
GIVE_UP_S = 10.0
WATCHED = {signal.SIGCHLD, *NOTICE_SIGNALS}
PAUSE_SIGNALS = {signal.SIGTSTP, signal.SIGCONT}
"""Signals that `trainkit run` uses to pass Ctrl-Z and `fg` on to the supervisor."""

# Without -P (Python 3.11+), sys.path would begin with the submission folder, and a user's `queue.py` there
# would shadow the standard library's.
PYTHON_OPTIONS = ("-u", "-P") if sys.version_info >= (3, 11) else ("-u",)


def module_argv(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command line for running one of trainkit's modules with this interpreter."""
    return (sys.executable, *PYTHON_OPTIONS, "-m", module, *arguments)


def block_signals(*more: signal.Signals) -> None:
    """Block the stop signals, SIGCHLD and the signals in `more`; `wait_for_signal` receives them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {*WATCHED, *more})


def wait_for_signal(timeout_s: float, *more: signal.Signals) -> signal.Signals | None:
    """Return the next stop signal, SIGCHLD or (in an agent) `AGENT_SIGNAL`, or None after the timeout.

    `more` contains additional blocked signals to wait for.
    """
    from ctypes import byref, c_long, create_string_buffer, get_errno

    libc, awaited = _libc(), create_string_buffer(SIGSET_BYTES)
    libc.sigemptyset(awaited)
    for number in (*WATCHED, AGENT_SIGNAL, *more):
        libc.sigaddset(awaited, int(number))
    deadline_s = time.monotonic() + timeout_s
    while True:
        # Call libc, because Python's sigtimedwait may return an invalid signal if this process is suspended
        # until after the timeout.
        nanoseconds = max(0, int((deadline_s - time.monotonic()) * 1e9))
        received = libc.sigtimedwait(awaited, None, byref((c_long * 2)(*divmod(nanoseconds, 10**9))))
        if received > 0:
            return signal.Signals(received)
        if get_errno() == errno.EAGAIN:
            return None


def wait_for_notice(delay_s: float) -> signal.Signals | None:
    """Sleep before a restart; return the stop signal that arrived during the sleep, or None.

    SIGUSR2, which requests a restart, only shortens the sleep.
    """
    deadline_s = time.monotonic() + delay_s
    while True:
        # Check once for a pending signal even if the delay is 0.
        received = wait_for_signal(deadline_s - time.monotonic())
        if received in (None, signal.SIGUSR2):
            return None
        if received != signal.SIGCHLD:
            return received


def log_line(text: str) -> None:
    """Print a line with secrets masked; ignore I/O errors, because a full disk must not kill the job."""
    with contextlib.suppress(OSError):
        os.write(1, f"{mask_secrets(text)}\n".encode(errors="replace"))


DISK_PATIENCE_S = 300.0
DISK_RETRY_S = 5.0
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_UNAVAILABLE = (errno.EIO, errno.ESTALE, errno.ESHUTDOWN, errno.ENOTCONN, errno.ETIMEDOUT)
"""Errors that a network filesystem returns while its server restarts or while the filesystem is being
remounted."""
T = TypeVar("T")


def fail_on_disk_error() -> None:
    """Make `retry_on_disk_error` raise immediately, because a user at a terminal can free up disk space."""
    global DISK_PATIENCE_S
    DISK_PATIENCE_S = 0.0


def retry_on_disk_error(action: Callable[[], T]) -> T:
    """Call `action`, retrying for up to five minutes while the disk is full, over quota or unavailable.

    Returns the result of `action`. Raises any other error immediately, and raises the disk error if a stop
    signal arrives.
    """
    deadline_s, logged = time.monotonic() + DISK_PATIENCE_S, False
    while True:
        try:
            return action()
        except (OSError, TrainkitError) as error:
            cause = error.__cause__ if isinstance(error, TrainkitError) else error
            is_transient = isinstance(cause, OSError) and cause.errno in (*NO_SPACE, *_UNAVAILABLE)
            if not is_transient or time.monotonic() > deadline_s:
                raise
            if not logged:
                logged = True
                log_line(f"{error}; retrying for {DISK_PATIENCE_S:g} s")
            if wait_for_notice(DISK_RETRY_S) is not None:
                raise


def redirect_output(log: Path) -> None:
    """Append all further output of this process to the file `log`."""
    with log.open("ab") as stream:
        os.dup2(stream.fileno(), sys.stdout.fileno())
        os.dup2(stream.fileno(), sys.stderr.fileno())


@cache
def _libc() -> CDLL:
    # Import ctypes here, so that a dry run, which starts no processes, does not import it.
    from ctypes import CDLL

    return CDLL(None, use_errno=True)


def dies_with(
    parent_pid: int, number: signal.Signals, before_exec: Callable[[], None] | None = None
) -> Callable[[], None]:
    """Return a `preexec_fn` that makes the kernel send the child a signal when the child's parent dies."""
    # Load the library before the fork: in the child, the import lock may be held by a thread that no longer
    # exists.
    libc = _libc()

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent_pid:
            os._exit(signal_exit_code(number))
        if before_exec is not None:
            before_exec()

    return prepare


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that this process can find and kill them."""
    _libc().prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start_child(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str],
    output: IO[bytes],
    keeps_mask: bool,
    ignored: Collection[signal.Signals] = (),
    cwd: str | None = None,
    stdin: int | IO[bytes] = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start a child in its own process group. The kernel kills the child when this process dies.

    If `keeps_mask` is set, the child starts with the stop signals blocked, and must unblock them or wait for
    them itself. The child and its own children ignore the signals in `ignored` unless they install a handler.
    Terminal signals are not ignored, even if they were ignored by a script that ran `trainkit run … &`.
    """

    def before_exec() -> None:
        os.setpgid(0, 0)
        for number in FROM_TERMINAL:
            signal.signal(number, signal.SIG_DFL)
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        kept = NOTICE_SIGNALS if keeps_mask else ()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*WATCHED, *PAUSE_SIGNALS, AGENT_SIGNAL} - {*kept})

    return subprocess.Popen(
        list(argv),
        stdin=stdin,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=dict(environ),
        cwd=cwd,
        preexec_fn=dies_with(os.getpid(), signal.SIGKILL, before_exec),
    )


def ended(child: subprocess.Popen[bytes]) -> bool:
    """Return whether a child has exited, without reaping the child, so that its pid is not reused."""
    if child.returncode is not None:
        return True
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def exit_code(child: subprocess.Popen[bytes]) -> int:
    """Reap an exited child and return its exit code, which is 128+n if signal n killed the child."""
    code = child.wait()
    return signal_exit_code(-code) if code < 0 else code


def kill_group(child: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """Send SIGKILL to the process group of a child that has not been reaped."""
    _signal(os.killpg, child.pid, signal.SIGKILL)


def first_failed(children: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all children have exited or one has failed; return the failed child's index, or None."""
    while True:
        codes = [child.poll() for child in children]
        failed = next((index for index, code in enumerate(codes) if code), None)
        if failed is not None or None not in codes:
            return failed
        time.sleep(0.05)


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        _signal(os.kill, pid, number)


def _signal(kill: Callable[[int, int], None], pid: int, number: signal.Signals) -> None:
    try:
        kill(pid, number)
    except ProcessLookupError:
        return
    except PermissionError:  # this user may not signal a process started with sudo
        log_line(f"cannot send {number.name} to process {pid}, which belongs to another user")


_outliving = set[int]()


def outlives_attempts(child: subprocess.Popen[bytes]) -> None:
    """Exempt a child with all its descendants from `end_descendants`, because it belongs to no attempt."""
    _outliving.add(child.pid)


def _of_attempts() -> list[int]:
    children = children_by_parent()
    own = [pid for pid in children.get(os.getpid(), []) if pid not in _outliving]
    return descendants(os.getpid(), {**children, os.getpid(): own})


def end_descendants() -> None:
    """Kill and reap the descendants of this process, except processes stuck in the kernel.

    Children passed to `outlives_attempts` are not killed.
    """
    deadline_s = time.monotonic() + GIVE_UP_S
    while (found := _of_attempts()) and time.monotonic() < deadline_s:
        signal_all(found, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)


def ranks_below(pid: int) -> list[int]:
    """Return the pids of the ranks started by a launcher.

    A descendant is considered a rank if its environment contains RANK and its parent's does not.
    """
    ranks = {child for child in descendants(pid) if rank_of(child) is not None}
    return sorted(child for child in ranks if parent_pid(child) not in ranks)


def proc_file(pid: int, name: str) -> bytes:
    """Return the content of the file `name` in /proc/PID; empty if it cannot be read."""
    try:
        return (PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""


def link_of(pid: int, name: str) -> str:
    """Return the target of a link in /proc/PID, such as ``exe``; empty if the link cannot be read."""
    try:
        return str((PROC / str(pid) / name).readlink())
    except OSError:
        return ""


def environ_of(pid: int) -> dict[str, str]:
    """Return the initial environment of a process; empty if the environment cannot be read."""
    lines = proc_file(pid, "environ").split(b"\0")
    return dict(os.fsdecode(line).partition("=")[::2] for line in lines)


def rank_of(pid: int) -> int | None:
    """Return RANK from a process's environment, or None if RANK is not set or the process has exited."""
    rank = environ_of(pid).get("RANK", "")
    return int(rank) if rank.isdigit() else None


def exit_code_of_zombie(pid: int) -> int | None:
    """Return a zombie's exit code, negative if a signal killed it, or None if the process is not a zombie."""
    fields = proc_file(pid, "stat").rpartition(b")")[2].split()
    return os.waitstatus_to_exitcode(int(fields[49])) if fields[:1] == [b"Z"] else None


PIDFD_GET_INFO = 0xC040FF0B
PIDFD_INFO_EXIT = 8


def exit_code_of(handle: int, pid: int) -> int | None:
    """Return an exited process's exit code from its pidfd, negative if killed by a signal; None if unknown.

    Before Linux 6.15, the exit code is available only until the parent has reaped the process.
    """
    if (code := exit_code_of_zombie(pid)) is not None:
        return code
    info = bytearray(64)
    struct.pack_into("Q", info, 0, PIDFD_INFO_EXIT)
    with contextlib.suppress(OSError):  # fails on kernels older than Linux 6.15
        fcntl.ioctl(handle, PIDFD_GET_INFO, info)
        mask, status = struct.unpack_from("Q52xi", info)
        if mask & PIDFD_INFO_EXIT:
            return os.waitstatus_to_exitcode(status)
    return None


def signal_handled_by(pid: int, configured: str) -> signal.Signals:
    """Return the signal that asks a command to save.

    If `configured` is ``auto``, the signal is the one that the process handles. Most scripts that save on a
    signal handle SIGTERM. A script that handles none of the signals gets SIGTERM, which kills the script.
    """
    if configured != "auto":
        return signal.Signals[f"SIG{configured}"]
    handled = own_handlers(signal_mask(pid, "SigCgt"))
    only_usr2 = signal.SIGUSR2 in handled and signal.SIGTERM not in handled
    return signal.SIGUSR2 if only_usr2 else signal.SIGTERM


def ignores(pid: int, number: signal.Signals) -> bool:
    """Return whether a process ignores a signal."""
    return number in signal_mask(pid, "SigIgn")


def parent_pid(pid: int) -> int | None:
    """Return the parent pid of a process, or None if the process has exited or cannot be inspected."""
    try:
        stat = process_stat(pid)
    except OSError:
        return None  # the process belongs to another user, and /proc is mounted with hidepid
    return None if stat is None else stat.parent_pid


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not exited. A zombie is considered exited."""
    stat = proc_file(pid, "stat").rpartition(b")")[2].split()
    return bool(stat) and stat[0] not in (b"Z", b"X")


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, for example by SIGSTOP."""
    return proc_file(pid, "stat").rpartition(b")")[2].split()[:1] == [b"T"]


def children_by_parent() -> dict[int, list[int]]:
    """Return a mapping from each parent's pid to the pids of its children, for all current processes."""
    children: dict[int, list[int]] = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit() and (parent := parent_pid(int(folder.name))) is not None:
            children.setdefault(parent, []).append(int(folder.name))
    return children


def children_of(pid: int) -> list[int]:
    """Return the pids of a process's children.

    If a child exits during the call, the result may lack that child and the child listed after it.
    """
    tasks = PROC / str(pid) / "task"
    try:
        return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]
    except OSError:
        return []  # the process has exited


def tree_of(pid: int) -> dict[int, list[int]]:
    """Return the children of a process and of all its descendants, as found by `children_of`."""
    children, found = dict[int, list[int]](), [pid]
    for parent in found:
        children[parent] = children_of(parent)
        found.extend(children[parent])
    return children


def descendants(pid: int, children: Mapping[int, list[int]] | None = None) -> list[int]:
    """Return all current descendants of a process, closest first."""
    children = children_by_parent() if children is None else children
    found = list(children.get(pid, []))
    for child in found:
        found.extend(children.get(child, []))
    return found


PEER_EXIT_S = 5.0
"""Seconds to wait, after a member of a group has failed, for the other members to exit and report on their
own."""
KILL_MARGIN_S = 5.0
"""How many seconds after the grace time an agent kills workers that have not exited on their own."""


class ProcessGroup:
    """A group of child processes, keyed by rank and managed from the first start to the last exit.

    A supervisor's group consists of the agents, or of srun. An agent's group consists of the agent's workers.
    """

    poll_interval_s = 5.0
    """Seconds between calls of `poll` if no signal arrives and no member exits."""
    pauses_by: ClassVar[tuple[signal.Signals, ...]] = ()
    """Blocked signals that make the group stop its members until SIGCONT arrives."""

    def __init__(self) -> None:
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        """The running members, keyed by rank."""
        self.deadline_s: float | None = None
        """The monotonic time at which the remaining members are killed, or None."""
        self.received_at = ""
        """The time of the latest stop signal, recorded before the signal is forwarded, because the signal may
        kill a member."""
        self._poll_error = ""
        self.attended: int | None = None
        """The member that a user controls in a terminal, or None. Failures of other members do not stop this
        member."""

    def start(self) -> None:
        """Start every member and add it to `running`."""
        raise NotImplementedError

    def forward_signal(self, received: signal.Signals) -> None:
        """Forward a stop signal to every member."""
        for member in self.running.values():
            os.kill(member.pid, received)  # Popen.send_signal would reap a member that has just exited

    def on_signal(self, received: signal.Signals) -> None:
        """React to a stop signal after it has been forwarded to the members."""
        raise NotImplementedError

    def on_exit(self, rank: int, code: int, killed: bool) -> None:
        """React to the exit of a member. `killed` means that this group killed the member."""
        raise NotImplementedError

    def died_of_stop_signal(self, code: int) -> bool:
        """Return whether the forwarded signal killed a member; if so, other members keep their grace time."""
        return False

    def keeps(self, rank: int, member: subprocess.Popen[bytes]) -> bool:
        """Return whether an exited member must not be reaped yet, for example while its children save."""
        return False

    def exit_code(self, rank: int, member: subprocess.Popen[bytes]) -> int:
        """Reap an exited member and return the exit code to use for the member."""
        return exit_code(member)

    def poll(self) -> None:
        """Do periodic work; called every `poll_interval_s`, and after each signal and each exit."""

    def run(self) -> None:
        """Start the members and forward stop signals until all members have exited or the deadline passes."""
        try:
            self.start()
            while self.running:
                self._wait()
        finally:
            self._kill_running()

    def kill_within(self, seconds: float) -> None:
        """Kill the members that are still running after `seconds`, unless an earlier deadline is set."""
        deadline_s = time.monotonic() + seconds
        self.deadline_s = deadline_s if self.deadline_s is None else min(self.deadline_s, deadline_s)

    def _wait(self) -> None:
        self._poll()
        remaining_s = float("inf") if self.deadline_s is None else self.deadline_s - time.monotonic()
        if remaining_s <= 0:
            self._kill_running()
            return
        received = wait_for_signal(min(remaining_s, self.poll_interval_s), *self.pauses_by)
        if received in self.pauses_by:
            received = self.pause()
        if received not in (None, signal.SIGCHLD, signal.SIGCONT):
            self.received_at = utc_now()
            self.forward_signal(received)
            self.on_signal(received)
        self._reap()

    def pause(self) -> signal.Signals | None:
        """Handle a signal in `pauses_by`; return the SIGCONT or stop signal that ended the pause."""
        raise NotImplementedError

    def _poll(self) -> None:
        """Call `poll` and log any OSError, because a brief filesystem outage must not stop the members."""
        problem = ""
        try:
            self.poll()
        except OSError as error:
            problem = str(error)
            if problem != self._poll_error:
                log_line(f"cannot read the run folder ({problem})")
        self._poll_error = problem

    def _reap(self) -> None:
        for rank, member in list(self.running.items()):
            if ended(member) and not self.keeps(rank, member):
                kill_group(member)  # also kills the member's remaining children, such as data loader workers
                self._record_exit(rank, member, killed=False)

    def _record_exit(self, rank: int, member: subprocess.Popen[bytes], killed: bool) -> None:
        code = self.exit_code(rank, member)
        del self.running[rank]
        is_failure = code not in (EXIT_OK, EXIT_STOPPED) and not self.died_of_stop_signal(code)
        if is_failure and self.attended not in self.running:
            self.kill_within(PEER_EXIT_S)
        self.on_exit(rank, code, killed)

    def _kill_running(self) -> None:
        members = list(self.running.items())
        for _, member in members:
            kill_group(member)
        for rank, member in members:
            self._record_exit(rank, member, killed=True)
