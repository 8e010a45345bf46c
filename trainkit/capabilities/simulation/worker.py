"""Simulates one rank in a job of any size, without allocating the rank's memory or starting the other ranks.

``python -m trainkit.capabilities.simulation.worker CONFIG PLAN RANK`` prints the rank's peak memory and its
collectives per step as JSON. Tensors have shapes but no data, and collectives return immediately.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainkit.capabilities.simulation import Simulation
from trainkit.config import read_effective
from trainkit.config.schema import RunConfig
from trainkit.plan.launch import LaunchPlan
from trainkit.trainer.build import BuiltModel, assemble, build_model_parts, build_task
from trainkit.trainer.causal_lm import CausalLM, Microbatch
from trainkit.trainer.distributed import World, build_expert_mesh, build_mesh, context_group
from trainkit.trainer.hooks import TrainerHooks, trained_model
from trainkit.trainer.models.model import local_tensor
from trainkit.trainer.optimizers import make_optimizer
from trainkit.trainer.optimizers.interface import ShardedOptimizer
from trainkit.trainer.parallel.pipeline import PipelineForwardBackward
from trainkit.trainer.precision import DTYPES
from trainkit.trainer.progress import Progress
from trainkit.trainer.torch_private import (
    DispatchMode,
    FakeTensors,
    collective_kind,
    join_fake_world,
    memory_tracker,
    shapes_untracked,
)


class _CountCollectives(DispatchMode):  # type: ignore[no-untyped-call]
    """Counts the calls of each type of collective."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kind = collective_kind(func)
        if kind is not None:
            self.counts[kind] += 1
        return func(*args, **(kwargs or {}))


HOST = torch.device("cpu")


@contextmanager
def simulated_world(
    plan: LaunchPlan, rank: int, *, device: torch.device = HOST, mesh_of_one: bool = False
) -> Iterator[World]:
    """Create the `World` of one rank with torch's ``fake`` backend, which needs no other ranks."""
    join_fake_world(rank, plan.world_size)
    try:
        mesh = build_mesh(device, plan.layout) if plan.world_size > 1 or mesh_of_one else None
        group, experts = context_group(plan.layout), build_expert_mesh(device, plan.layout)
        world = World(rank, plan.world_size, device, mesh, None, plan.layout, group, expert_mesh=experts)
        yield replace(world, is_simulated=True)
    finally:
        dist.destroy_process_group()


def simulate(config: RunConfig, plan: LaunchPlan, rank: int) -> Simulation:
    """Simulate two steps of a rank, and measure the second step."""
    began_s = time.monotonic()
    task = build_task(config)
    assert isinstance(task, CausalLM)
    with simulated_world(plan, rank, mesh_of_one=config.parallel.wraps_one) as world:
        model_parts = build_model_parts(task, plan, world)
        with FakeTensors(allow_non_fake_inputs=True), shapes_untracked():
            for model in model_parts:
                model.to_empty(device=world.device)
                model.rebuild_buffers()
            built = assemble(task, plan, world, Progress(), model_parts)
            optimizer = make_optimizer(built.weights, config.optimizer, world)
            step = training_step(config, plan, built, optimizer, zeros_microbatch(config, plan))
            tracker, collectives = memory_tracker(), _CountCollectives()
            masters = [weight.param for weight in built.weights if weight.cast is not None]
            lowers = [weight.lower for weight in built.weights if weight.lower is not None]
            added = TrainerHooks(plan, trained_model(built, world)).state_tensors()
            state = [tensor for _, tensor in (*optimizer.state_tensors(), *added)]
            tracker.track_external(*built.model_parts, *masters, *lowers, *state)
            with tracker:
                step()  # the first step allocates tensors that later steps reuse, such as pipeline buffers
            with tracker, collectives:
                step()
            peak = tracker.get_tracker_snapshot("peak")[world.device]
    return Simulation(
        rank,
        plan.world_size,
        {str(getattr(kind, "name", kind)).lower(): size for kind, size in peak.items()},
        dict(sorted(collectives.counts.items())),
        sum(local_tensor(weight.param).numel() for weight in built.weights),
        round(time.monotonic() - began_s, 2),
    )


def zeros_microbatch(config: RunConfig, plan: LaunchPlan) -> Microbatch:
    """Return a microbatch of zeros on the host."""
    shape = (plan.batch.device_batch_size, config.data.seq_len)
    tokens, labels = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
    return Microbatch(tokens, labels, torch.zeros(shape[0], dtype=torch.int32))


def training_step(
    config: RunConfig, plan: LaunchPlan, built: BuiltModel, optimizer: ShardedOptimizer, micro: Microbatch
) -> Callable[[], None]:
    """Return a function that runs a training step, omitting operations that need values of other ranks.

    `micro` is the microbatch of every pass.
    """
    micros = [micro] * plan.batch.accumulation_steps
    device = micro.tokens.device
    one, zero = torch.ones((), device=device), torch.zeros((), device=device)
    if isinstance(built.forward_backward, PipelineForwardBackward):
        built.forward_backward.set_shapes(DTYPES[config.precision.dtype])

    def step() -> None:
        built.forward_backward.accumulate_gradient(micros, one, lambda nll_sum: None)
        built.sum_tied_gradients()
        optimizer.collect_gradients()
        total = optimizer.square_sum()
        dist.all_reduce(total)
        optimizer.step(1e-3, one, zero)
        optimizer.zero_grad()
        built.update_scales()

    return step


def main() -> int:
    """Simulate the rank given as a command-line argument, and print the result as JSON."""
    config_file, plan_file, rank = sys.argv[1:4]
    config = read_effective(Path(config_file), executes=False)
    plan = LaunchPlan.read(Path(plan_file), executes=False)
    print(json.dumps(asdict(simulate(config, plan, int(rank)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
