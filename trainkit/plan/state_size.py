"""What a whole model keeps from step to step, and whether this machine can hold it. Pure."""

from __future__ import annotations

from trainkit.config.loaded import LoadedConfig
from trainkit.errors import Problem
from trainkit.plan.device_memory import gib
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.machine import Machine
from trainkit.plan.model_shape import ModelShape, num_params

FLOAT32 = 4
OPTIMIZER_BYTES = {"adamw": 8, "adamw_8bit": 2}
"""Of the state of one parameter."""


def state_bytes(shape: ModelShape, optimizer: str) -> int:
    """Bytes of a whole model's weights and gradients, both float32, and of its optimizer state."""
    return num_params(shape) * (2 * FLOAT32 + OPTIMIZER_BYTES[optimizer])


def host_problem(
    loaded: LoadedConfig, plan: LaunchPlan, shape: ModelShape, machine: Machine
) -> Problem | None:
    """What is wrong if all processes of this machine together keep more than it has memory.

    Only what is certain is refused, and it is, since a machine without memory takes other work down with it.
    """
    state = state_bytes(shape, loaded.config.optimizer.name) * plan.layout.dp_replicate
    if plan.slurm is not None or machine.memory is None or state <= machine.memory:
        return None
    what = f"is {loaded.config.model.preset}: weights, gradients and optimizer state take {gib(state)}"
    message = f"{what}, and this machine has {gib(machine.memory)}"
    return loaded.problem(
        "model.preset", message, "`trainkit plan --gpus N --gpu-type T` tells what would do"
    )
