"""The part of the plan that says what the tool of a launcher gets."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainkit.capability import Part

ACCELERATE_CONFIG = "accelerate.yaml"
DS_CONFIG = "ds_config.json"
MEGATRON_ARGS = "megatron_args.txt"


@dataclass(frozen=True)
class LauncherPlan(Part):
    """What the tool of a launcher gets."""

    CAPABILITY = "launchers"
    files: dict[str, str] = field(default_factory=dict)
    """Files for the tool, in the run folder: name -> text."""
    values: dict[str, str] = field(default_factory=dict)
    """Placeholders in the command, without their braces, and their values."""
    keys: tuple[str, ...] = ()
    """The keys that the user had set, of those that may reach a launcher."""
