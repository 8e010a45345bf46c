"""Recognizes config files of other programs, so that a single error names the program."""

from __future__ import annotations

from shlex import quote

from trainkit.config.schema import FREE_MAPPING, is_installed_section, sections
from trainkit.config.yamlfile import Entry
from trainkit.errors import Problem

SWEEPS = "`trainkit submit CONFIG --sweep KEY=VALUE,VALUE` runs a config with several values"
LIGHTNING = "`trainkit submit --launcher lightning -- main.py fit --config {file}` runs a LightningCLI"
_ACCELERATE = (
    "`trainkit submit --launcher accelerate -- train.py` runs a script with accelerate, and writes the "
    "accelerate config from the trainkit keys resources.nodes, resources.gpus_per_node, precision.dtype and "
    "parallel.dp_shard"
)
_OF_SWEEP = ("program", "method", "metric", "early_terminate", "run_cap", "command")
_OF_ACCELERATE = (
    "compute_environment",
    "distributed_type",
    "main_training_function",
    "machine_rank",
    "num_machines",
    "num_processes",
    "mixed_precision",
)
MAX_KEYS = 2
"""Maximum number of keys that the error message lists as evidence."""
_COMMANDS_OF_LIGHTNING = ("fit", "validate", "test", "predict")
"""LightningCLI subcommands; LightningCLI writes each subcommand's config into a section with its name."""

_OF_LIGHTNING = ("model", "data", "optimizer")
"""Sections that exist both in trainkit configs and in LightningCLI configs."""


def foreign_problem(file: Entry, shown: str) -> Problem | None:
    """Return a problem if the file is another program's config, otherwise None.

    `shown` is the path of the file as the user typed it.
    """
    if not file.is_mapping or any(_is_own(key) for key in file.value if file.value[key].is_mapping):
        return None
    if "parameters" in file.value and (keys := _present(file, _OF_SWEEP)):
        return _problem(file, "a W&B sweep file", ["parameters", *keys], _sweep_hint(file))
    if len(keys := _present(file, _OF_ACCELERATE)) > 1:
        return _problem(file, "an accelerate config", keys, _ACCELERATE)
    if keys := _keys_of_lightning(file):
        return _problem(file, "a LightningCLI config", keys, LIGHTNING.format(file=quote(shown)))
    return None


def _is_own(key: str) -> bool:
    """Return whether a mapping under this key can occur only in a trainkit config."""
    is_section = key in sections() and key not in _OF_LIGHTNING
    return is_section or key == FREE_MAPPING or is_installed_section(key)


def _present(file: Entry, keys: tuple[str, ...]) -> list[str]:
    return [key for key in keys if key in file.value]


def _keys_of_lightning(file: Entry) -> list[str]:
    """Return the keys that indicate that the file is a LightningCLI config."""
    commands = [key for key in _present(file, _COMMANDS_OF_LIGHTNING) if file.value[key].is_mapping]
    trainer = file.find(("trainer",))
    # A `trainer` section whose keys are all valid in `train` is a misspelt `train` section of a trainkit
    # config.
    if trainer is not None and trainer.is_mapping and not set(trainer.value) <= set(sections()["train"]):
        commands.append("trainer")
    classes = [f"{key}.class_path" for key in file.value if file.find((key, "class_path")) is not None]
    return commands + classes


def _sweep_hint(file: Entry) -> str:
    """Return the command to use instead of a sweep file; the command runs the file's ``program``, if any."""
    program, parameters = file.find(("program",)), file.value["parameters"]
    if program is None or not parameters.is_mapping or not parameters.value:
        return SWEEPS
    name = next(iter(parameters.value))
    command = f"python {quote(str(program.value))} --{name} {{{name}}}"
    return f"`trainkit submit --sweep {name}=VALUE,VALUE -- {command}` runs a program with several values"


def _problem(file: Entry, kind: str, keys: list[str], hint: str) -> Problem:
    found = file.find(tuple(keys[0].split(".")))
    origin = file.origin if found is None else found.origin
    names = " and ".join(keys[:MAX_KEYS])
    return Problem("", f"this is {kind}, not a trainkit config: it contains {names}", origin, hint)
