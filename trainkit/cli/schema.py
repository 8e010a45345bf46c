"""`trainkit schema`: the JSON schema of the config."""

from __future__ import annotations

import json

import click

from trainkit.cli.help import Command, examples


@click.command(
    cls=Command,
    epilog=examples(
        "trainkit schema > trainkit.schema.json",
        "trainkit schema | head -n 20",
    ),
)
def command() -> None:
    """Print the JSON schema of the config, for editors that complete and check YAML.

    For editors with the YAML language server, start the config with the line
    "# yaml-language-server: $schema=trainkit.schema.json".
    """
    from trainkit.config import RunConfig

    click.echo(json.dumps(RunConfig.model_json_schema(), indent=2, ensure_ascii=False))
