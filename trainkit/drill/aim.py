"""Where and whom a drill strikes: chosen before the run, so that the same seed chooses the same."""

from __future__ import annotations

import random

from trainkit.drill.scenarios import Scenario
from trainkit.frozen import dataclass


@dataclass(frozen=True)
class Aim:
    """The moment and the victim."""

    step: int | None
    """After this step; None where the trainer does not say which step it is at."""
    share: float
    """After this share of the time that the uninterrupted run took, where there are no steps to go by."""
    rank: int
    node_rank: int
    chance: random.Random
    """For what else has to be chosen."""


def take_aim(
    scenario: Scenario,
    seed: int,
    num_steps: int | None,
    interval: int | None,
    world_size: int,
    num_nodes: int,
) -> Aim:
    """The aim for one scenario.

    Not in the first steps, when there is nothing to lose, and not in the last third, since a strike takes its
    time to arrive. `interval` is the number of steps between two saves where the drill has set it.
    """
    chance = random.Random(f"{seed} {scenario.name}")
    step = None
    if num_steps is not None:
        saves_before = 2 if scenario.needs_checkpoints else 1
        first = 1 + (num_steps // 6 if interval is None else saves_before * interval)
        step = chance.randint(first, max(first, num_steps * 2 // 3))
        if scenario.name == "mid-save" and interval is not None:
            step -= step % interval  # the save that is written then
    return Aim(
        step=step,
        share=chance.uniform(0.3, 0.6),
        rank=chance.randrange(world_size),
        node_rank=chance.randrange(num_nodes),
        chance=chance,
    )
