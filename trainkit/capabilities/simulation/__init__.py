"""Simulates a training step of one rank in a job of any size, for `trainkit check --simulate-world`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Simulation:
    """Memory use and collectives of one rank in the second simulated step."""

    rank: int
    world_size: int
    peak_bytes: dict[str, int]
    """Maps a memory category, or ``total``, to its peak in bytes."""
    collectives: dict[str, int]
    """Maps a type of collective to the number of calls per step."""
    num_params: int
    """Number of parameters on the simulated rank."""
    seconds: float
    """Duration of the simulation in seconds."""
