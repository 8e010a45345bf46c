"""Prepare a user's task for training by opening its data and building its model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from trainkit.adapters import adapted_layers, require
from trainkit.config.schema import RunConfig
from trainkit.data.dataset_file import TRAIN
from trainkit.plan.launch import Batch
from trainkit.run.manifest import BASE_FINGERPRINT
from trainkit.run.rundir import RunDir
from trainkit.shipped import TRANSFORMERS_TASK
from trainkit.task import Samples, Stream, Task
from trainkit.trainer.checkpoint.state import TrainingState
from trainkit.trainer.distributed import World
from trainkit.trainer.models.model import allocate
from trainkit.trainer.quantization import quantized_layers, read_quantized
from trainkit.trainer.stateless_random import stable_key
from trainkit.trainer.stream import StreamData, is_stream, stream_batches
from trainkit.trainer.task_batches import (
    ForkedLoader,
    Positions,
    SampleReader,
    TaskBatches,
    digest_of,
    read_in_worker,
    seed_generators,
)
from trainkit.trainer.user_code import TRACEBACK_HINT, describe, errors_of_user, load_task_class, refusal


def load_task(config: RunConfig, run: RunDir | None = None) -> Task:
    """Create the task that a config specifies; raise TaskError if it cannot be imported or created."""
    if config.uses_transformers:
        module, _, name = TRANSFORMERS_TASK.partition(":")
        task: Task = getattr(import_module(module), name)(config)
        return task
    found = load_task_class(config, run)
    with errors_of_user(config, f"{found.__name__}() failed"):
        return found(config, **config.task_args)


class UserTask:
    """A user's task with its data and model."""

    def __init__(self, config: RunConfig, run: RunDir | None, *, opens_data: bool = True) -> None:
        self.config = config
        self.num_params = 0
        """Number of model parameters; 0 until the model has been built."""
        if config.model.lora is not None:
            require("peft", "model.lora", "peft")
        seed_generators(stable_key(config.seed, "task"))
        self.task = load_task(config, run)
        if opens_data:
            self._open_data()

    def _open_data(self) -> None:
        config = self.config
        with errors_of_user(config, "its datasets cannot be opened"):
            train = self.task.train_dataset()
            self.train_data: _Data | StreamData
            if is_stream(train):
                self.train_data = StreamData(cast(Stream, train), config)
            else:
                self.train_data = _Data(cast(Samples, train), "train_dataset", config)
            validation = self.task.val_dataset() if config.train.eval_every is not None else None
            self.val_data = None if validation is None else _Data(validation, "val_dataset", config)

    @property
    def has_own_optimizers(self) -> bool:
        """Return whether the task, not the config, defines the optimizer."""
        return type(self.task).optimizers is not Task.optimizers

    @property
    def flops_per_sample(self) -> float | None:
        """Return the FLOPs per sample in a training step; call this after the model has been built."""
        with errors_of_user(self.config, "flops_per_sample failed"):
            return self.task.flops_per_sample

    def export(self, model: nn.Module, folder: Path) -> None:
        """Let the task export its model to an empty folder."""
        with errors_of_user(self.config, "export() failed"):
            self.task.export(model, folder)

    def data_identity(self) -> dict[str, object]:
        """Return the values that determine the order of samples; they must not change on resume."""
        config = self.config
        identity = {
            "fingerprint": self.train_data.fingerprint,
            "data.shuffle": config.data.shuffle,
            "seed": config.seed,
        }
        base = self.task.base_fingerprint
        return identity if base is None else {**identity, BASE_FINGERPRINT: base}

    def batches(
        self, split: str, batch: Batch, world: World, state: TrainingState, end: int | None
    ) -> TaskBatches:
        """Return this rank's batches of a split, from the position in `state` up to `end` trained samples.

        The validation batches can be iterated over repeatedly.
        """
        config, collate, uses_gpu = self.config, self.task.collate, world.device.type == "cuda"
        positions = Positions(
            batch, world.dp_rank, world.layout.dp, state.samples_seen, end, state.skipped, state.step
        )
        data = self.train_data if split == TRAIN else self.val_data
        if isinstance(data, StreamData):
            return stream_batches(data, collate, positions, state.stream, world.is_main, uses_gpu)
        assert data is not None
        loader = ForkedLoader(
            SampleReader(data.samples, collate, config.seed, split, split == TRAIN and config.data.shuffle),
            config.data.num_workers,
            sampler=positions,  # each item of the sampler is a microbatch
            pin_memory=uses_gpu,
        )
        return TaskBatches(loader, positions)

    def describe_data(self) -> str:
        data = self.train_data
        return data.describe() if isinstance(data, StreamData) else f"{data.num_samples:,} training samples"

    def build_model(self) -> nn.Module:
        """Return the model in float32 on the CPU, with the same values on every rank."""
        seed_generators(stable_key(self.config.seed, "model"))
        with errors_of_user(self.config, "build_model() failed"):
            model = self.task.build_model()
        if not isinstance(model, nn.Module):
            kind = type(model).__name__
            raise refusal(self.config, f"build_model() returned a {kind}", "return an nn.Module")
        for name, param in model.named_parameters():
            kind = param.device.type
            if param.dtype != torch.float32 or kind not in ("cpu", "meta"):
                hint = (
                    "build the model in float32 on the CPU; precision.dtype and the layout set "
                    "dtype and device"
                )
                raise refusal(self.config, f"{name} of its model is {param.dtype} on {kind}", hint)
            if param.is_meta and type(self.task).read_weight is Task.read_weight:
                hint = "define read_weight() to return its initial value"
                raise refusal(self.config, f"{name} of its model is on the meta device", hint)
        if not any(param.requires_grad for param in model.parameters()):
            raise refusal(
                self.config, "no parameter of its model requires a gradient", "unfreeze some parameters"
            )
        if self.config.model.lora is not None and not adapted_layers(model):
            message = "build_model() added no adapters for model.lora"
            raise refusal(self.config, message, "call trainkit.task.add_adapters in build_model()")
        self._shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
        for name, layer in quantized_layers(model).items():  # quantized weights are not in `parameters()`
            self._shapes[f"{name}.weight"] = tuple(layer.shape)
        self.num_params = sum(math.prod(shape) for shape in self._shapes.values())
        return model

    @torch.no_grad()
    def build_whole_model(self, without: Collection[str] = ()) -> nn.Module:
        """Return the model on the CPU with its initial values, except for the parameters in `without`."""
        model = self.build_model()
        on_meta = [name for name, param in model.named_parameters() if param.is_meta]
        allocate(model, torch.device("cpu"))
        for name in (item for item in on_meta if item not in without):
            param = model.get_parameter(name)
            param.copy_(self.read_weight(name, [slice(0, size) for size in param.shape]))
        read_quantized(model, self.read_weight, torch.device("cpu"))
        return model

    def read_weight(self, name: str, index: Sequence[slice]) -> Tensor:
        """Read a slice of a parameter's initial value."""
        rows, *rest = index or (slice(0, 1),)
        with errors_of_user(self.config, f"read_weight({name!r}) failed", but=OSError):
            value = self.task.read_weight(name, rows)
        if not isinstance(value, Tensor):
            raise refusal(self.config, f"read_weight() returned a {type(value).__name__}", "return a Tensor")
        expected = self._shapes[name][1:]
        if tuple(value.shape[1:]) != expected:
            message = f"read_weight({name!r}) returned rows of shape {list(value.shape[1:])}"
            raise refusal(self.config, message, f"in the model, the rows have shape {list(expected)}")
        columns = (slice(None), *rest)  # tensor parallelism may have split the columns
        return value[columns]


class _Data:
    """A user's dataset with its fingerprint."""

    def __init__(self, samples: Samples, method: str, config: RunConfig) -> None:
        for name in ("__len__", "__getitem__"):
            if not hasattr(samples, name):
                kind = type(samples).__name__
                hint = (
                    "return a list or a map-style torch.utils.data.Dataset; convert a stream "
                    "with list(STREAM)"
                )
                raise refusal(config, f"{method}() returned a {kind} without {name}", hint)
        self.samples = samples
        self.num_samples = len(samples)
        if not self.num_samples:
            raise refusal(config, f"{method}() has no samples", "check the paths that the dataset reads from")
        self.fingerprint: str = getattr(samples, "fingerprint", None) or self._fingerprint(method, config)

    def _fingerprint(self, method: str, config: RunConfig) -> str:
        """Return a digest of the dataset's length and some of its items.

        The items are read in a separate process. If the dataset opened a file to read the first item, worker
        processes forked afterwards would share the file offset.
        """
        indices = sorted({0, self.num_samples // 2, self.num_samples - 1})
        digest = hashlib.sha256(str(self.num_samples).encode())
        for found, problem in read_in_worker(
            partial(digest_of_item, self.samples, config.seed), indices, config
        ):
            if problem:
                raise refusal(
                    config, f"{method}() has a sample that cannot be read: {problem}", TRACEBACK_HINT
                )
            digest.update(found.encode())
        return digest.hexdigest()


def digest_of_item(samples: Samples, seed: int, index: int) -> tuple[str, str]:
    """Return (digest of an item, ""), or ("", reason) if the item cannot be read."""
    seed_generators(stable_key(seed, "fingerprint", index))
    try:
        return digest_of(samples[index]), ""
    except Exception as error:  # user code may raise any exception
        return "", describe(error)
