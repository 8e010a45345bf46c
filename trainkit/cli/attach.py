"""``trainkit attach``: a shell on a node of a running job."""

from __future__ import annotations

from typing import NoReturn

import click

from trainkit.cli.help import Command, examples
from trainkit.cli.options import run_argument


@click.command(cls=Command, epilog=examples("trainkit attach last", "trainkit attach last --node 1"))
@run_argument
@click.option(
    "--node", type=click.IntRange(min=0), metavar="N", help="Node of the job, counted from 0; default: 0."
)
def command(run_name: str, node: int | None) -> NoReturn:
    """Open a shell on a node of RUN's job, next to its processes."""
    from trainkit.control.shell import attach
    from trainkit.run.registry import find_run

    attach(find_run(run_name), node or 0)
