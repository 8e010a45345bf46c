"""``trainkit attach``: a shell on a node of a running job."""

from __future__ import annotations

import os
import sys

import click

from trainkit.cli.help import Command, examples
from trainkit.cli.options import run_argument
from trainkit.errors import UsageError


@click.command(cls=Command, epilog=examples("trainkit attach last", "trainkit attach last --node 1"))
@run_argument
@click.option(
    "--node", type=click.IntRange(min=0), metavar="N", help="Node of the job, counted from 0; default: 0."
)
def command(run_name: str, node: int | None) -> int:
    """Open a shell on a node of RUN's job, next to its processes."""
    from trainkit.backends import backend_of
    from trainkit.control.run_registry import find_run
    from trainkit.run.record import AttemptRecord, read_job
    from trainkit.slurm.environment import scrubbed
    from trainkit.slurm.hosts import expand_hosts
    from trainkit.submit.interactive import attach_argv

    run = find_run(run_name)
    entry = read_job(run).newest or AttemptRecord()
    job = backend_of(entry).running_job(run, entry)
    hosts = expand_hosts(job.nodes)
    if node is not None and node >= len(hosts):
        raise UsageError(f"the job has no node {node}", hint=f"its nodes are 0 to {len(hosts) - 1}")
    if not sys.stdin.isatty():
        raise UsageError("a shell needs a terminal", hint="`trainkit logs` shows the output of the run")
    argv = attach_argv(job.number or job.job_id, hosts[node or 0])
    os.execvpe(argv[0], argv, scrubbed(os.environ))
