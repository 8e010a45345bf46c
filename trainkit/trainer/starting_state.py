"""Load an attempt's initial state, from a checkpoint or from initial values, and log a summary of the run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from importlib.metadata import PackageNotFoundError, version
from logging import getLogger
from pathlib import Path

import torch
import torch.distributed as dist

from trainkit import __version__
from trainkit.cluster.machine import driver_version
from trainkit.errors import FatalError
from trainkit.formats import plural
from trainkit.plan.launch import LaunchPlan
from trainkit.run.files import read_record, to_json
from trainkit.run.manifest import BASE_FINGERPRINT, Checkpoint, Manifest, published
from trainkit.run.rollbacks import Rollback, number_before, read_rollbacks, shown_ranges
from trainkit.run.rundir import AttemptDir
from trainkit.trainer.build import AnyTask, BuiltModel
from trainkit.trainer.checkpoint.loader import load_initial_weights, load_tensors, read_initial_weights
from trainkit.trainer.checkpoint.state import StateTensors, TrainingState
from trainkit.trainer.checkpoint.storage import SafeReader
from trainkit.trainer.distributed import World, broadcast_from_main, record_event
from trainkit.trainer.hooks import TrainerHooks
from trainkit.trainer.own_optimizers import OwnState, refuse_other_optimizers
from trainkit.trainer.stream import WHOLE_HINT, StreamData
from trainkit.trainer.user_task import UserTask

log = getLogger(__name__)


def check_same_data(task: AnyTask, world: World) -> None:
    """Raise FatalError on each rank whose data differs from rank 0's data."""
    identity = [task.train_data.fingerprint, val_fingerprint(task)]
    if broadcast_from_main(identity, world) != identity:
        hint = "put the data on a filesystem that all nodes share"
        if isinstance(task.train_data, StreamData):
            hint = WHOLE_HINT
        raise FatalError(f"the data of rank {world.rank} differs from the data of rank 0", hint=hint)


def val_fingerprint(task: AnyTask) -> str:
    """Return the fingerprint of the validation data, or "" if the task has no validation data."""
    return "" if task.val_data is None else task.val_data.fingerprint


def refuse_other_run(checkpoint: Checkpoint, manifest: Manifest, task: AnyTask) -> None:
    """Raise FatalError if a checkpoint was saved with a different optimizer or different training samples."""
    name, before, optimizer = checkpoint.path.name, manifest.optimizer, task.config.optimizer.name
    for key, value in task.data_identity().items():
        saved = manifest.data.get(key)
        if saved == value or (saved is None and key == BASE_FINGERPRINT):
            # Checkpoints of older trainkit versions contain frozen weights, but no base model fingerprint.
            continue
        changed = (
            "the training data has changed" if key == "fingerprint" else f"{key} is {value}, was {saved}"
        )
        hint = "restore the earlier state (for `stdlib`, also the Python version), or start a new run"
        raise FatalError(f"{changed}: checkpoint {name} cannot be resumed", hint)
    # For a user's optimizer, compare only the class name, because the path may have changed.
    if before.rpartition(":")[2] != optimizer.rpartition(":")[2]:
        message = f"optimizer.name is {optimizer}, was {before}: checkpoint {name} cannot be resumed"
        hint = f"set optimizer.name to {before}, or start a new run with model.init_from"
        raise FatalError(message, hint)


def resume(
    chosen: tuple[Checkpoint, Manifest] | None,
    attempt: AttemptDir,
    world: World,
    task: AnyTask,
    built: BuiltModel,
    tensors: StateTensors,
    own: OwnState | None,
    hooks: TrainerHooks,
) -> TrainingState:
    """Load the chosen checkpoint, if any, and return the training state to start from."""
    config, best_metric = task.config, None
    known = [to_json(item) for item in read_rollbacks(attempt.run)] if world.is_main else []
    rollbacks = [read_record(Rollback, item) for item in broadcast_from_main(known, world)]
    if config.checkpoint.best_metric is not None:
        best_metric = f"{config.checkpoint.best_metric} {config.checkpoint.best_mode}"
    if built.read_weight is not None:
        biases = {} if built.load_balance is None else built.load_balance.biases
        read_initial_weights(built.weights, biases, built.read_weight, resumed=chosen is not None)
    if chosen is None:
        if config.model.init_from is not None:
            base = task.data_identity().get(BASE_FINGERPRINT)
            load_initial_weights(tensors.tensors, config.model, world, base)
        tensors.copy_duplicates()
        hooks.begin(0, loaded=())
        state = TrainingState(best_metric=best_metric)
        state.apply(rollbacks)
        return state
    checkpoint, manifest = chosen
    refuse_other_optimizers(manifest, own, checkpoint.path.name)
    wanted = {} if own is None else own.wanted(manifest, SafeReader(checkpoint.path))
    loaded = load_tensors(checkpoint, {**tensors.tensors, **wanted}, world)
    tensors.copy_duplicates()
    if own is not None:
        own.load(manifest, wanted)
    state = TrainingState.from_json(manifest.progress)
    state.apply(rollbacks)
    hooks.begin(state.step, loaded, state.hooks)
    if manifest.val_fingerprint != val_fingerprint(task):
        log.warning("the validation data has changed: validation losses cannot be compared with earlier ones")
        state.best_value = state.best_step = None
    if state.best_metric not in (None, best_metric):
        log.warning(f"checkpoint.best_metric was {state.best_metric} and is now {best_metric}")
        state.best_value = state.best_step = None
    if rollbacks and state.best_step is not None:
        # The run may have deleted this checkpoint when a later one, which no longer counts, became the best.
        there = any(one.step == state.best_step for one in published(attempt.run.checkpoints_dir))
        if not broadcast_from_main(there, world):
            state.best_value = state.best_step = None
    state.best_metric = best_metric
    if world.is_main:
        log.info(f"resumed from {checkpoint.path.name}: step={state.step} samples_seen={state.samples_seen}")
        if state.skipped:
            log.info(f"the run leaves out {shown_ranges(state.skipped)}")
        record_event(attempt, "resumed", step=state.step, samples_seen=state.samples_seen)
    return state


def last_step(plan: LaunchPlan, task: AnyTask, state: TrainingState) -> tuple[int, int | None]:
    """Return the last step, and the number of samples to train until the end of the last epoch.

    The last step is computed from the number of epochs and the current batch sizes. Samples that the run
    leaves out are not trained later. If the config does not set a number of epochs, the last step is
    `train.steps`, and the number of samples is None.
    """
    train, num_samples = task.config.train, task.train_data.num_samples
    if train.epochs is None:
        assert train.steps is not None
        return train.steps, None
    assert num_samples is not None
    end = number_before(round(train.epochs * num_samples), state.skipped)
    return state.step + plan.batch.num_steps(state.step, max(0, end - state.samples_seen)), end


def manifest_record(plan: LaunchPlan, task: AnyTask) -> dict[str, object]:
    """Return the fields of a checkpoint's manifest, except the training state."""
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


def announce(
    attempt: AttemptDir,
    plan: LaunchPlan,
    world: World,
    task: AnyTask,
    built: BuiltModel,
    state: TrainingState,
    total_steps: int,
) -> None:
    """Log the model, the data and the batch size, and record that training begins."""
    config, (key, name) = task.config, task.config.model_source
    name = f"of {name}" if key == "task" else str(config.model.hf or config.model.preset)
    log.info(
        f"model {name}: {task.num_params:,} parameters, {config.precision.dtype}"
        f" on {world.size} x {world.device.type}: {plan.reasons['layout']}"
    )
    if any(weight.lower is not None for weight in built.weights):
        log.info("each bf16 weight is the upper half of its float32 master weight: 4 bytes per parameter")
    elif built.unsplit_reason:
        log.info(f"each bf16 weight is a copy of its float32 master weight: {built.unsplit_reason}")
    if world.device.type == "cuda":
        equal = "bit-identical" if config.train.deterministic else "equal up to rounding"
        log.info(f"the losses of equal runs are {equal} (train.deterministic)")
        if config.precision.tf32:
            log.info("matrices are multiplied in TF32 (precision.tf32)")
    log.info(f"data {task.describe_data()}")
    # Each optimizer of a task has its own learning rate, so do not record a single peak learning rate.
    is_own = isinstance(task, UserTask) and task.has_own_optimizers
    peak_lr = "" if is_own else f"; peak lr {plan.lr:g}"
    log.info(
        f"batch {plan.batch.global_batch_size} = {plan.batch.device_batch_size}"
        f" x {plural(plan.layout.dp, 'rank')}"
        f" x {plan.batch.accumulation_steps} accumulated{plan.batch.warmup_text}"
        f"; {plural(total_steps, 'step')}{peak_lr}"
    )
    record_event(
        attempt,
        "training",
        step=state.step,
        total_steps=total_steps,
        samples_seen=state.samples_seen,
        **({"skipped": state.skipped} if state.skipped else {}),
        num_samples=task.train_data.num_samples,
        data=task.train_data.fingerprint,
        trainkit=__version__,
        **computed_on(world.device),
    )


def computed_on(device: torch.device) -> dict[str, str | int | None]:
    """Return the hardware and library versions on which bit-identical results depend."""
    found: dict[str, str | int | None] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    if device.type != "cuda":
        name = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        instructions = torch.backends.cpu.get_cpu_capability()  # the CPU instruction set that torch uses
        return {**found, "processor": f"{name[1] if name else 'CPU'} with {instructions}"}
    with contextlib.suppress(PackageNotFoundError):  # some builds of torch do not include triton
        found["triton"] = version("triton")
    nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else ()  # type: ignore[no-untyped-call]
    return {
        **found,
        "processor": torch.cuda.get_device_name(device),
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "nccl": ".".join(map(str, nccl)),
        "driver": driver_version(),
    }
