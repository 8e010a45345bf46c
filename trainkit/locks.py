"""Provides lock files for processes on one host, or on several hosts that share a file system.

The locks use flock. The kernel releases a flock only after the process and all of its forks have closed the
file, so forked processes close their copies of the descriptors. The lock file contains the id of the process
that holds the lock, so that waiting processes can report it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from shlex import quote

POLL_S = 0.05
SLOW_POLL_S = 0.25
"""Polling interval in seconds after the first second; it is long because each attempt to lock a file over NFS
sends a request to the server."""
NOTICE_S = 5.0
"""Seconds after which a waiting process prints which lock it is waiting for."""
STOP_S = 2.0
"""Seconds that a process keeps waiting for a lock after a stop signal, because most locks are held only
briefly."""
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}
MAX_HOLDER_BYTES = 4096
HOLDER_START = b'{"host": '
_held: set[int] = set()
"""Descriptors of locks that this process holds or is acquiring, until `release_lock` is called."""
MOUNTS = Path("/proc/self/mounts")
_OCTAL = re.compile(r"\\([0-7]{3})")
_LOCAL_LOCKS = {
    "lustre": ("localflock",),
    "nfs": ("nolock", "local_lock=flock", "local_lock=all"),
    "nfs4": ("nolock", "local_lock=flock", "local_lock=all"),
}
"""Maps a file system to the mount options that make a flock visible only on the same host."""
NEEDS_FLOCK = "runs require flock: Lustre needs the mount option flock, and NFS needs lockd"


class LockUnsupported(OSError):
    """Raised if the file system does not support flock."""

    hint = NEEDS_FLOCK


class NotALock(OSError):
    """Raised if the path of a lock is a symlink or not a regular file.

    Another user may have created the file to attack this user.
    """

    @property
    def hint(self) -> str:
        path = quote(str(self.filename))
        return f"`ls -l {path}` shows its owner; remove it (if it is a link, its target was not changed)"


class LockBusy(BlockingIOError):
    """Raised if another process still holds the lock. The message identifies that process."""


class LockStopped(LockBusy):
    """Raised if a stop signal interrupted waiting for a lock; the signal remains pending."""


def acquire_lock(
    path: Path, timeout_s: float | None = None, mode: int = 0o600, owner: str = "", *, quiet: bool = False
) -> int:
    """Lock a file with flock, and return the descriptor to pass to `release_lock`.

    `owner` is a text that `owner_of` returns while the lock is held. Waits until other processes release the
    lock, or raises LockBusy after `timeout_s`. Unless `quiet` is set, prints once to stderr which lock it is
    waiting for.

    If the process blocks SIGTERM or SIGINT, either signal interrupts the wait: LockStopped is raised, and the
    signal remains pending. Raises LockUnsupported if flock is not supported, and OSError if the file cannot
    be created.
    """
    started_s = time.monotonic()
    give_up_s = float("inf") if timeout_s is None else started_s + timeout_s
    stop_s = float("inf")
    is_noticed = quiet
    descriptor = _open(path, mode)
    try:
        while True:
            if not _is_current(descriptor, path):
                # The lock file was removed, for example because the host that held the lock is down. Use the
                # new file as the lock from now on.
                replaced, descriptor = descriptor, _open(path, mode)
                release_lock(replaced)
            if _try_lock(descriptor, path) and _is_current(descriptor, path):
                _write_holder(descriptor, owner)
                return descriptor
            now_s = time.monotonic()
            if stop_s == float("inf") and STOP_SIGNALS & signal.sigpending():
                stop_s = now_s + STOP_S
            if now_s >= min(give_up_s, stop_s):
                kind = LockBusy if now_s >= give_up_s else LockStopped
                raise kind(f"{path} is {describe_holder(path)}")
            if not is_noticed and now_s - started_s >= NOTICE_S:
                is_noticed = True
                with contextlib.suppress(OSError):
                    print(
                        f"waiting for the lock {path}, which is {describe_holder(path)}",
                        file=sys.stderr,
                        flush=True,
                    )
            time.sleep(POLL_S if now_s - started_s < 1.0 else SLOW_POLL_S)
    except BaseException:
        release_lock(descriptor)
        raise


def release_lock(descriptor: int) -> None:
    """Release a lock acquired with `acquire_lock`."""
    _held.discard(descriptor)
    os.close(descriptor)


def _let_go_in_fork() -> None:
    """In a forked process, replace the descriptors of the parent's locks with /dev/null.

    If the descriptors were kept, a forked process that outlives its parent would hold the locks, although the
    lock files name the parent. The descriptors stay valid, so that the forked process can call `release_lock`
    when it leaves a `with` block.
    """
    if _held:
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in _held:
            os.dup2(nowhere, descriptor, inheritable=False)
        os.close(nowhere)


os.register_at_fork(after_in_child=_let_go_in_fork)


def is_locked(path: Path) -> bool:
    """Return whether any process holds the lock on a file. Raises OSError if the file cannot be opened.

    Several processes can call this function at the same time without seeing each other's locks.
    """
    try:
        with path.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


@contextmanager
def file_lock(
    path: Path, timeout_s: float | None = None, mode: int = 0o600, *, quiet: bool = False
) -> Iterator[None]:
    """Hold the lock on a file during the block. Parameters and errors are the same as for `acquire_lock`."""
    descriptor = acquire_lock(path, timeout_s, mode, quiet=quiet)
    try:
        yield
    finally:
        release_lock(descriptor)


def unsupported(folder: Path) -> str | None:
    """Return why files in a folder cannot be locked, or None if they can or the folder is not writable."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=".trainkit-", dir=folder)
    except OSError:
        return None
    try:
        _try_lock(descriptor, folder)
    except LockUnsupported as error:
        return str(error.strerror)
    finally:
        os.close(descriptor)
        os.unlink(name)
    return None


def local_locks(folder: Path, mounts: Path = MOUNTS) -> str | None:
    """Return why locks in a folder are visible only on this host, or None if other hosts see them.

    The folder need not exist. None is also returned if the list of mounts cannot be read.
    """
    try:
        lines = [line.split(" ") for line in mounts.read_text(errors="surrogateescape").splitlines()]
    except OSError:
        return None
    place = Path(os.path.realpath(folder))
    around = [
        (len(point.parts), number, point, kind, options.split(","))
        for number, (_, mount, kind, options, *_) in enumerate(lines)
        if place.is_relative_to(point := Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), mount)))
    ]
    # If several file systems are mounted on the same path, only the last one is visible.
    _, _, point, name, options = max(around, default=(0, 0, Path(), "", []))
    option = next((option for option in _LOCAL_LOCKS.get(name, ()) if option in options), None)
    if option is None:
        return None
    return (
        f"{point} is mounted with {option} ({name}): locks in the run folder work only within one host, so "
        f"commands and jobs on different hosts can interfere; control this run from one host only, or "
        f"choose another file system with --run-dir"
    )


def _open(path: Path, mode: int) -> int:
    """Open a lock file, rejecting symlinks and everything that is not a regular file.

    The file must have no other purpose, because the id of the process that holds the lock is written to it.
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags | os.O_RDWR | os.O_CREAT, mode)
    except PermissionError:
        # Another user's file can be locked, but not written to.
        descriptor = os.open(path, flags | os.O_RDONLY)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _not_a_lock(path) from None
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(descriptor)
        raise _not_a_lock(path)
    _held.add(descriptor)
    return descriptor


def _not_a_lock(path: Path) -> NotALock:
    return NotALock(
        errno.EINVAL,
        "a lock must be a regular file with one link, but this is a symlink, a hard link or a special file",
        str(path),
    )


def _is_current(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the file that exists at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _try_lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise LockUnsupported(error.errno, error.strerror, str(path)) from error
    return True


def _write_holder(descriptor: int, owner: str) -> None:
    holder = {
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "job_id": os.environ.get("SLURM_JOB_ID"),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z"),
        **({"owner": owner} if owner else {}),
    }
    with contextlib.suppress(
        OSError
    ):  # On a full disk, the lock works, but the process that holds it cannot be recorded.
        if os.pread(descriptor, len(HOLDER_START), 0) not in (b"", HOLDER_START):
            return  # A file with other content is not a lock file.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def owner_of(path: Path) -> str:
    """Return the `owner` text written to a lock file by the process that holds the lock."""
    return str(_read_holder(path).get("owner") or "another process")


def _read_holder(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as stream:
            holder = json.loads(stream.read(MAX_HOLDER_BYTES))
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


def describe_holder(path: Path) -> str:
    """Describe which process holds a lock, from the lock file: ``held by process 7 on node1 since …``."""
    holder = _read_holder(path)
    try:
        host, pid, job_id, since = (holder[key] for key in ("host", "pid", "job_id", "time"))
    except KeyError:
        return "held by another process"
    job = f" (job {job_id})" if job_id else ""
    return f"held by process {pid} on {host}{job} since {since}"
