"""``trainkit shell``: an interactive allocation with a job's environment."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from trainkit.cli.completion import complete_profile
from trainkit.cli.help import Command, examples
from trainkit.cli.options import (
    ConfigRequest,
    config_argument,
    set_option,
    shape_flags,
    shape_options,
    slurm_flags,
    slurm_options,
)
from trainkit.run.rundir import RUNS_FOLDER


@click.command(
    cls=Command,
    epilog=examples(
        "trainkit shell --nodes 2 --gpus-per-node 4",
        "trainkit shell quickstart --partition debug --time 00:30:00",
    ),
)
@config_argument
@click.option(
    "--profile", metavar="NAME", shell_complete=complete_profile, help="Profile applied over the config."
)
@set_option
@slurm_options
@shape_options
@click.option("--dry-run", is_flag=True, help="Print the command and the shell's startup file; run nothing.")
def command(
    config: str | None,
    profile: str | None,
    overrides: tuple[str, ...],
    nodes: int | None,
    gpus_per_node: int | None,
    dry_run: bool,
    **slurm: object,
) -> int:
    """Allocate nodes and open a shell on the first one, with the environment of a job.

    In that shell, `srun trainkit run CONFIG` trains on all allocated nodes.
    """
    from trainkit.control.shell import open_shell, shell_argv, shell_start_file

    flags = shape_flags(nodes, gpus_per_node) | slurm_flags(slurm)
    loaded = ConfigRequest(config or "shell", profile, overrides, flags).load()
    if loaded.config.launch.container is not None:
        click.echo("note: the shell runs outside launch.container", err=True)
    if not dry_run:
        open_shell(loaded, Path(RUNS_FOLDER))
    start_file = shell_start_file(loaded.config, Path.cwd())
    click.echo(shlex.join(shell_argv(loaded, "START_FILE")))
    click.echo(start_file, nl=False)
    return 0
