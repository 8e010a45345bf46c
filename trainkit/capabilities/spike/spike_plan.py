"""Defines the part of the launch plan that describes the rule for loss spikes."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.capability import Part

SPIKE = "loss_spike"
"""Name of the event that reports the first step of a loss spike."""


@dataclass(frozen=True)
class SpikePlan(Part):
    """Part of the launch plan with the values of the config key `train.spike`."""

    CAPABILITY = "spike"
    factor: float
    window_steps: int
    patience_steps: int
    max_rollbacks: int
