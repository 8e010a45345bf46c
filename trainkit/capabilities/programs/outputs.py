"""Lists the commands that print JSON, and the JSON Schema of each output."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import NamedTuple, cast

import click

from trainkit.capabilities.programs.json_schema import DIALECT, Schema, schema_of
from trainkit.cli.main import cli
from trainkit.cli.options import OutputOption
from trainkit.errors import UsageError
from trainkit.formats import did_you_mean
from trainkit.shipped import SHIPPED

ERROR = "error"
"""The name of the output that a command prints instead of its result if the command fails."""
STATUS = ("RunStatus", "RunJson", "RunView")
"""The records that contain the status of a run."""


class Output(NamedTuple):
    """The JSON output of a command."""

    title: str
    places: tuple[str, ...]
    """The types of the printed value, as MODULE:NAME."""
    version: int

    def schema(self, name: str) -> Schema:
        """Return the JSON Schema of the output."""
        schema = schema_of(*(_imported(place) for place in self.places))
        for record, own in cast("dict[str, Schema]", schema.get("$defs", {})).items():
            cast("Schema", own["properties"]).update(_added_to(record))
        about: Schema = {"$schema": DIALECT, "$id": f"urn:trainkit:{name}:{self.version}"}
        return about | {"title": self.title, "version": self.version} | schema


def outputs() -> dict[str, Output]:
    """Map the name of each output, such as ``status`` or ``ckpt-ls``, to the output."""
    return {ERROR: Output("an error", ("trainkit.errors:ErrorJson",), 1), **dict(_outputs_of(cli, ()))}


def output_named(name: str) -> Output:
    """Return an output; raise UsageError if there is no output of that name."""
    found = outputs()
    if name not in found:
        hint = f"{did_you_mean(name, found)}the outputs are: {', '.join(found)}"
        raise UsageError(f"--output {name}: no command has a JSON output of that name", hint=hint)
    return found[name]


def _outputs_of(group: click.Group, words: tuple[str, ...]) -> Iterator[tuple[str, Output]]:
    context = click.Context(group)
    for word in group.list_commands(context):
        command = group.get_command(context, word)
        if isinstance(command, click.Group):
            yield from _outputs_of(command, (*words, word))
            continue
        options = [item for item in (command.params if command else ()) if isinstance(item, OutputOption)]
        if options:
            title = f"trainkit {' '.join((*words, word))} --json"
            places = tuple(item.output for item in options)
            yield "-".join((*words, word)), Output(title, places, max(item.version for item in options))


def _added_to(record: str) -> Iterator[tuple[str, Schema]]:
    """Yield the keys that built-in capabilities add to a core record."""
    for name, shipped in SHIPPED.items():
        added = {
            **dict.fromkeys(STATUS, shipped.shown.get("status", {})),
            "ReportJson": shipped.shown.get("report", {}),
            "PlanJson": shipped.keys,
            "RequeuePolicy": shipped.within,
        }
        for key in added.get(record, ()):
            yield key, {"description": f"A value of the capability `{name}`."}


def _imported(place: str) -> object:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
