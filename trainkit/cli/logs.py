"""``trainkit logs``: the output of a run."""

from __future__ import annotations

from collections import deque
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import click

from trainkit.cli.help import Command, examples
from trainkit.cli.options import run_argument
from trainkit.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainkit.run.rundir import AttemptDir


MAX_LINE_BYTES = 2**20
"""A longer line is printed as several."""


@click.command(
    cls=Command,
    epilog=examples("trainkit logs last", "trainkit logs last -f", "trainkit logs last --rank 1 --lines 20"),
)
@run_argument
@click.option(
    "-f", "--follow", "following", is_flag=True, help="Follow the log, across attempts, until the run ends."
)
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="Rank to print; default: 0.")
@click.option(
    "--node", type=click.IntRange(min=0), metavar="N", help="Print all ranks of this node and its agent."
)
@click.option("--all", "all_ranks", is_flag=True, help="Print all ranks, agents and the supervisor.")
@click.option(
    "--attempt",
    "number",
    type=click.IntRange(min=1),
    metavar="A",
    help="Attempt to print; default: the newest.",
)
@click.option("--lines", type=click.IntRange(min=0), metavar="N", help="Print only the last N lines.")
def command(
    run_name: str,
    following: bool,
    rank: int | None,
    node: int | None,
    all_ranks: bool,
    number: int | None,
    lines: int | None,
) -> int:
    """Print the log of rank 0 of RUN, or the logs of the selected ranks.

    Without one, because the job ended before its supervisor began, it is the output of the batch script.
    """
    from trainkit.backends.jobs import liveness_probe
    from trainkit.job.failed_starts import batch_log
    from trainkit.observe.logs import follow, start_of_last
    from trainkit.run.end import AttemptEnd, read_end
    from trainkit.run.record import read_job
    from trainkit.run.registry import find_attempt, find_run

    if sum((rank is not None, node is not None, all_ranks)) > 1:
        raise UsageError("--rank, --node and --all are mutually exclusive", hint="give only one of them")
    run = find_run(run_name)
    attempt = find_attempt(run, number)
    logs_of = _choice(rank, node, all_ranks)
    named = node is not None or all_ranks
    if following:
        for source, text in follow(run, attempt.number, logs_of, liveness_probe(run), lines):
            click.echo(f"{source} | {text}" if named else text)
    job = read_job(run)
    entry = job.of_attempt(attempt.number)
    if following and entry.has_started:
        return EXIT_OK
    paths = [path for path in logs_of(attempt) if path.exists()]
    if not paths and not entry.has_started and (log := batch_log(run, job, entry.job_id)).exists():
        click.echo("the supervisor has not begun; this is the output of the batch script:", err=True)
        paths = [log]
    if not paths:
        raise UsageError(
            f"attempt {attempt.number} of {run.path} has not written this log",
            hint=f"`trainkit status {quote(str(run.path))}` shows its progress; "
            f"its logs are in {attempt.logs_dir}",
        )
    for path in paths:
        with path.open("rb") as stream:
            stream.seek(0 if lines is None else start_of_last(path, lines))
            found = iter(partial(stream.readline, MAX_LINE_BYTES), b"")
            for raw in found if lines is None else deque(found, lines):
                text = raw.removesuffix(b"\n").decode(errors="replace")
                click.echo(f"{path.stem} | {text}" if named else text)
    if (read_end(attempt) or AttemptEnd()).state == "failed":
        which = f"{quote(str(run.path))} --attempt {attempt.number}"
        click.echo(f"hint: `trainkit diagnose {which}` names the cause of its failure", err=True)
    return EXIT_OK


def _choice(rank: int | None, node: int | None, all_ranks: bool) -> Callable[[AttemptDir], list[Path]]:
    """A function that lists the selected logs of an attempt."""
    from trainkit.observe.attempt_files import log_of, ranks_of_nodes
    from trainkit.run.history import read_plan

    def logs_of(attempt: AttemptDir) -> list[Path]:
        if all_ranks:
            return sorted(attempt.logs_dir.glob("*.log"))
        if node is not None:
            nodes = ranks_of_nodes(read_plan(attempt))
            if not nodes:
                return [attempt.node_log(node)]  # without a plan nothing is known of its ranks
            if node >= len(nodes):
                raise UsageError(f"the run has no node {node}", hint=f"its nodes are 0 to {len(nodes) - 1}")
            return [attempt.node_log(node), *map(attempt.rank_log, nodes[node])]
        return [log_of(attempt, read_plan(attempt), rank or 0)]

    return logs_of
