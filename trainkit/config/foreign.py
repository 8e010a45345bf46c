"""Recognises a config file that was written for another program, so that one error names the program."""

from __future__ import annotations

from shlex import quote

from trainkit.config.schema import FREE_MAPPING, is_installed_section, sections
from trainkit.config.yamlfile import Entry
from trainkit.errors import Problem

SWEEPS = "`trainkit submit CONFIG --sweep KEY=VALUE,VALUE` runs a config with several values"
LIGHTNING = "`trainkit submit --launcher lightning -- main.py fit --config {file}` runs a LightningCLI"
_ACCELERATE = (
    "`trainkit submit --launcher accelerate -- train.py` writes this file for accelerate: trainkit's config"
    " has resources.nodes, resources.gpus_per_node, precision.dtype and parallel.dp_shard"
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
"""The maximum number of keys that an error names as its reason."""
_COMMANDS_OF_LIGHTNING = ("fit", "validate", "test", "predict")
"""LightningCLI writes the config of each command in a section with the name of the command."""

_OF_LIGHTNING = ("model", "data", "optimizer")
"""The sections of trainkit that a config of LightningCLI has too."""


def foreign_problem(file: Entry, shown: str) -> Problem | None:
    """Return the problem of a file that is the config of another program, or None for any other file.

    `shown` is the path of the file as the user typed it.
    """
    if not file.is_mapping or any(_is_own(key) for key in file.value if file.value[key].is_mapping):
        return None
    if "parameters" in file.value and (keys := _present(file, _OF_SWEEP)):
        return _problem(file, "a sweep file of W&B", ["parameters", *keys], _sweep_hint(file))
    if len(keys := _present(file, _OF_ACCELERATE)) > 1:
        return _problem(file, "a config of accelerate", keys, _ACCELERATE)
    if keys := _keys_of_lightning(file):
        return _problem(file, "a config of LightningCLI", keys, LIGHTNING.format(file=quote(shown)))
    return None


def _is_own(key: str) -> bool:
    """Return whether only a config of trainkit has a mapping with this key."""
    is_section = key in sections() and key not in _OF_LIGHTNING
    return is_section or key == FREE_MAPPING or is_installed_section(key)


def _present(file: Entry, keys: tuple[str, ...]) -> list[str]:
    return [key for key in keys if key in file.value]


def _keys_of_lightning(file: Entry) -> list[str]:
    """Return the keys that LightningCLI writes and trainkit does not know."""
    commands = [key for key in _present(file, _COMMANDS_OF_LIGHTNING) if file.value[key].is_mapping]
    trainer = file.find(("trainer",))
    # A section `trainer` with keys of `train` is a typing error in a config of trainkit.
    if trainer is not None and trainer.is_mapping and not set(trainer.value) <= set(sections()["train"]):
        commands.append("trainer")
    classes = [f"{key}.class_path" for key in file.value if file.find((key, "class_path")) is not None]
    return commands + classes


def _sweep_hint(file: Entry) -> str:
    """Return the command that replaces a sweep file; it runs the ``program`` of the file if there is one."""
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
    return Problem("", f"this is {kind}, not a config of trainkit: it contains {names}", origin, hint)
