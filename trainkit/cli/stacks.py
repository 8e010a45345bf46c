"""``trainkit stacks``: the Python stacks of the ranks of a running job."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from trainkit.cli.help import Command, examples
from trainkit.cli.options import json_option, run_argument
from trainkit.errors import EXIT_OK
from trainkit.formats import rank_list

if TYPE_CHECKING:
    from trainkit.job.failure.stacks import Reply


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
    from trainkit.control.rank_stacks import ask_stacks
    from trainkit.job.failure.stacks import explain_silence, group_replies
    from trainkit.run.registry import find_run

    run = find_run(run_name)
    attempt, replies, silent = ask_stacks(run, rank)
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
