"""Builds the command lines that an agent uses to start a command through a launcher."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Sequence
from pathlib import PurePath

from trainkit.capabilities.launchers.launcher_plan import (
    ACCELERATE_CONFIG,
    DS_CONFIG,
    MEGATRON_ARGS,
    LauncherPlan,
)
from trainkit.job.node.worker_env import gpu_slice
from trainkit.job.rank_env import VISIBLE, RankEnv
from trainkit.plan.launch import LaunchPlan
from trainkit.run.rundir import RunDir

_TORCHRUN = (
    "torch.distributed.run",
    "--nnodes={num_nodes}",
    "--nproc-per-node={local_world_size}",
    "--node-rank={node_rank}",
    "--master-addr={master_addr}",
    "--master-port={master_port}",
)
_LAUNCHERS = {
    "torchrun": _TORCHRUN,
    "megatron": _TORCHRUN,
    "accelerate": (
        "accelerate.commands.launch",
        "--num_machines={num_nodes}",
        "--num_processes={world_size}",
        "--machine_rank={node_rank}",
        "--main_process_ip={master_addr}",
        "--main_process_port={master_port}",
    ),
    # The `deepspeed` program starts deepspeed.launcher.launch on every node, using ssh and a hostfile.
    # `deepspeed.launcher.launch` sets CUDA_VISIBLE_DEVICES to the GPUs of the node on which it runs.
    "deepspeed": (
        "deepspeed.launcher.launch",
        "--world_info={world_info}",
        "--node_rank={node_rank}",
        "--master_addr={master_addr}",
        "--master_port={master_port}",
    ),
}
"""Maps each launcher to its module, and to the module's options for one node, which contain placeholders for
fields of `RankEnv`."""


def launcher_argv(plan: LaunchPlan, rank_env: RankEnv, run: RunDir) -> tuple[str, ...]:
    """Return the argv of an agent's child process: a rank, or the launcher for all ranks on a node."""
    part = plan.part(LauncherPlan) or LauncherPlan()
    command, launcher = _filled_in(plan.workload.argv, part, run), plan.workload.launcher
    python = plan.environment.python or (sys.executable,)
    if launcher == "lightning":
        return (*python, *script_of(command))
    nodes = dict.fromkeys((f"node{index}" for index in range(rank_env.num_nodes)), _own_gpus(plan, rank_env))
    info = base64.urlsafe_b64encode(json.dumps(nodes).encode()).decode()
    module = [word.format(**vars(rank_env), world_info=info) for word in _LAUNCHERS[launcher]]
    if ACCELERATE_CONFIG in part.files:
        # The config file sets the kind of parallelism; with --multi_gpu, accelerate would ignore the file.
        module.append(f"--config_file={run.path / ACCELERATE_CONFIG}")
    elif launcher == "accelerate" and rank_env.world_size > 1:
        module.append("--multi_gpu")
    flags = part.files.get(MEGATRON_ARGS, "").split()
    return (*python, "-m", *module, *script_of(command), *flags)


def _filled_in(command: tuple[str, ...], part: LauncherPlan, run: RunDir) -> tuple[str, ...]:
    """Return a command with its placeholders replaced by their values; other text in braces is kept."""
    values = dict(part.values)
    if DS_CONFIG in part.files:
        values["ds_config"] = str(run.path / DS_CONFIG)
    for name, value in values.items():
        command = tuple(word.replace(f"{{{name}}}", value) for word in command)
    return command


def script_of(command: Sequence[str]) -> tuple[str, ...]:
    """Return a command without its leading Python interpreter, because launchers add an interpreter."""
    first = PurePath(command[0]).name
    if first.startswith("python") and len(command) > 1:
        return tuple(command[1:])
    return tuple(command)


def _own_gpus(plan: LaunchPlan, rank_env: RankEnv) -> list[int | str]:
    """Return a node's GPUs by number or UUID; on Slurm, return the GPUs of its ranks, numbered from 0."""
    visible = os.environ.get(VISIBLE) if plan.is_here and plan.device == "cuda" else None
    if visible is None:
        return list(range(rank_env.local_world_size))
    names = gpu_slice(plan, rank_env.node_rank, visible).split(",")
    return [int(name) if name.isdigit() else name for name in names]
