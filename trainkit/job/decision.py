"""What happens after the workers have ended: a pure function of how they ended and what was asked."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainkit.errors import EXIT_NO_RESTART, EXIT_OK, EXIT_STOPPED, EXIT_STUCK
from trainkit.job.signals import NOTICE_SIGNALS

COMEBACK_SIGNAL = "SIGUSR2"
"""Sent to a supervisor it means: save, stop, and start again."""

Action = Literal["finished", "stopped", "requeue", "failed"]


@dataclass(frozen=True)
class Decision:
    """What the supervisor does next, and why in one sentence."""

    action: Action
    reason: str
    exit_code: int


def decide(
    exit_codes: Sequence[int], request: str | None, num_requeues: int, max_requeues: int, killed: bool = False
) -> Decision:
    """Judge one attempt.

    `exit_codes` holds one code a node, `request` the signal that the supervisor was sent, `num_requeues`
    how often the job has come back already; `killed` says that some did not end within the grace time.
    """
    if all(code == EXIT_OK for code in exit_codes):
        return Decision("finished", "all workers finished", EXIT_OK)
    saved = all(code in (EXIT_OK, EXIT_STOPPED) for code in exit_codes)
    if EXIT_NO_RESTART in exit_codes:
        return Decision("failed", "a worker says that starting again cannot help", EXIT_NO_RESTART)
    if saved and request is None:
        return Decision("stopped", "the workers saved and ended by themselves", EXIT_STOPPED)
    if request is not None and (saved or killed or _ended_as_asked(exit_codes)):
        if saved:
            how = f"saved after {request}"
        elif killed:
            how = f"killed: not all workers ended within the grace time after {request}"
        elif EXIT_STUCK in exit_codes:
            how = f"stuck: the workers left shortly before the grace time after {request} was over"
        else:
            how = f"ended by {request}, and no worker said that it saved"
        return _after_request(how, request, num_requeues, max_requeues)
    code = next(code for code in exit_codes if code not in (EXIT_OK, EXIT_STOPPED))
    return Decision("failed", f"a worker ended with {describe_exit(code)}", code)


def _after_request(how: str, request: str, num_requeues: int, max_requeues: int) -> Decision:
    if request != COMEBACK_SIGNAL:
        return Decision("stopped", how, EXIT_STOPPED)
    if num_requeues >= max_requeues:
        reason = (
            f"{how}; not started again: requeue.max is {max_requeues} and it came back {num_requeues} times"
        )
        return Decision("stopped", reason, EXIT_STOPPED)
    return Decision("requeue", f"{how}; starting again, comeback {num_requeues + 1}", EXIT_STOPPED)


def _ended_as_asked(exit_codes: Sequence[int]) -> bool:
    """True when every worker that did not save died of the signal, or left because it was stuck."""
    asked = [signal_exit_code(number) for number in NOTICE_SIGNALS]
    return all(code in (EXIT_OK, EXIT_STOPPED, EXIT_STUCK, *asked) for code in exit_codes)


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
