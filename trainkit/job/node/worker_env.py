"""The environment that a worker is started with."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from trainkit.job.interpreter import module_argv
from trainkit.job.rank_env import RANK_VARIABLES, RankEnv
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import RunDir

RUN_DIR_VARIABLE = "TRAINKIT_JOB_RUN_DIR"
ATTEMPT_VARIABLE = "TRAINKIT_JOB_ATTEMPT"


def worker_rank(
    plan: LaunchPlan, node_rank: int, local_rank: int, master_addr: str, master_port: int
) -> RankEnv:
    """The place of one worker in its job: ranks are counted node by node."""
    return RankEnv(
        rank=plan.first_rank_of(node_rank) + local_rank,
        local_rank=local_rank,
        world_size=plan.world_size,
        local_world_size=plan.workers_of(node_rank),
        node_rank=node_rank,
        num_nodes=plan.num_nodes,
        master_addr=master_addr,
        master_port=master_port,
        source="agent",
    )


def worker_environ(
    plan: LaunchPlan,
    place: RankEnv,
    *,
    run_dir: str,
    attempt: int,
    configured: Mapping[str, str],
    inherited: Mapping[str, str],
    network: Mapping[str, str],
) -> dict[str, str]:
    """The whole environment of one worker: inherited, then `launch.env`, then our defaults, then its rank."""
    environ = {name: value for name, value in inherited.items() if name not in RANK_VARIABLES}
    # On Slurm the script has set them already, with the copy of the code before their PYTHONPATH.
    ours = {"PYTHONPATH"} if plan.slurm is not None else set()
    environ.update({name: value for name, value in configured.items() if name not in ours})
    environ.setdefault("OMP_NUM_THREADS", str(plan.threads_per_worker or own_threads(plan, place, inherited)))
    environ.setdefault("PYTHONUNBUFFERED", "1")
    for name, value in network.items():
        environ.setdefault(name, value)
    if plan.backend == "local" and plan.device == "cuda" and plan.num_nodes > 1:
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        environ["CUDA_VISIBLE_DEVICES"] = gpu_slice(plan, place.node_rank, visible)
    if plan.launcher == "python":
        environ.update(place.to_environ())
    else:
        # How long torchrun, when it is told to end, waits for its ranks; it waits 30 s by itself.
        environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(plan.grace_s)))
        if plan.launcher == "accelerate" and plan.device == "cpu":
            # Without it, where there is no GPU, each rank takes itself for the only one.
            environ.setdefault("ACCELERATE_USE_CPU", "true")
    environ[RUN_DIR_VARIABLE] = run_dir
    environ[ATTEMPT_VARIABLE] = str(attempt)
    return environ


def own_threads(plan: LaunchPlan, place: RankEnv, inherited: Mapping[str, str]) -> int:
    """The cores of one worker where the plan leaves them to the node."""
    given = inherited.get("SLURM_CPUS_PER_TASK", "")
    num_cpus = len(os.sched_getaffinity(0))
    if given.isdigit():
        workers_per_task = 1 if plan.per == "gpu" else place.local_world_size
        return max(1, min(int(given), num_cpus) // workers_per_task)
    return max(1, num_cpus // place.local_world_size)


def gpu_slice(plan: LaunchPlan, node_rank: int, visible: str | None) -> str:
    """The GPUs of one node when several nodes share this machine's.

    `visible` is CUDA_VISIBLE_DEVICES as it was found; unset means all GPUs, counted from 0.
    """
    count = plan.workers_per_node
    names = visible.split(",") if visible else [str(index) for index in range(plan.world_size)]
    return ",".join(names[node_rank * count : (node_rank + 1) * count])


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
