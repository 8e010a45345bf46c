"""Defines the part of the launch plan that describes the average of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.capability import Part

SUFFIX = "_ema"
"""Suffix of the names of validation metrics that are computed with the average, such as ``val_loss_ema``."""
BYTES = 4
"""Bytes per parameter of the average, which is in float32."""


@dataclass(frozen=True)
class EmaPlan(Part):
    """Part of the launch plan with the keys of the config section `ema`."""

    CAPABILITY = "ema"
    decay: float
    every: int
