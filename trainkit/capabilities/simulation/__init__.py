"""Simulates a step of one rank of a job of any size: `trainkit check --simulate-world`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Simulation:
    """The second step of one rank, as the simulation counts it."""

    rank: int
    world_size: int
    peak_bytes: dict[str, int]
    """By kind, and ``total``."""
    collectives: dict[str, int]
    """Kind -> how many."""
    num_params: int
    """On this rank."""
    seconds: float
    """Duration of the simulation."""
