"""Defines the part of the plan for the tool of a launcher."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainkit.capability import Part

ACCELERATE_CONFIG = "accelerate.yaml"
DS_CONFIG = "ds_config.json"
MEGATRON_ARGS = "megatron_args.txt"


@dataclass(frozen=True)
class LauncherPlan(Part):
    """The input of a launcher's tool."""

    CAPABILITY = "launchers"
    files: dict[str, str] = field(default_factory=dict)
    """Maps the name of a file for the tool, in the run folder, to its text."""
    values: dict[str, str] = field(default_factory=dict)
    """Maps placeholders in the command, without their braces, to their values."""
    keys: tuple[str, ...] = ()
    """Keys that the user set and that may reach a launcher."""
