"""A lock between processes, on one machine or on several that share a file system."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainkit.errors import TrainkitError, UsageError
from trainkit.locks import LockUnsupported, acquire_lock, release_lock


@contextmanager
def exclusive(path: Path, busy: str, wait: bool) -> Iterator[None]:
    """Hold the lock file at `path` (flock, released by the kernel when the process dies).

    If another process holds it, print `busy` to stderr and wait, or, without `wait`, raise UsageError(busy).
    Raises TrainkitError on a file system without locks, OSError if the file cannot be created.
    """
    try:
        try:
            descriptor = acquire_lock(path, timeout_s=0.0, mode=0o644)
        except BlockingIOError:
            if not wait:
                raise UsageError(busy, hint="wait until it has finished, or choose another folder") from None
            print(busy, file=sys.stderr, flush=True)
            descriptor = acquire_lock(path, mode=0o644)
    except LockUnsupported as error:
        raise TrainkitError(
            f"the file system of {path} has no file locks: {error.strerror}",
            hint="use a folder on a file system with locks",
        ) from None
    try:
        yield
    finally:
        release_lock(descriptor)
