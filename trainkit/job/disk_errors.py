"""Patience with a disk that is full or away: somebody may see to it before the run has to end."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

from trainkit.errors import UsageError
from trainkit.job import processes
from trainkit.job.node.preflight import PreflightFailed

PATIENCE_S = 300.0
LOOK_AGAIN_S = 5.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_AWAY = (errno.EIO, errno.ESTALE, errno.ESHUTDOWN, errno.ENOTCONN, errno.ETIMEDOUT)
"""What a network filesystem says while its server is restarted or it is mounted anew."""
T = TypeVar("T")


def retry_on_disk_error(action: Callable[[], T], say: Callable[[str], None]) -> T:
    """What the action returns, tried again for five minutes while the disk or the quota is full, or away.

    Raises what it raises: at once when it is something else, or when a notice comes meanwhile.
    """
    give_up_s, told = time.monotonic() + PATIENCE_S, False
    while True:
        try:
            return action()
        except (OSError, PreflightFailed, UsageError) as error:
            if not _may_pass(error) or time.monotonic() > give_up_s:
                raise
            if not told:
                told = True
                say(f"{error}; trying again for {PATIENCE_S:g} s")
            if processes.wait_unless_told(LOOK_AGAIN_S) is not None:
                raise


def _may_pass(error: Exception) -> bool:
    if isinstance(error, PreflightFailed):
        return not error.is_node
    cause = error.__cause__ if isinstance(error, UsageError) else error
    return isinstance(cause, OSError) and cause.errno in (*_FULL, *_AWAY)
