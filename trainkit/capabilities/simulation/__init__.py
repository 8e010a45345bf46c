"""Simulates a step of one rank in a job of any size, for `trainkit check --simulate-world`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Simulation:
    """The memory and collectives of one rank in the second simulated step."""

    rank: int
    world_size: int
    peak_bytes: dict[str, int]
    """Maps a kind of memory, or ``total``, to its peak."""
    collectives: dict[str, int]
    """Maps a kind of collective to the number of calls."""
    num_params: int
    """The number of parameters on the simulated rank."""
    seconds: float
    """The duration of the simulation in seconds."""
