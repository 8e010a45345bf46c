"""One worker: finds out who it is, builds what the run asks for, trains, and says how it ended."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from logging import getLogger
from threading import Thread
from typing import Any, TypeVar

import torch

from trainkit import __version__
from trainkit.config import read_effective
from trainkit.config.schema import RunConfig
from trainkit.errors import EXIT_NO_RESTART, EXIT_STOPPED, TrainkitError
from trainkit.job.rank_env import find_rank_env
from trainkit.job.signals import StopRequest
from trainkit.manifest import Checkpoint
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import AttemptDir
from trainkit.trainer.batches import BatchSource, PrefetchedBatches
from trainkit.trainer.build import build, set_determinism
from trainkit.trainer.checkpoint.loader import choose_checkpoint, from_main, load_tensors
from trainkit.trainer.checkpoint.saver import CheckpointSaver
from trainkit.trainer.checkpoint.state import Progress, TrainingState
from trainkit.trainer.device import select_device
from trainkit.trainer.distributed import World, join_world, note_event
from trainkit.trainer.evaluate import Evaluator
from trainkit.trainer.loop import Trainer
from trainkit.trainer.metrics import Metrics, TensorBoardLog
from trainkit.trainer.optimizer import ShardedAdamW
from trainkit.trainer.precision import LossScale
from trainkit.trainer.profiler import ProfileWindow
from trainkit.trainer.progress import Pulse
from trainkit.trainer.tasks import Task, build_task

log = getLogger(__name__)
T = TypeVar("T")
POLL_S = 0.02
SILENT_S = 300.0
"""A rank that has printed nothing for so long is not preparing data any more."""


def run_worker(attempt: AttemptDir, plan: LaunchPlan, stop: StopRequest, pulse: Pulse) -> int:
    """Train as one rank of an attempt; returns the worker's exit code."""
    config = read_effective(attempt.config_file)
    env = find_rank_env()
    if env.world_size != plan.world_size:
        raise TrainkitError(
            f"the plan has {plan.world_size} ranks, but WORLD_SIZE is {env.world_size}",
            exit_code=EXIT_NO_RESTART,
        )
    if "OMP_NUM_THREADS" not in os.environ and plan.threads_per_worker is not None:
        torch.set_num_threads(plan.threads_per_worker)
    set_determinism(config.train.deterministic)
    device = select_device(plan.device, env.local_rank)
    # Before the ranks meet: text may have to be tokenised first, and that may take long.
    task = unless_stopped(stop, partial(build_task, config, attempt.run))
    pulse.enter("meet")
    world = join_world(env, device, plan.layout, stop, partial(_still_prints, attempt))
    if task is None or world is None:
        log.info(f"stopped during start-up ({stop.signal_name or 'by another rank'}): no step was done")
        return EXIT_STOPPED
    if world.is_main:
        note_event(attempt.run, attempt.number, "rendezvous", world_size=world.size, device=str(device))
    pulse.enter("build")
    check_same_data(task, world)
    trainer, tensorboard = build_trainer(attempt, config, plan, world, task, stop, pulse)
    try:
        return trainer.train()
    finally:
        trainer.batches.close()
        trainer.saver.close()
        trainer.profiler.close()
        if tensorboard is not None:
            tensorboard.close()


def _still_prints(attempt: AttemptDir, rank: int) -> bool:
    """Whether a rank has printed something lately, as one does that tokenises: for hours, on a large text."""
    try:
        return time.time() - attempt.rank_log(rank).stat().st_mtime < SILENT_S
    except OSError:
        return False


def unless_stopped(stop: StopRequest, work: Callable[[], T]) -> T | None:
    """What `work` returns or raises, or None as soon as this process is asked to stop.

    Work that is given up goes on in its thread until the process ends, which it then soon does.
    """
    future: Future[T] = Future()

    def carry_out() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=carry_out, daemon=True).start()
    while not future.done():
        if stop.received.wait(POLL_S):
            return None
    return future.result()


def check_same_data(task: Task, world: World) -> None:
    """All ranks must read the same data, or they would disagree about where it ends.

    Raises TrainkitError (exit code 78) on the ranks that differ from rank 0.
    """
    mine = (task.train_data.fingerprint, val_fingerprint(task))
    if from_main(mine, world) != mine:
        raise TrainkitError(
            f"the data of rank {world.rank} is not the data of rank 0",
            hint="put the data where all nodes see the same files",
            exit_code=EXIT_NO_RESTART,
        )


def build_trainer(
    attempt: AttemptDir,
    config: RunConfig,
    plan: LaunchPlan,
    world: World,
    task: Task,
    stop: StopRequest,
    pulse: Pulse,
) -> tuple[Trainer, TensorBoardLog | None]:
    """Build the model, bring it to where the newest checkpoint stands, and set up the loop."""
    built = build(task, config, plan, world, pulse)
    optimizer = ShardedAdamW(built.weights, config.optimizer, plan.layout)
    state = TrainingState.of(built.weights, optimizer)
    saver = CheckpointSaver(attempt.run, attempt.number, world, state.tensors, config.checkpoint.keep_last)
    loss_scale = LossScale(config.precision, world.device)
    pulse.enter("load")
    progress = resume(config, attempt, world, task, saver, state, loss_scale)
    num_samples = task.train_data.num_samples
    end = None if config.train.epochs is None else round(config.train.epochs * num_samples)
    total_steps = count_steps(config, plan, progress, end)
    if world.is_main:
        describe(config, plan, world, task, total_steps)
        note_event(
            attempt.run,
            attempt.number,
            "training",
            step=progress.step,
            total_steps=total_steps,
            samples_seen=progress.samples_seen,
            num_samples=num_samples,
        )
    source = training_batches(config, plan, world, task, end)
    tensorboard = None
    if config.logging.tensorboard and world.is_main:
        tensorboard = TensorBoardLog(attempt.run.tensorboard_dir, progress.step + 1)
    trainer = Trainer(
        run=attempt.run,
        attempt=attempt.number,
        config=config,
        plan=plan,
        world=world,
        stop=stop,
        pulse=pulse,
        parts=built.parts,
        passes=built.passes,
        tied_ends=built.tied_ends,
        optimizer=optimizer,
        loss_scale=loss_scale,
        progress=progress,
        total_steps=total_steps,
        batches=PrefetchedBatches(source, progress.samples_seen, config.data.num_workers),
        evaluator=None if task.val_data is None else Evaluator(task, config, plan, world),
        saver=saver,
        metrics=Metrics(
            attempt.run,
            attempt.number,
            world,
            task.flops_per_token,
            config.precision.dtype,
            total_steps,
            tensorboard,
        ),
        profiler=ProfileWindow(config.profiler, attempt.profile_dir, world),
        manifest_record=manifest_record(config, plan, task),
    )
    return trainer, tensorboard


def training_batches(
    config: RunConfig, plan: LaunchPlan, world: World, task: Task, end_position: int | None
) -> BatchSource:
    """This rank's batches, by position."""
    return BatchSource(
        dataset=task.train_data,
        batch=plan.batch,
        dp_rank=world.dp_rank,
        dp_size=plan.layout.dp,
        seed=config.seed,
        shuffle=config.data.shuffle,
        end_position=end_position,
        pin_memory=world.device.type == "cuda",
    )


def data_identity(config: RunConfig, task: Task) -> dict[str, object]:
    """What decides which sample stands at a position: a resume must find it unchanged."""
    return {
        "fingerprint": task.train_data.fingerprint,
        "data.seq_len": config.data.seq_len,
        "data.shuffle": config.data.shuffle,
        "seed": config.seed,
    }


def val_fingerprint(task: Task) -> str:
    """What the validation data is; empty without any."""
    return "" if task.val_data is None else task.val_data.fingerprint


def refuse_other_data(checkpoint: Checkpoint, manifest: dict[str, Any], identity: dict[str, object]) -> None:
    """Raise TrainkitError (exit code 78) when the position in a checkpoint means other samples by now."""
    for key, value in identity.items():
        before = manifest["data"][key]
        if before == value:
            continue
        what = "the training data is" if key == "fingerprint" else f"{key} is {value}, which is"
        was = "" if key == "fingerprint" else f": that had {before}"
        raise TrainkitError(
            f"{what} not what checkpoint {checkpoint.path.name} was trained on{was}",
            hint="bring it back (for `stdlib`, the Python version too), or start a new run",
            exit_code=EXIT_NO_RESTART,
        )


def resume(
    config: RunConfig,
    attempt: AttemptDir,
    world: World,
    task: Task,
    saver: CheckpointSaver,
    state: TrainingState,
    loss_scale: LossScale,
) -> Progress:
    """Load the newest good checkpoint, if there is one, and return where it stands.

    Raises TrainkitError (exit code 78) when the data is not what the checkpoint was trained on.
    """
    chosen = choose_checkpoint(attempt.run, attempt.number, world)
    if chosen is None:
        return Progress()
    checkpoint, manifest = chosen
    refuse_other_data(checkpoint, manifest, data_identity(config, task))
    load_tensors(checkpoint, state.tensors, world)
    state.copy_twins()
    progress = Progress.from_dict(manifest["progress"])
    if manifest["val_fingerprint"] != val_fingerprint(task):
        log.warning(
            "the validation data is another one than before: its losses cannot be compared with older ones"
        )
        progress.best_value = progress.best_step = None
    loss_scale.load(progress.loss_scale)
    saver.last_step = progress.step
    if world.is_main:
        log.info(
            f"resumed from {checkpoint.path.name}: step={progress.step} samples_seen={progress.samples_seen}"
        )
        note_event(
            attempt.run, attempt.number, "resumed", step=progress.step, samples_seen=progress.samples_seen
        )
    return progress


def count_steps(config: RunConfig, plan: LaunchPlan, progress: Progress, end: int | None) -> int:
    """The number of the last step: given, or what is left of the epochs in batches of today's size."""
    if end is None:
        assert config.train.steps is not None
        return config.train.steps
    return progress.step + math.ceil(max(0, end - progress.samples_seen) / plan.batch.global_batch_size)


def manifest_record(config: RunConfig, plan: LaunchPlan, task: Task) -> dict[str, object]:
    """What a checkpoint says about itself."""
    text = json.dumps(config.model_dump(mode="json", by_alias=True), sort_keys=True)
    return {
        "trainkit": __version__,
        "torch": torch.__version__,
        "config_fingerprint": hashlib.sha256(text.encode()).hexdigest(),
        "data": data_identity(config, task),
        "val_fingerprint": val_fingerprint(task),
        "layout": plan.to_dict()["layout"],
        "world_size": plan.world_size,
        "model": config.model.model_dump(mode="json"),
    }


def describe(config: RunConfig, plan: LaunchPlan, world: World, task: Task, total_steps: int) -> None:
    """Say what is about to be trained."""
    log.info(
        f"model {config.model.preset}: {task.num_params:,} parameters, {config.precision.dtype}"
        f" on {world.size} x {world.device.type}: {plan.reasons['layout']}"
    )
    log.info(
        f"data {config.data.source}: {task.train_data.num_tokens:,} training tokens in"
        f" {task.train_data.num_samples:,} samples of {config.data.seq_len}"
    )
    log.info(
        f"batch {plan.batch.global_batch_size} = {plan.batch.device_batch_size} x {plan.layout.dp} ranks"
        f" x {plan.batch.accumulation_steps} accumulated; {total_steps} steps; peak lr {plan.lr:g}"
    )
