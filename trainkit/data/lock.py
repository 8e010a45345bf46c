"""One process at a time, on one machine or several that share a file system."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainkit.errors import TrainkitError, UsageError

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def exclusive(path: Path, busy: str, wait: bool) -> Iterator[None]:
    """Hold the lock file at `path` (flock, released by the kernel when the process dies).

    While another process holds it: say `busy` on stderr and wait, or raise UsageError.
    Raises TrainkitError on a file system without locks, OSError where the file cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise UsageError(busy, hint="wait until it has finished, or choose another folder") from None
            print(busy, file=sys.stderr, flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            raise TrainkitError(
                f"the file system of {path} has no file locks: {error.strerror}",
                hint="use a folder on another one",
            ) from None
        yield
    finally:
        os.close(descriptor)
