"""The argv of what a plan starts: the built-in trainer, a command a rank, or a launcher a node."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import PurePath

from trainkit.job.interpreter import module_argv
from trainkit.job.rank_env import RankEnv
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import RunDir


def worker_argv(plan: LaunchPlan, place: RankEnv, run: RunDir) -> tuple[str, ...]:
    """What one child of an agent is: a rank, or the launcher of all ranks of a node."""
    if plan.command is None:
        return module_argv("trainkit.trainer", str(run.path))
    if plan.launcher == "python":
        return plan.command
    python = plan.python or (sys.executable,)
    return (*python, "-m", *_LAUNCHERS[plan.launcher](place), *script_of(plan.command))


def script_of(command: Sequence[str]) -> tuple[str, ...]:
    """A command without the interpreter in front: launchers bring their own."""
    first = PurePath(command[0]).name
    if first.startswith("python") and len(command) > 1:
        return tuple(command[1:])
    return tuple(command)


def _torchrun(place: RankEnv) -> tuple[str, ...]:
    return (
        "torch.distributed.run",
        f"--nnodes={place.num_nodes}",
        f"--nproc-per-node={place.local_world_size}",
        f"--node-rank={place.node_rank}",
        f"--master-addr={place.master_addr}",
        f"--master-port={place.master_port}",
    )


def _accelerate(place: RankEnv) -> tuple[str, ...]:
    return (
        "accelerate.commands.launch",
        *(("--multi_gpu",) if place.world_size > 1 else ()),
        f"--num_machines={place.num_nodes}",
        f"--num_processes={place.world_size}",
        f"--machine_rank={place.node_rank}",
        f"--main_process_ip={place.master_addr}",
        f"--main_process_port={place.master_port}",
    )


def _deepspeed(place: RankEnv) -> tuple[str, ...]:
    return (
        *("deepspeed.launcher.runner", "--no_ssh"),
        f"--num_nodes={place.num_nodes}",
        f"--num_gpus={place.local_world_size}",
        f"--node_rank={place.node_rank}",
        f"--master_addr={place.master_addr}",
        f"--master_port={place.master_port}",
    )


_LAUNCHERS = {"torchrun": _torchrun, "accelerate": _accelerate, "deepspeed": _deepspeed}
"""How the processes of a command can be started."""
