"""Defines the part of the launch plan that describes how the checkpoints of a run are evaluated."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainkit.capability import Part

PREFIX = "eval/"
"""Prefix of the names of metrics that evaluations measure, so that they differ from the trainer's metrics."""


@dataclass(frozen=True)
class EvaluationsPlan(Part):
    """The values of the config section `on_checkpoint`."""

    CAPABILITY = "evaluations"
    command: str
    every: int = 1
    export: str | None = None
    metric: str | None = None
    """Name of the metric that selects the checkpoint to keep, without `PREFIX`; None keeps no checkpoint."""
    mode: str = "max"
    max_waiting: int = 4
    sbatch: dict[str, str | int | bool] | None = None
    """Options of the job that evaluates a checkpoint, by long name; None evaluates on this machine."""
    env: dict[str, str] = field(default_factory=dict)
    """Values of `launch.env`, which the command gets too."""
