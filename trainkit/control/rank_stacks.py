"""Asks the ranks of a running job for their Python stacks."""

from __future__ import annotations

from shlex import quote

from trainkit.backends.jobs import live_entry
from trainkit.errors import TrainkitError, UsageError
from trainkit.job.failure.stacks import Reply, gather
from trainkit.plan.launch import LaunchPlan
from trainkit.run.rundir import AttemptDir, RunDir

WAIT_S = 20.0
"""Agents poll every two seconds and give their ranks three to reply; network filesystems add latency."""


def ask_stacks(run: RunDir, rank: int | None) -> tuple[AttemptDir, list[Reply], list[int]]:
    """The running attempt, the replies of its ranks, or of one, and the ranks that did not reply.

    Raises UsageError for a run or rank that does not run, TrainkitError when no rank replied.
    """
    attempt = _running_attempt(run)
    world_size = LaunchPlan.read(attempt.plan_file).world_size
    if rank is not None and rank >= world_size:
        raise UsageError(f"the run has no rank {rank}", hint=f"its ranks are 0 to {world_size - 1}")
    try:
        replies = gather(attempt, world_size, rank, WAIT_S)
    except OSError as error:
        raise UsageError(
            f"{attempt.path} cannot be written: {error.strerror}",
            hint="requesting stacks needs write access to the run folder",
        ) from error
    if not replies:
        raise TrainkitError(
            f"no rank of {run.path} responded within {WAIT_S:.0f} s",
            hint=f"`trainkit status {quote(str(run.path))}` shows whether it is still running",
        )
    asked = range(world_size) if rank is None else (rank,)
    return attempt, replies, sorted(set(asked) - {reply.rank for reply in replies})


def _running_attempt(run: RunDir) -> AttemptDir:
    """The attempt whose ranks are running; raises UsageError when there is none."""
    entry = live_entry(run, "stacks")
    if entry is None:
        raise UsageError(
            f"{run.path} is not running", hint=f"`trainkit status {quote(str(run.path))}` shows how it ended"
        )
    attempt = run.attempt(entry.attempt)
    if not any(attempt.logs_dir.glob("rank-*.log")):
        raise UsageError(
            f"no rank of attempt {attempt.number} of {run.path} has been started yet",
            hint=f"`trainkit status {quote(str(run.path))}` shows what it waits for",
        )
    return attempt
