"""Implements ``trainkit stacks``, which prints the Python stacks of all ranks in a running job."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import TypedDict

import click

from trainkit.backends.jobs import live_entry
from trainkit.cli.help import as_command, option
from trainkit.cli.options import INDEX, json_option, run_argument
from trainkit.cli.output import echo_json
from trainkit.errors import TrainkitError, UsageError
from trainkit.folders import shown_path
from trainkit.formats import rank_list, there_are
from trainkit.job.failure.stacks import Reply, explain_silence, gather, group_replies
from trainkit.plan.launch import LaunchPlan
from trainkit.run.record import read_job
from trainkit.run.registry import find_run
from trainkit.run.rundir import AttemptDir, RunDir

WAIT_S = 20.0
"""Seconds to wait for replies from the ranks. Agents poll every two seconds, ranks have three seconds to
reply, and network file systems add latency."""


class StacksJson(TypedDict):
    """The stacks of the ranks of a running attempt."""

    run_dir: str
    attempt: int
    replies: list[Reply]
    groups: list[list[int]]
    """Groups of ranks with identical stacks."""
    silent: list[int]
    """The ranks that did not reply."""


@as_command("trainkit stacks last", "trainkit stacks last --rank 1", "trainkit stacks last --json")
@run_argument
@option("--rank R", "Print the stacks of all threads of this rank.", type=INDEX)
@json_option("trainkit.capabilities.stacks.command:StacksJson")
def command(run_name: str, rank: int | None, as_json: bool) -> None:
    """Print the Python stacks of RUN's ranks, grouping ranks with identical stacks.

    Training continues while the stacks are collected. Ranks that do not respond, and ranks of a COMMAND, are
    inspected with py-spy if it is installed.
    """
    run = find_run(run_name, acts=True)
    attempt, replies, silent = _ask_stacks(run, rank)
    click.echo(f"{run.shown}, attempt {attempt.number}", err=True)
    groups = group_replies(replies)
    if as_json:
        value = {
            "run_dir": str(run.path),
            "attempt": attempt.number,
            "replies": [asdict(reply) for reply in replies],
            "groups": [[reply.rank for reply in group] for group in groups],
            "silent": silent,
        }
        echo_json(value)
        return
    for group in groups:
        click.echo(_group_text(group, all_threads=rank is not None))
    for reply in replies:
        if reply.problem:
            click.echo(f"rank {reply.rank} on {reply.host}, process {reply.pid}: {reply.problem}")
    waits = explain_silence(replies)
    if waits.lock is not None:
        click.echo(waits.text)
    if silent:
        click.echo(
            f"no response from {rank_list(silent)}: the processes have exited, or the hosts do not respond"
        )


def _ask_stacks(run: RunDir, rank: int | None) -> tuple[AttemptDir, list[Reply], list[int]]:
    """Request the stacks of all ranks in the running attempt, or of a single rank.

    Returns the attempt, the replies, and the ranks that did not reply. Raises UsageError if the run or the
    rank is not running, and TrainkitError if no rank replied.
    """
    attempt = running_attempt(run)
    world_size = LaunchPlan.read(attempt.plan_file, executes=False).world_size
    if rank is not None and rank >= world_size:
        raise UsageError(f"the run has no rank {rank}", hint=there_are(range(world_size)))
    try:
        replies = gather(attempt, world_size, rank, WAIT_S)
    except OSError as error:
        raise UsageError(
            f"{shown_path(attempt.path)} cannot be written: {error.strerror}",
            hint="requesting stacks needs write access to the run folder",
        ) from error
    if not replies:
        raise TrainkitError(
            f"no rank of {run.shown} responded within {WAIT_S:.0f} s",
            hint=f"`trainkit status {run.quoted}` shows whether the run is still active",
        )
    asked = range(world_size) if rank is None else (rank,)
    return attempt, replies, sorted(set(asked) - {reply.rank for reply in replies})


def running_attempt(run: RunDir) -> AttemptDir:
    """Return the attempt whose ranks are running; raise UsageError if no rank is running."""
    entry = live_entry(run, read_job(run), "stacks")
    if entry is None:
        raise UsageError(
            f"{run.shown} is not running", hint=f"`trainkit status {run.quoted}` shows how the run ended"
        )
    attempt = run.attempt(entry.attempt)
    if not any(attempt.logs_dir.glob("rank-*.log")):
        raise UsageError(
            f"no rank of attempt {attempt.number} of {run.shown} has been started yet",
            hint=f"`trainkit status {run.quoted}` shows what the run is waiting for",
        )
    return attempt


def _group_text(group: Sequence[Reply], all_threads: bool) -> str:
    hosts = ", ".join(sorted({reply.host for reply in group}))
    lines = [f"{rank_list([reply.rank for reply in group])} on {hosts}{_position(group)}"]
    for name, frames in group[0].threads.items():
        lines += [f"  thread {name}"] if all_threads else []
        # Remove the path of the site-packages folder from each frame, because it is long and the same in all
        # frames.
        short = [re.sub(r"\(\S*/(?:site|dist)-packages/", "(", frame) for frame in frames]
        lines += [f"    {frame}" for frame in short if "(<frozen importlib" not in frame]
        if not all_threads:
            break
    return "\n".join([*lines, ""])


def _position(group: Sequence[Reply]) -> str:
    """Return the step and the phase of a group of ranks, or "" if they are unknown or the ranks differ."""
    phases = {(reply.step, reply.phase) for reply in group}
    if len(phases) > 1 or group[0].phase is None:
        return ""
    step = "before the first step" if group[0].step is None else f"step {group[0].step}"
    longest_s = max(reply.since_s or 0.0 for reply in group)
    return f": {step}, in {group[0].phase} for {longest_s:.1f} s"
