"""``trainkit stacks``: the Python stacks of the ranks of a running job."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from shlex import quote
from typing import TYPE_CHECKING

import click

from trainkit.cli.help import Command, examples
from trainkit.cli.options import json_option, run_argument
from trainkit.errors import EXIT_OK, TrainkitError, UsageError
from trainkit.formats import rank_list

if TYPE_CHECKING:
    from trainkit.job.failure.stacks import Reply
    from trainkit.run.rundir import AttemptDir, RunDir

WAIT_S = 20.0
"""Agents poll every two seconds and give their ranks three to reply; network filesystems add latency."""


@click.command(
    cls=Command,
    epilog=examples("trainkit stacks last", "trainkit stacks last --rank 1", "trainkit stacks last --json"),
)
@run_argument
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="Print all threads of this rank.")
@json_option
def command(run_name: str, rank: int | None, as_json: bool) -> int:
    """Print the Python stacks of RUN's ranks, grouping ranks with identical stacks.

    Training continues. Ranks that do not respond, and the ranks of a COMMAND, are inspected with py-spy if it
    is installed.
    """
    from trainkit.job.failure.stacks import explain_silence, group_replies
    from trainkit.run.registry import find_run

    run = find_run(run_name)
    attempt, replies, silent = _ask_stacks(run, rank)
    groups = group_replies(replies)
    if as_json:
        value = {
            "run_dir": str(run.path),
            "attempt": attempt.number,
            "replies": [asdict(reply) for reply in replies],
            "groups": [[reply.rank for reply in group] for group in groups],
            "silent": silent,
        }
        click.echo(json.dumps(value, ensure_ascii=False))
        return EXIT_OK
    for group in groups:
        click.echo(_group_text(group, all_threads=rank is not None))
    for reply in replies:
        if reply.problem:
            click.echo(f"rank {reply.rank} on {reply.host}, process {reply.pid}: {reply.problem}")
    waits = explain_silence(replies)
    if waits.lock is not None:
        click.echo(waits.text)
    if silent:
        click.echo(f"no response from {rank_list(silent)}: ended, or the host does not respond")
    return EXIT_OK


def _ask_stacks(run: RunDir, rank: int | None) -> tuple[AttemptDir, list[Reply], list[int]]:
    """The running attempt, the replies of its ranks, or of one, and the ranks that did not reply.

    Raises UsageError for a run or rank that does not run, TrainkitError when no rank replied.
    """
    from trainkit.job.failure.stacks import gather
    from trainkit.plan.launch import LaunchPlan

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
    from trainkit.backends.jobs import live_entry

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


def _group_text(group: Sequence[Reply], all_threads: bool) -> str:
    hosts = ", ".join(sorted({reply.host for reply in group}))
    lines = [f"{rank_list([reply.rank for reply in group])} on {hosts}{_position(group)}"]
    for name, frames in group[0].threads.items():
        lines += [f"  thread {name}"] if all_threads else []
        lines += [f"    {_short(frame)}" for frame in frames if "(<frozen importlib" not in frame]
        if not all_threads:
            break
    return "\n".join([*lines, ""])


def _position(group: Sequence[Reply]) -> str:
    """Step and phase of a group of ranks as text; empty if they differ or are unknown."""
    phases = {(reply.step, reply.phase) for reply in group}
    if len(phases) > 1 or group[0].phase is None:
        return ""
    step = "before the first step" if group[0].step is None else f"step {group[0].step}"
    longest_s = max(reply.since_s or 0.0 for reply in group)
    return f": {step}, in {group[0].phase} for {longest_s:.1f} s"


def _short(frame: str) -> str:
    """A frame without the path of the site-packages folder."""
    return re.sub(r"\(\S*/(?:site|dist)-packages/", "(", frame)
