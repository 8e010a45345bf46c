"""The environment that a worker is started with."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from trainkit.job.rank_env import RANK_VARIABLES, RankEnv
from trainkit.plan.launch import LaunchPlan

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
