"""Exit codes of processes: of one that a signal killed, of several as one, in words."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from trainkit.errors import EXIT_NO_RESTART, EXIT_OK, EXIT_STOPPED
from trainkit.job.signals import NOTICE_SIGNALS


def is_death_by_notice(code: int) -> bool:
    """Whether an exit code is that of a process that a notice signal has killed."""
    return code in map(signal_exit_code, NOTICE_SIGNALS)


def signal_exit_code(number: int) -> int:
    """The exit code that stands for a death by signal, as shells have it."""
    return 128 + number


def combine(codes: Sequence[int]) -> int:
    """One exit code for several workers, given in the order in which they ended.

    78 wins; else the first failure; else 75 when one saved and wants to go on; else 0.
    """
    if EXIT_NO_RESTART in codes:
        return EXIT_NO_RESTART
    for code in codes:
        if code not in (EXIT_OK, EXIT_STOPPED):
            return code
    return EXIT_STOPPED if EXIT_STOPPED in codes else EXIT_OK


def describe_exit(code: int) -> str:
    """An exit code in words: ``exit code 3`` or ``SIGKILL``."""
    if code > 128:
        try:
            return signal.Signals(code - 128).name
        except ValueError:
            pass
    return f"exit code {code}"
