"""Defines the part of the plan that contains the input for a launcher's tool."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainkit.capability import Part

ACCELERATE_CONFIG = "accelerate.yaml"
DS_CONFIG = "ds_config.json"
MEGATRON_ARGS = "megatron_args.txt"


@dataclass(frozen=True)
class LauncherPlan(Part):
    """The input for a launcher's tool."""

    CAPABILITY = "launchers"
    files: dict[str, str] = field(default_factory=dict)
    """Maps the name of a file for the tool, in the run folder, to the file's text."""
    values: dict[str, str] = field(default_factory=dict)
    """Maps placeholders in the command, without their braces, to the values that replace them."""
    keys: tuple[str, ...] = ()
    """Keys that the user set and that can be passed on to a launcher."""
