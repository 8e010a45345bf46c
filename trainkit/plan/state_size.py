"""What a whole model keeps from step to step, and whether a host can hold it or its copy. Pure."""

from __future__ import annotations

from trainkit.config.loaded import LoadedConfig
from trainkit.errors import Problem
from trainkit.plan.device_memory import gib
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.machine import Machine
from trainkit.plan.model_shape import ModelShape, num_params
from trainkit.plan.slurm_words import memory_mib

FLOAT32 = 4
OPTIMIZER_BYTES = {"adamw": 8, "adamw_8bit": 2}
"""Of the state of one parameter."""


def state_bytes(shape: ModelShape, optimizer: str) -> int:
    """Bytes of a whole model's weights and gradients, both float32, and of its optimizer state."""
    return num_params(shape) * (2 * FLOAT32 + OPTIMIZER_BYTES[optimizer])


def staged_bytes(shape: ModelShape, optimizer: str, plan: LaunchPlan) -> float:
    """Bytes of host memory on a node for the copies of which asynchronous saves are written."""
    layout = plan.layout
    ranks_of_a_model = layout.dp_shard * layout.cp * layout.tp * layout.pp
    whole = num_params(shape) * (FLOAT32 + OPTIMIZER_BYTES[optimizer])
    return whole * plan.workers_per_node / ranks_of_a_model


def staging_problem(
    loaded: LoadedConfig, plan: LaunchPlan, shape: ModelShape, machine: Machine
) -> Problem | None:
    """What is wrong if a node has certainly too little memory to save while training goes on."""
    config, need = loaded.config, staged_bytes(shape, loaded.config.optimizer.name, plan)
    if not config.checkpoint.async_save:
        return None
    if plan.slurm is None:
        key, have = "checkpoint.async", machine.memory
        is_what = f"is true, and this machine has {gib(have or 0)}"
    else:
        # Without the key a job has what the partition gives, which is not known here.
        mib = memory_mib(config.resources.mem or "0")
        key, have = "resources.mem", None if mib is None else int(mib * 2**20)
        is_what = f"is {config.resources.mem}"
    if have is None or need <= have:
        return None
    message = f"{is_what}: saving while training goes on takes {gib(need)} of the memory of a node"
    return loaded.problem(key, message, "checkpoint.async: false needs no memory for copies")


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
