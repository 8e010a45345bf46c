"""Implements ``trainkit shell`` and ``trainkit attach``, which open shells on the nodes of an allocation."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, NoReturn

import click

from trainkit.cli import options
from trainkit.cli.help import as_command, option
from trainkit.launch.config_request import ConfigRequest
from trainkit.run.registry import find_run
from trainkit.run.rundir import RUNS_FOLDER


@as_command("trainkit attach last", "trainkit attach last --node 1")
@options.run_argument
@option(
    "--node N", "Index of the node in the job, counted from 0; default: 0.", type=options.INDEX, default=0
)
def attach(run_name: str, node: int) -> NoReturn:
    """Open a shell on a node of RUN's job, alongside the job's processes."""
    from trainkit.capabilities.shell import shell

    shell.attach(find_run(run_name, acts=True), node)


@as_command(
    "trainkit shell --nodes 2 --gpus-per-node 4",
    "trainkit shell quickstart --partition debug --time 00:30:00",
)
@options.config_argument
@options.profile_option
@options.set_option
@options.slurm_options
@options.shape_options
@option("--dry-run", "Print the command and the shell's startup file without running anything.")
def shell(
    config: str | None, profile: str | None, overrides: tuple[str, ...], dry_run: bool, **typed: Any
) -> None:
    """Allocate nodes and open a shell on the first one, with the same environment as in a job.

    In the shell, `srun trainkit run CONFIG` trains on all allocated nodes.
    """
    from trainkit.capabilities.shell.shell import open_shell, shell_argv, shell_start_file

    flags = options.config_flags(typed)
    loaded = ConfigRequest(config or "shell", profile, overrides, flags).load()
    if loaded.config.launch.container is not None:
        click.echo("note: the shell runs outside the container of launch.container", err=True)
    if not dry_run:
        open_shell(loaded, Path(RUNS_FOLDER))
    start_file = shell_start_file(loaded.config, Path.cwd())
    click.echo(shlex.join(shell_argv(loaded, "START_FILE")))
    click.echo(start_file, nl=False)
