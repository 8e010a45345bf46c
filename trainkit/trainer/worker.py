"""One worker of a run: determines its rank, builds the model and trains."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from logging import getLogger
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from trainkit import __version__
from trainkit.cluster.machine import driver_version
from trainkit.config import read_effective
from trainkit.config.schema import RunConfig
from trainkit.data.dataset_file import TRAIN
from trainkit.errors import EXIT_STOPPED, FatalError
from trainkit.formats import plural
from trainkit.job.rank_env import find_rank_env, store_file
from trainkit.job.signals import StopRequest
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.layout_rules import compiles
from trainkit.run.manifest import BASE_FINGERPRINT, Checkpoint, Manifest
from trainkit.run.process import own_host
from trainkit.run.rundir import AttemptDir
from trainkit.trainer.build import AnyTask, BuiltModel, CompileCache, build, build_task
from trainkit.trainer.checkpoint.loader import (
    choose_checkpoint,
    load_initial_weights,
    load_tensors,
    read_initial_weights,
)
from trainkit.trainer.checkpoint.saver import CheckpointSaver
from trainkit.trainer.checkpoint.state import StateTensors, TrainingState
from trainkit.trainer.distributed import (
    World,
    bind_to_gpu,
    broadcast_from_main,
    gather_from_all,
    join_world,
    record_event,
    select_device,
)
from trainkit.trainer.loop import Evaluator, Trainer
from trainkit.trainer.metrics import LocalGradient, Metrics, RankRecords, TensorBoardLog
from trainkit.trainer.optimizer import ShardedAdamW
from trainkit.trainer.precision import LossScale
from trainkit.trainer.profiler import ProfileWindow
from trainkit.trainer.progress import Progress
from trainkit.trainer.slow_ranks import SlowRanks, StepClock

log = getLogger(__name__)
T = TypeVar("T")
POLL_S = 0.02
LOG_IDLE_S = 300.0
"""Seconds without a change of its log after which a rank no longer counts as preparing data."""


def run_worker(attempt: AttemptDir, plan: LaunchPlan, stop: StopRequest, progress: Progress) -> int:
    """Train as one rank of an attempt; returns the worker's exit code."""
    joined = join_and_build(attempt, read_effective(attempt.config_file), plan, stop, progress)
    if joined is None:
        return EXIT_STOPPED
    trainer, _ = joined
    try:
        return trainer.train()
    finally:
        trainer.close()


def join_and_build(
    attempt: AttemptDir, config: RunConfig, plan: LaunchPlan, stop: StopRequest, progress: Progress
) -> tuple[Trainer, AnyTask] | None:
    """Join the other ranks and build the trainer; None if a rank was asked to stop meanwhile."""
    env = find_rank_env()
    if env.world_size != plan.world_size:
        raise FatalError(
            f"the plan has {plan.world_size} ranks, but WORLD_SIZE is {env.world_size}",
        )
    if "OMP_NUM_THREADS" not in os.environ and plan.threads_per_worker is not None:
        torch.set_num_threads(plan.threads_per_worker)
    fix_kernels(plan, config.train.deterministic)
    is_task, dtype = plan.per == "gpu", config.precision.dtype
    device = select_device(plan.device, env.local_rank, is_task=is_task, dtype=dtype)
    if device.type == "cuda" and config.launch.numa == "auto":
        bind_to_gpu(device)
    if device.type == "cuda" and config.precision.tf32:
        torch.set_float32_matmul_precision("high")
    # Before the startup barrier and its timeout, since tokenising the data may take long.
    # Rank 0 checks the shards for all: thousands of ranks would ask for the size of thousands of files.
    build = partial(build_task, config, attempt.run, checks_data=env.rank == 0)
    task = run_unless_stopped(stop, build, device)
    progress.enter("rendezvous")
    world = join_world(
        env,
        device,
        plan.layout,
        stop,
        partial(_is_writing_log, attempt),
        mesh_of_one=config.parallel.wraps_one,
        on_arrival=partial(progress.enter, "connect"),
        store_file=(store_file(env.nonce) or attempt.store_file) if plan.slurm is None else None,
    )
    if task is None or world is None:
        log.info(f"stopped during start-up ({stop.signal_name or 'by another rank'}): no step was done")
        return None
    if world.is_main:
        record_event(attempt, "rendezvous", world_size=world.size, device=str(device))
    progress.enter("build")
    check_same_data(task, world)
    return build_trainer(attempt, plan, world, task, stop, progress), task


def _is_writing_log(attempt: AttemptDir, rank: int) -> bool:
    """Whether the log of a rank has changed recently, as it does while the rank tokenises data."""
    try:
        return time.time() - attempt.rank_log(rank).stat().st_mtime < LOG_IDLE_S
    except OSError:
        return False


def run_unless_stopped(stop: StopRequest, work: Callable[[], T], device: torch.device) -> T | None:
    """Run `work` in a thread on a device; its result, or None as soon as this process is asked to stop.

    Raises what `work` raises. Abandoned work continues in its thread until the process ends.
    """
    # A new thread's current GPU is the first one.
    selects = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
    future = ThreadPoolExecutor(1, initializer=selects).submit(work)
    while not future.done():
        if stop.received.wait(POLL_S):
            return None
    return future.result()


def check_same_data(task: AnyTask, world: World) -> None:
    """Raise FatalError on ranks whose data differs from that of rank 0."""
    identity = [task.train_data.fingerprint, val_fingerprint(task)]
    if broadcast_from_main(identity, world) != identity:
        raise FatalError(
            f"the data of rank {world.rank} differs from the data of rank 0",
            hint="put the data on a filesystem that all nodes share",
        )


def build_trainer(
    attempt: AttemptDir,
    plan: LaunchPlan,
    world: World,
    task: AnyTask,
    stop: StopRequest,
    progress: Progress,
) -> Trainer:
    """Build the model, load the newest checkpoint and set up the training loop."""
    config = task.config
    with progress.within("load"):  # before the build, which may read the weights of a large model
        chosen = choose_checkpoint(attempt, world)
        if chosen is not None:
            refuse_other_run(*chosen, task)
    local_gradient = LocalGradient()
    built = build(task, plan, world, progress, local_gradient)
    # Of a task nothing is compiled unless the config says so.
    by_default = config.has_decoder and compiles(config.parallel, plan.layout, plan.device)
    compiled = config.parallel.compile is True or by_default
    compile_cache = CompileCache(attempt.run) if compiled else None
    if compile_cache is not None and world.rank % plan.workers_per_node == 0:
        compile_cache.load()  # before the collective that all ranks begin with
    optimizer = ShardedAdamW(built.weights, config.optimizer, plan.layout, compiled=compiled)
    tensors = StateTensors(built.weights, optimizer, built.buffers)
    saver = CheckpointSaver(attempt, world, tensors.tensors, config.checkpoint.keep_last)
    loss_scale = LossScale(config.precision, world.device)
    progress.enter("load")
    state = resume(chosen, attempt, world, task, built, saver, tensors, loss_scale)
    num_samples, end = task.train_data.num_samples, end_position(task)
    total_steps = count_steps(plan, state, end, config.train.steps)
    if world.is_main:
        log_summary(plan, world, task, total_steps)
        record_event(
            attempt,
            "training",
            step=state.step,
            total_steps=total_steps,
            samples_seen=state.samples_seen,
            num_samples=num_samples,
            data=task.train_data.fingerprint,
            trainkit=__version__,
            **computed_on(world.device),
        )
    tensorboard = None
    if config.logging.tensorboard and world.is_main:
        tensorboard = TensorBoardLog(attempt.run.tensorboard_dir, state.step + 1)
    uses_gpu, hosts = world.device.type == "cuda", gather_from_all(own_host(), world)
    return Trainer(
        attempt=attempt,
        config=config,
        plan=plan,
        world=world,
        stop=stop,
        progress=progress,
        built=built,
        optimizer=optimizer,
        loss_scale=loss_scale,
        state=state,
        total_steps=total_steps,
        batches=task.batches(TRAIN, plan.batch, world, state, end),
        evaluator=None if task.val_data is None else Evaluator(task, plan, world),
        saver=saver,
        metrics=Metrics(
            attempt,
            world,
            config.precision.dtype,
            total_steps,
            tensorboard,
            task.flops_per_sample,
        ),
        profiler=ProfileWindow(config.profiler, attempt.profile_dir, world),
        manifest_record=manifest_record(plan, task),
        # Only the loss of a user's task knows what it is divided by.
        nominal_count=plan.batch.global_batch_size if config.has_user_task else plan.batch.tokens_per_step,
        compile_cache=compile_cache,
        clock=StepClock(world, plan.layout),
        slow_ranks=SlowRanks(plan.layout, hosts, on_gpu=uses_gpu)
        if world.is_main and world.size > 1
        else None,
        rank_records=RankRecords(attempt, world.rank, own_host(), local_gradient),
    )


def val_fingerprint(task: AnyTask) -> str:
    """The fingerprint of the validation data; empty without any."""
    return "" if task.val_data is None else task.val_data.fingerprint


def refuse_other_run(checkpoint: Checkpoint, manifest: Manifest, task: AnyTask) -> None:
    """Raise FatalError if a checkpoint is of another optimizer, or of other samples."""
    name, before, optimizer = checkpoint.path.name, manifest.optimizer, task.config.optimizer.name
    for key, value in task.data_identity().items():
        saved = manifest.data.get(key)
        if saved == value or (saved is None and key == BASE_FINGERPRINT):
            continue  # older checkpoints of tasks lack the fingerprint, and have the frozen weights
        changed = (
            "the training data has changed" if key == "fingerprint" else f"{key} is {value}, was {saved}"
        )
        hint = "restore it (for `stdlib`, the Python version too), or start a new run"
        raise FatalError(f"{changed}: checkpoint {name} cannot be resumed", hint)
    if before != optimizer:
        message = f"optimizer.name is {optimizer}, was {before}: checkpoint {name} cannot be resumed"
        hint = f"set optimizer.name to {before}, or start a new run with model.init_from"
        raise FatalError(message, hint)


def resume(
    chosen: tuple[Checkpoint, Manifest] | None,
    attempt: AttemptDir,
    world: World,
    task: AnyTask,
    built: BuiltModel,
    saver: CheckpointSaver,
    tensors: StateTensors,
    loss_scale: LossScale,
) -> TrainingState:
    """Load the chosen checkpoint, if there is one, and return its training state."""
    config, best_metric = task.config, None
    if config.checkpoint.best_metric is not None:
        best_metric = f"{config.checkpoint.best_metric} {config.checkpoint.best_mode}"
    if built.read_weight is not None:
        read_initial_weights(built.weights, built.read_weight, resumed=chosen is not None)
    if chosen is None:
        if config.model.init_from is not None:
            base = task.data_identity().get(BASE_FINGERPRINT)
            load_initial_weights(tensors.tensors, config.model, world, base)
        tensors.copy_duplicates()
        return TrainingState(best_metric=best_metric)
    checkpoint, manifest = chosen
    load_tensors(checkpoint, tensors.tensors, world)
    tensors.copy_duplicates()
    state = TrainingState.from_json(manifest.progress)
    if manifest.val_fingerprint != val_fingerprint(task):
        log.warning("the validation data has changed: its losses cannot be compared with earlier ones")
        state.best_value = state.best_step = None
    if state.best_metric not in (None, best_metric):
        log.warning(f"the best checkpoint was that of {state.best_metric}, and is now that of {best_metric}")
        state.best_value = state.best_step = None
    state.best_metric = best_metric
    loss_scale.load(state.loss_scale)
    saver.last_step = state.step
    if world.is_main:
        log.info(f"resumed from {checkpoint.path.name}: step={state.step} samples_seen={state.samples_seen}")
        record_event(attempt, "resumed", step=state.step, samples_seen=state.samples_seen)
    return state


def end_position(task: AnyTask) -> int | None:
    """Position after the last sample of the epochs; None if only the number of steps ends the training."""
    epochs = task.config.train.epochs
    if epochs is None:
        return None
    assert task.train_data.num_samples is not None
    return round(epochs * task.train_data.num_samples)


def count_steps(plan: LaunchPlan, state: TrainingState, end: int | None, steps: int | None) -> int:
    """The number of the last step: `train.steps`, or where the epochs end with the current batch size."""
    if end is None:
        assert steps is not None
        return steps
    return state.step + math.ceil(max(0, end - state.samples_seen) / plan.batch.global_batch_size)


def manifest_record(plan: LaunchPlan, task: AnyTask) -> dict[str, object]:
    """The fields of a checkpoint's manifest besides the training state."""
    config = task.config
    text = json.dumps(config.model_dump(mode="json", by_alias=True), sort_keys=True)
    return {
        "trainkit": __version__,
        "torch": torch.__version__,
        "config_fingerprint": hashlib.sha256(text.encode()).hexdigest(),
        "task": config.task,
        "optimizer": config.optimizer.name,
        "data": task.data_identity(),
        "val_fingerprint": val_fingerprint(task),
        "layout": plan.to_dict()["layout"],
        "world_size": plan.world_size,
        "model": config.model.model_dump(mode="json"),
    }


def log_summary(plan: LaunchPlan, world: World, task: AnyTask, total_steps: int) -> None:
    """Log the model, the data and the batch."""
    config, (key, name) = task.config, task.config.model_source
    name = f"of {name}" if key == "task" else str(config.model.hf or config.model.preset)
    log.info(
        f"model {name}: {task.num_params:,} parameters, {config.precision.dtype}"
        f" on {world.size} x {world.device.type}: {plan.reasons['layout']}"
    )
    if world.device.type == "cuda":
        equal = "bit-identical" if config.train.deterministic else "equal up to rounding"
        log.info(f"the losses of equal runs are {equal} (train.deterministic)")
        if config.precision.tf32:
            log.info("matrices are multiplied in TF32 (precision.tf32)")
    log.info(f"data {task.describe_data()}")
    log.info(
        f"batch {plan.batch.global_batch_size} = {plan.batch.device_batch_size}"
        f" x {plural(plan.layout.dp, 'rank')}"
        f" x {plan.batch.accumulation_steps} accumulated; {plural(total_steps, 'step')}; peak lr {plan.lr:g}"
    )


def fix_kernels(plan: LaunchPlan, deterministic: bool) -> None:
    """Choose kernels by what they compute, not by their times; `deterministic` ones if asked for.

    Two equal runs on GPUs then have all but the rounding of sums in another order in common, deterministic
    ones every bit. Call before anything is compiled and before the first collective. Variables that are set
    stay.
    """
    if plan.device == "cuda":
        # Inductor times several kernels for a sum over a long row; a restart could choose another.
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    if not deterministic:
        return
    torch.use_deterministic_algorithms(True)  # kernels without one raise an error
    # Finds reads of memory that nothing has written. It would write every buffer that FSDP gathers into.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS raises an error
    if plan.world_size > 1:
        # The ring adds in the order of the ranks, which are numbered host by host; NVLS adds in any order.
        os.environ.setdefault("NCCL_ALGO", "Ring")


def computed_on(device: torch.device) -> dict[str, str | int | None]:
    """The hardware and libraries on which the bits of results depend."""
    found: dict[str, str | int | None] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    if device.type != "cuda":
        name = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        instructions = torch.backends.cpu.get_cpu_capability()  # that torch uses
        return {**found, "processor": f"{name[1] if name else 'CPU'} with {instructions}"}
    with contextlib.suppress(PackageNotFoundError):  # a build of torch without it
        found["triton"] = version("triton")
    nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else ()  # type: ignore[no-untyped-call]
    return {
        **found,
        "processor": torch.cuda.get_device_name(device),
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "nccl": ".".join(map(str, nccl)),
        "driver": driver_version(),
    }
