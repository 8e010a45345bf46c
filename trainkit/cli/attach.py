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
    "--node", type=click.IntRange(min=0), metavar="N", help="This node of the job; default: the first."
)
def command(run_name: str, node: int | None) -> int:
    """Open a shell on a node of the job of RUN, next to its processes."""
    from trainkit.control.jobs import slurm_job
    from trainkit.control.run_registry import find_run
    from trainkit.job.record import is_slurm, newest_entry
    from trainkit.slurm.client import scrubbed
    from trainkit.slurm.hosts import expand_hosts
    from trainkit.slurm.states import JobState
    from trainkit.submit.interactive import attach_argv

    run = find_run(run_name)
    entry = newest_entry(run)
    if entry is None or not is_slurm(entry):
        raise UsageError(f"{run.path} runs on this machine and not on Slurm", hint="you are there already")
    job = slurm_job(entry)
    if job is None or job.state is not JobState.RUNNING:
        what = "is not known to Slurm any more" if job is None else f"is {job.state.value}"
        raise UsageError(f"{entry['job_id']} {what}", hint="`trainkit status` tells more")
    hosts = expand_hosts(job.nodes)
    if node is not None and node >= len(hosts):
        raise UsageError(f"the job has no node {node}", hint=f"its nodes are 0 to {len(hosts) - 1}")
    if not sys.stdin.isatty():
        raise UsageError("there is no terminal for a shell", hint="`trainkit logs` shows what the run prints")
    argv = attach_argv(job.number or job.job_id, hosts[node or 0])
    os.execvpe(argv[0], argv, scrubbed(os.environ))
