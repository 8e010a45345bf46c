"""``trainkit completion``: the completion script of a shell, and the values that it completes."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from trainkit.cli.help import Command, examples

Items = list[CompletionItem]
MAX_RUNS = 200
"""Completion proposes the newest runs: a shell waits for it."""


@click.command(
    cls=Command,
    epilog=examples(
        'eval "$(trainkit completion bash)"',
        "trainkit completion zsh > ~/.trainkit.zsh",
        "trainkit completion fish > ~/.config/fish/completions/trainkit.fish",
    ),
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script of SHELL; source it from the shell's start-up file.

    It completes commands, options, CONFIG, RUN, --profile and the keys of --set.
    """
    from click.shell_completion import get_completion_class

    from trainkit.cli.main import cli

    completion = get_completion_class(shell)
    assert completion is not None
    click.echo(completion(cli, {}, "trainkit", "_TRAINKIT_COMPLETE").source())


def complete_run(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """RUN: `last`, the names and job ids of known runs, and folders."""
    from trainkit.run.record import read_job
    from trainkit.run.registry import iter_known_runs

    known = list(islice(iter_known_runs(), MAX_RUNS))
    found = {"last": "the newest run"} if known else {}
    for item in known:
        found.setdefault(item.run.name, str(item.run.path))
        found.setdefault(item.name, str(item.run.path))
        if item.is_group:
            job_ids = [item.group.job_id]
        else:
            job_ids = [entry.job_id for entry in read_job(item.run).attempts]
        found.update({str(job_id): str(item.run.path) for job_id in job_ids if job_id is not None})
    return [CompletionItem(incomplete, type="dir"), *_starting(found, incomplete)]


def complete_config(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """CONFIG: YAML files and folders here, and the names of shipped configs."""
    from trainkit.folders import shipped_config_names

    here = sorted(Path().glob(f"{incomplete}*")) if not Path(incomplete).is_absolute() else []
    found = {f"{path}/": "" for path in here if path.is_dir()}
    found |= {str(path): "" for path in here if path.suffix in (".yaml", ".yml")}
    found |= dict.fromkeys(shipped_config_names(), "shipped")
    return [CompletionItem(incomplete, type="file"), *_starting(found, incomplete)]


def complete_profile(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Profiles of the project and shipped ones."""
    from trainkit.folders import shipped_configs

    folders = (Path("profiles"), Path("configs/profiles"), shipped_configs() / "profiles")
    names = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
    return _starting(dict.fromkeys(names, ""), incomplete)


def complete_setting(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """The keys of ``--set KEY=VALUE``."""
    from trainkit.config.names import all_keys

    return _starting({f"{key}=": "" for key in all_keys()}, incomplete)


def _starting(found: dict[str, str], incomplete: str) -> Items:
    return [
        CompletionItem(value, help=text or None)
        for value, text in found.items()
        if value.startswith(incomplete)
    ]
