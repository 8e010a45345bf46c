"""Defines the part of the launch plan that contains the launcher's input."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainkit.capability import Part

ACCELERATE_CONFIG = "accelerate.yaml"
DS_CONFIG = "ds_config.json"
MEGATRON_ARGS = "megatron_args.txt"


@dataclass(frozen=True)
class LauncherPlan(Part):
    """The input for a launcher."""

    CAPABILITY = "launchers"
    files: dict[str, str] = field(default_factory=dict)
    """Maps the name of each file that the launcher reads in the run folder to its text."""
    values: dict[str, str] = field(default_factory=dict)
    """Maps each placeholder in the command, without its braces, to the value that replaces it."""
    keys: tuple[str, ...] = ()
    """Config keys that the user set and that can be passed on to a launcher."""
