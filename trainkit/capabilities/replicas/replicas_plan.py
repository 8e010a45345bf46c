"""Defines the part of the launch plan that describes the comparison of replicas."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.capability import Part

DIFFERS = "replica_differs"
"""Name of the event that reports a rank with different weights."""


@dataclass(frozen=True)
class ReplicasPlan(Part):
    """Part of the launch plan with the keys of the config section `replicas`."""

    CAPABILITY = "replicas"
    compare_every: int
    on_difference: str
