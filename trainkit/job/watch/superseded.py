"""Keeps a host that was cut off, and is back, from computing beside the attempt that took its place."""

from __future__ import annotations

from trainkit.rundir import AttemptDir


def successor(attempt: AttemptDir) -> int | None:
    """The newer attempt whose ranks have met on other hosts meanwhile; None while this one is the newest.

    One that waits in a queue, or was never started, is no successor.
    """
    run = attempt.run
    if not run.attempt(attempt.number + 1).path.is_dir():
        return None  # the usual case, at the price of one look
    newer = [number for number in run.attempt_numbers() if number > attempt.number]
    return next((number for number in reversed(newer) if run.attempt(number).rendezvous_file.exists()), None)
