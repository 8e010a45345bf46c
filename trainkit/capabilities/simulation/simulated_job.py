"""Plans a job of any size, and simulates a training step of one of its ranks in a separate process."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TypedDict

from trainkit.capabilities.simulation import Simulation
from trainkit.cli.plan_json import PlanJson
from trainkit.cluster.machine import Machine
from trainkit.cluster.target import Target
from trainkit.config import LoadedConfig, dump_effective
from trainkit.config.optimizers import is_own
from trainkit.data.checks import inspect_data
from trainkit.errors import ConfigError, Problem, UsageError
from trainkit.formats import plural, size
from trainkit.job.processes import module_argv
from trainkit.launch.trainer_process import output_of
from trainkit.plan.facts import Facts
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.make_plan import make_plan
from trainkit.run.files import write_atomic

GPUS_PER_NODE = 8
"""Number of GPUs per node in a simulated job if the config does not set it."""


def simulated_plan(loaded: LoadedConfig, world_size: int) -> LaunchPlan:
    """Plan a run on `world_size` GPUs; raise ConfigError with all problems found in the config."""
    loaded.require_decoder(
        ("which cannot be simulated", "--simulate-world requires the task causal_lm"),
        ("whose models cannot be simulated", "--simulate-world requires trainkit's own decoder"),
        or_own=True,
    )
    if is_own(name := loaded.config.optimizer.name):
        message, hint = f"is {name}, whose update cannot be simulated", "use one of trainkit's optimizers"
        raise ConfigError([loaded.problem("optimizer.name", message, hint)])
    requested = loaded.config.resources.gpus_per_node
    per_node = min(world_size, GPUS_PER_NODE if requested == "auto" else requested)
    if world_size % per_node:
        message = f"is {world_size}, which is not a multiple of {per_node} GPUs per node"
        raise ConfigError([Problem("--simulate-world", message, hint="set --gpus-per-node N")])
    target = Target("local", "simulated", node_sizes=(per_node,) * (world_size // per_node))
    machine = Machine(1, per_node, (), f"{per_node} simulated GPUs per node")
    return make_plan(loaded, Facts(machine, target, inspect_data(loaded.config.data)))


class SimulatedJson(TypedDict):
    """The plan for a simulated number of GPUs, and the result of the simulation."""

    plan: PlanJson
    simulation: Simulation


def simulate(loaded: LoadedConfig, plan: LaunchPlan, rank: int) -> Simulation:
    """Simulate a training step of one rank.

    Raises UsageError if the rank does not exist, and TrainkitError if the simulation fails.
    """
    if rank >= plan.world_size:
        raise UsageError(
            f"--rank {rank} does not exist: the run has {plural(plan.world_size, 'rank')}",
            hint="ranks are counted from 0",
        )
    config = loaded.config
    with tempfile.TemporaryDirectory(prefix="trainkit-simulate-") as name:
        folder = Path(name)
        # Disable compilation and float8, because they require a GPU or real tensor values. Disabling
        # compilation and float8 does not reduce the peak memory.
        parallel = config.parallel.model_copy(update={"compile": False})
        precision = config.precision.model_copy(update={"float8": False})
        simulated = config.model_copy(update={"parallel": parallel, "precision": precision})
        write_atomic(folder / "config.yaml", dump_effective(simulated))
        write_atomic(folder / "plan.json", plan.to_text())
        files = [str(folder / "config.yaml"), str(folder / "plan.json")]
        argv = module_argv("trainkit.capabilities.simulation.worker", *files, str(rank))
        text = output_of(f"the simulation of rank {rank} of {plan.world_size}", argv)
    return Simulation(**json.loads(text.splitlines()[-1]))


def simulation_lines(found: Simulation) -> list[str]:
    """Format the result of a simulation as lines of text for the terminal."""
    peak = dict(found.peak_bytes)
    total = peak.pop("total")
    kinds = ", ".join(f"{name} {size(amount)}" for name, amount in peak.items() if amount)
    collectives = ", ".join(f"{count} {kind}" for kind, count in found.collectives.items())
    return [
        f"rank {found.rank} of {found.world_size}: {found.num_params:,} parameters on this rank",
        f"peak memory {size(total)} ({kinds})",
        f"collectives per step: {collectives or 'none'}",
    ]
