"""Implements ``trainkit schema``, which prints the JSON Schema of the config or of a command's output."""

from __future__ import annotations

import click

from trainkit.cli.help import as_command, option
from trainkit.cli.output import json_text


@as_command(
    "trainkit schema > trainkit.schema.json",
    "trainkit schema --output status",
    "trainkit schema --output ckpt-ls",
)
@option("--output NAME", "Print the JSON Schema of the --json output of the command NAME.")
def schema(output: str | None) -> None:
    """Print the JSON Schema of the config, for editors that complete and check YAML.

    To use the schema in an editor with the YAML language server, start the config with the line "#
    yaml-language-server: $schema=trainkit.schema.json".

    With --output, print the JSON Schema of the value that a command prints with --json. NAME is the command,
    with a dash for each space, or `error` for the value that a failed command prints. The schema's version
    increases if a key is removed or its meaning changes; new keys may be added in any version.
    """
    if output is not None:
        from trainkit.capabilities.programs.outputs import output_named

        name = output.replace(" ", "-")
        click.echo(json_text(output_named(name).schema(name), indent=2))
        return
    from trainkit.config import RunConfig

    click.echo(json_text(RunConfig.model_json_schema(), indent=2))
