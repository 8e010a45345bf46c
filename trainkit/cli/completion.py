"""``trainkit completion``: the completion script of a shell."""

from __future__ import annotations

import click

from trainkit.cli.options import examples


@click.command(
    epilog=examples(
        'eval "$(trainkit completion bash)"',
        "trainkit completion zsh > ~/.trainkit.zsh",
        "trainkit completion fish > ~/.config/fish/completions/trainkit.fish",
    )
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script of SHELL, to be read by its start-up file."""
    from click.shell_completion import get_completion_class

    from trainkit.cli.main import cli

    completion = get_completion_class(shell)
    assert completion is not None
    click.echo(completion(cli, {}, "trainkit", "_TRAINKIT_COMPLETE").source())
