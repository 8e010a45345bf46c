"""Prepares the Python interpreter of a rank for `breakpoint()`.

`trainkit.job.python_start` loads this module. The interpreter may not have trainkit installed, so only the
standard library is imported.
"""

from __future__ import annotations

import os
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

FOLDER = __file__.rpartition("/")[0]


def prepare(load: Callable[..., ModuleType], *, is_rank: bool) -> None:
    """Make `breakpoint()` wait for a terminal in a rank and its child processes."""
    if "TRAINKIT_JOB_DEBUG" in os.environ:
        debugger = load("rank_debugger", FOLDER)
        debugger.install(is_rank=is_rank, after_import=load("spare_children").after_import)
        return

    def stop(*args: Any, **kwargs: Any) -> Any:
        if os.environ.get("PYTHONBREAKPOINT") or (not is_rank and has_input()):
            return sys.__breakpointhook__(*args, **kwargs)
        return load("rank_debugger", FOLDER).stop_at(sys._getframe(1))

    sys.breakpointhook = stop


def has_input() -> bool:
    """Return whether standard input is a readable pipe or terminal rather than /dev/null."""
    try:
        own, null = os.fstat(0), os.stat(os.devnull)  # noqa: PTH116
    except OSError:
        return False
    return not stat.S_ISCHR(own.st_mode) or own.st_rdev != null.st_rdev
