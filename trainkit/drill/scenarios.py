"""The ways in which a drill interrupts a run, and which of them can be tried where."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from trainkit.config import RunConfig
from trainkit.plan.launch import LaunchPlan


@dataclass(frozen=True)
class Scenario:
    """One way to interrupt a run."""

    name: str
    does: str
    """What is done, in a few words."""
    graceful: bool = False
    """Whether the run is told in time: then no step may be computed twice."""
    cause: str | None = None
    """The word of `requeue.on` that has it come back; None when it comes back whatever the config says."""
    by_hand: bool = False
    """Whether the drill itself starts the run again: nothing of it is left to do that."""
    needs_slurm: bool = False
    needs_checkpoints: bool = False
    """Whether the drill must know where and how the trainer saves."""
    never: str = ""
    """Why it can be tried nowhere, for one that is listed all the same."""


SCENARIOS = (
    Scenario("signal", "a notice in time: save, and come back", graceful=True),
    Scenario("rank", "SIGKILL of one rank", cause="crash"),
    Scenario("node", "SIGKILL of everything on one node", cause="crash"),
    Scenario(
        "mid-save", "SIGKILL of all ranks while a save is written", cause="crash", needs_checkpoints=True
    ),
    Scenario(
        "damaged-checkpoint",
        "the whole job killed, bytes of its newest checkpoint flipped",
        by_hand=True,
        needs_checkpoints=True,
    ),
    Scenario("requeue", "scontrol requeue by somebody else", graceful=True, needs_slurm=True),
    Scenario(
        "preempt",
        "preempted by another job",
        never="it takes a job that may preempt yours; its notice is that of `signal` and `requeue`",
    ),
    Scenario(
        "time-limit",
        "out of time",
        never="Slurm's shortest limit, a minute, is longer than a drill; its notice is that of `signal`",
    ),
)
NAMES = tuple(scenario.name for scenario in SCENARIOS)


def why_not(scenario: Scenario, config: RunConfig, plan: LaunchPlan) -> str:
    """Why a scenario cannot be tried with this config here; empty when it can."""
    if scenario.never:
        return scenario.never
    if scenario.needs_slurm and plan.backend == "local":
        return "this run would start on this machine, without Slurm"
    if scenario.needs_checkpoints and plan.command is not None:
        return "where and how a COMMAND saves is its own business"
    if scenario.name == "damaged-checkpoint" and config.checkpoint.keep_last < 2:
        return "checkpoint.keep_last is 1: there is no checkpoint to fall back to"
    return ""


def chosen(names: Sequence[str]) -> tuple[Scenario, ...]:
    """The scenarios of these names, in the order of the table; all when no name is given."""
    return tuple(scenario for scenario in SCENARIOS if not names or scenario.name in names)


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
