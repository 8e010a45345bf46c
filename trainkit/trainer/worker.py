"""Run a worker: determine its rank, build the model and train it."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from logging import getLogger
from typing import TypeVar

import torch

from trainkit.config import read_effective
from trainkit.errors import EXIT_STOPPED, FatalError
from trainkit.job.rank_env import find_rank_env, store_file
from trainkit.job.signals import StopRequest
from trainkit.plan.launch import LaunchPlan
from trainkit.run.rundir import AttemptDir
from trainkit.trainer.build import build_task
from trainkit.trainer.distributed import (
    bind_to_gpu,
    join_world,
    record_event,
    select_device,
)
from trainkit.trainer.loop import Trainer
from trainkit.trainer.progress import Progress
from trainkit.trainer.starting_state import check_same_data

log = getLogger(__name__)
T = TypeVar("T")
POLL_S = 0.02


def run_worker(attempt: AttemptDir, plan: LaunchPlan, stop: StopRequest, progress: Progress) -> int:
    """Train as one rank of an attempt; return the exit code of the worker."""
    joined = join_and_build(attempt, plan, stop, progress)
    if joined is None:
        return EXIT_STOPPED
    try:
        return joined.train()
    finally:
        joined.close()


def join_and_build(
    attempt: AttemptDir, plan: LaunchPlan, stop: StopRequest, progress: Progress
) -> Trainer | None:
    """Join the other ranks and build the trainer; return None if a rank receives a stop signal meanwhile."""
    config, env = read_effective(attempt.config_file), find_rank_env()
    if env.world_size != plan.world_size:
        raise FatalError(f"the plan has {plan.world_size} ranks, but WORLD_SIZE is {env.world_size}")
    if "OMP_NUM_THREADS" not in os.environ and plan.threads_per_worker is not None:
        torch.set_num_threads(plan.threads_per_worker)
    fix_kernels(plan, config.train.deterministic)
    is_task, dtype = plan.per == "gpu", config.precision.dtype
    device = select_device(plan.device, env.local_rank, is_task=is_task, dtype=dtype)
    if device.type == "cuda" and config.launch.numa == "auto":
        bind_to_gpu(device)
    if device.type == "cuda" and config.precision.tf32:
        torch.set_float32_matmul_precision("high")
    # Build the task before the startup barrier, which has a timeout: tokenizing the data may take a long
    # time. Only rank 0 checks the data shards, so that thousands of ranks do not access thousands of files.
    build = partial(build_task, config, attempt.run, checks_data=env.rank == 0)
    task = run_unless_stopped(stop, build, device)
    progress.enter("rendezvous")
    world = join_world(
        env,
        device,
        plan.layout,
        stop,
        mesh_of_one=config.parallel.wraps_one,
        on_arrival=partial(progress.enter, "connect"),
        store_file=(store_file(env.nonce) or attempt.store_file) if not plan.is_job else None,
    )
    if task is None or world is None:
        log.info(f"stopped during start-up ({stop.signal_name or 'by another rank'}): no step trained")
        return None
    if world.is_main:
        record_event(attempt, "rendezvous", world_size=world.size, device=str(device))
    progress.enter("build")
    check_same_data(task, world)
    return Trainer(attempt, plan, world, task, stop, progress)


def run_unless_stopped(stop: StopRequest, work: Callable[[], T], device: torch.device) -> T | None:
    """Run `work` in a thread that uses `device`; return its result, or None once a stop signal arrives.

    Exceptions raised by `work` are re-raised in the calling thread. If a stop signal arrives, `work`
    continues in its thread until the process exits.
    """
    # A new thread uses the first GPU unless a device is set.
    selects = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
    future = ThreadPoolExecutor(1, initializer=selects).submit(work)
    while not future.done():
        if stop.received.wait(POLL_S):
            return None
    return future.result()


def fix_kernels(plan: LaunchPlan, deterministic: bool) -> None:
    """Select kernels without benchmarking; with `deterministic`, select only deterministic kernels.

    Without `deterministic`, two identical runs on GPUs may differ by rounding, because sums may be computed
    in a different order. With `deterministic`, identical runs have bit-identical results. Call this function
    before anything is compiled and before the first collective. Environment variables that are already set
    keep their values.
    """
    if plan.device == "cuda":
        # Without this variable, Inductor benchmarks several kernels for large reductions and could choose a
        # different kernel after a restart.
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    if not deterministic:
        return
    torch.use_deterministic_algorithms(True)  # Operations without a deterministic kernel raise an error.
    # Do not fill new memory: filling would expose reads of uninitialized memory, but would also write to
    # every buffer that FSDP gathers into.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS for determinism
    if plan.world_size > 1:
        # With a ring, NCCL adds values in rank order, and ranks are numbered host by host. NVLS would add
        # values in an arbitrary order.
        os.environ.setdefault("NCCL_ALGO", "Ring")
