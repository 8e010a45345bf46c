"""The scenarios of a drill, where each can be tried, and the choice of its target."""

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
    description: str
    graceful: bool = False
    """Whether the run gets a signal in time to save: then no step may be computed twice."""
    cause: str | None = None
    """The entry of `requeue.on` that makes it restart; None if it restarts whatever the config says."""
    by_hand: bool = False
    """Whether the drill resumes the run, because nothing else is left that could."""
    needs_slurm: bool = False
    needs_checkpoints: bool = False
    """Whether the drill must know where and how the trainer saves."""
    never: str = ""
    """Why it can never be tried; empty if it can. Such a scenario is only listed."""


SCENARIOS = (
    Scenario("signal", "SIGUSR2: save and requeue", graceful=True),
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
    Scenario("requeue", "scontrol requeue from outside", graceful=True, needs_slurm=True),
    Scenario(
        "preempt",
        "preempted by another job",
        never="needs a job that may preempt yours; `signal` and `requeue` send the same signals",
    ),
    Scenario(
        "time-limit",
        "time limit reached",
        never="Slurm's shortest limit, one minute, is longer than a drill; `signal` sends the same signal",
    ),
)
NAMES = tuple(scenario.name for scenario in SCENARIOS)


def skip_reason(scenario: Scenario, config: RunConfig, plan: LaunchPlan) -> str:
    """Why a scenario cannot be tried here with this config; empty if it can."""
    if scenario.never:
        return scenario.never
    if scenario.needs_slurm and plan.backend == "local":
        return "this run would start on this machine, without Slurm"
    if scenario.needs_checkpoints and not plan.workload.knows_run:
        return "a drill does not know where and how a COMMAND saves"
    if scenario.name == "damaged-checkpoint" and config.checkpoint.keep_last < 2:
        return "checkpoint.keep_last is 1: there is no checkpoint to fall back to"
    return ""


def select(names: Sequence[str]) -> tuple[Scenario, ...]:
    """The scenarios with these names, in the order of SCENARIOS; without names, all."""
    return tuple(scenario for scenario in SCENARIOS if not names or scenario.name in names)


@dataclass(frozen=True)
class Target:
    """When a scenario interrupts, and which rank or node it hits."""

    step: int | None
    """Interrupt after this step; None if the trainer does not record its steps."""
    share: float
    """Interrupt after this fraction of the uninterrupted run's duration, if `step` is None."""
    rank: int
    node_rank: int
    rng: random.Random
    """The generator for any further random choice."""


def choose_target(
    scenario: Scenario,
    seed: int,
    num_steps: int | None,
    interval: int | None,
    world_size: int,
    num_nodes: int,
) -> Target:
    """Choose the target of one scenario at random.

    It is not in the first steps, where nothing is saved yet, nor in the last third, because an interruption
    takes time to arrive. `interval` is the number of steps between two saves, None if unknown.
    """
    rng = random.Random(f"{seed} {scenario.name}")
    step = None
    if num_steps is not None:
        saves_before = 2 if scenario.needs_checkpoints else 1
        first = 1 + (num_steps // 6 if interval is None else saves_before * interval)
        step = rng.randint(first, max(first, num_steps * 2 // 3))
        if scenario.name == "mid-save" and interval is not None:
            step -= step % interval  # the save that is written then
    return Target(
        step=step,
        share=rng.uniform(0.3, 0.6),
        rank=rng.randrange(world_size),
        node_rank=rng.randrange(num_nodes),
        rng=rng,
    )
