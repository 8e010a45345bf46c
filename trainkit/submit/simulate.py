"""A rank of a job of any size, tried on this machine without the job's memory and its other ranks."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.errors import ConfigError, Problem, TrainkitError, UsageError
from trainkit.job.processes import module_argv

if TYPE_CHECKING:
    from trainkit.config import LoadedConfig, RunConfig
    from trainkit.plan.launch import LaunchPlan

GPUS_PER_NODE = 8
"""What a node of a simulated job has where the config does not say."""


def simulated_plan(loaded: LoadedConfig, world_size: int) -> LaunchPlan:
    """What would run on `world_size` GPUs; ConfigError lists everything that is wrong."""
    from trainkit.cluster.machine import Machine
    from trainkit.cluster.model import Target
    from trainkit.plan.make_plan import check_config

    asked = loaded.config.resources.gpus_per_node
    per_node = min(world_size, GPUS_PER_NODE if asked == "auto" else asked)
    if world_size % per_node:
        message = f"is {world_size}, which is not a multiple of {per_node} GPUs a node"
        raise ConfigError([Problem("--simulate-world", message, hint="--gpus-per-node N changes that")])
    target = Target("local", "simulated", node_sizes=(per_node,) * (world_size // per_node))
    machine = Machine(1, per_node, (), f"{per_node} simulated GPUs a node")
    return check_config(loaded, machine, target)


def simulate(loaded: LoadedConfig, plan: LaunchPlan, rank: int) -> dict[str, Any]:
    """What a rank holds at its peak, in bytes, and how often it talks in a step.

    Raises TrainkitError when its program fails.
    """
    from trainkit.config import dump_effective

    if rank >= plan.world_size:
        raise UsageError(
            f"--rank is {rank}, but there are {plan.world_size} ranks", hint="ranks are counted from 0"
        )
    with tempfile.TemporaryDirectory(prefix="trainkit-simulate-") as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(dump_effective(_without_kernels(loaded.config)))
        (folder / "plan.json").write_text(plan.to_text())
        files = [str(folder / "config.yaml"), str(folder / "plan.json")]
        done = subprocess.run(
            module_argv("trainkit.trainer.simulate", *files, str(rank)),
            capture_output=True,
            text=True,
        )
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise TrainkitError(
            f"the program of rank {rank} of {plan.world_size} fails: {' '.join(last) or 'it was killed'}",
            hint="`trainkit --debug check …` shows all that it said",
        ) from RuntimeError(done.stderr)
    value: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return value


def _without_kernels(config: RunConfig) -> RunConfig:
    """Without what needs real values or a GPU: compiled and float8 layers hold and send no more."""
    parallel = config.parallel.model_copy(update={"compile": False})
    precision = config.precision.model_copy(update={"float8": False})
    return config.model_copy(update={"parallel": parallel, "precision": precision})


def simulation_lines(found: dict[str, Any]) -> list[str]:
    """What was found, for a person."""
    peak = dict(found["peak_bytes"])
    total = peak.pop("total")
    kinds = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in peak.items() if size)
    talks = ", ".join(f"{count} {kind}" for kind, count in found["collectives"].items())
    return [
        f"rank {found['rank']} of {found['world_size']}: {found['num_params']:,} parameters of its own",
        f"peak memory {total / 2**30:.2f} GiB ({kinds})",
        f"collectives a step: {talks or 'none'}",
    ]
