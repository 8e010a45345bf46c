"""The training task, which defines the model, the data and the loss; the loop does everything else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainkit.config.schema import RunConfig
from trainkit.data.cache import has_validation
from trainkit.data.shards import open_dataset
from trainkit.plan.launch import Batch, LaunchPlan
from trainkit.plan.model_shape import resolve_model_shape
from trainkit.rundir import RunDir
from trainkit.trainer.batches import IGNORE_LABEL, BatchSource, PrefetchedBatches
from trainkit.trainer.distributed import World
from trainkit.trainer.models import load_architecture
from trainkit.trainer.models.model import Model, StageSpec
from trainkit.trainer.models.supported_layouts import refuse_unsupported_layout
from trainkit.trainer.user_task import UserTask


class Data(Protocol):
    """The training or validation data of a task."""

    @property
    def num_samples(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """Changes with the samples."""
        ...


class Batches(Protocol):
    """An iterator over the batches of consecutive steps."""

    def __iter__(self) -> Iterator[Any]: ...

    def __next__(self) -> Any: ...

    def close(self) -> None: ...


class Task(Protocol):
    """The model, the data and the loss of a training run: `CausalLM` or `UserTask`."""

    @property
    def train_data(self) -> Data: ...

    @property
    def val_data(self) -> Data | None: ...

    num_params: int
    flops_per_token: float | None
    flops_per_sample: float | None

    def data_identity(self) -> dict[str, object]:
        """The values that determine the sample at each position; they must not change on resume."""
        ...

    def describe_data(self) -> str: ...

    def train_batches(self, plan: LaunchPlan, world: World, start: int, end: int | None) -> Batches:
        """The training batches of this rank from position `start` on, up to `end` if it is not None."""
        ...

    def val_batches(self, batch: Batch, world: World, num_samples: int) -> Batches:
        """The validation batches of this rank."""
        ...


class CausalLM:
    """Next-token prediction on token shards."""

    def __init__(self, config: RunConfig, run: RunDir | None, checks_data: bool) -> None:
        seq_len = config.data.seq_len
        # Before the data is prepared, which may take long.
        self._model_class = load_architecture(config.model.architecture, run)
        refuse_unsupported_layout(config, self._model_class)
        self.train_data = open_dataset(config.data, seq_len, "train", checks_data)
        evaluates = config.train.eval_every is not None and has_validation(config.data, checks_data)
        self.val_data = open_dataset(config.data, seq_len, "val", checks_data) if evaluates else None
        self.shape = resolve_model_shape(config.model, self.train_data.vocab_size)
        self.num_layers = self.shape.num_layers
        self.num_params = self._model_class.num_params(self.shape)
        self.flops_per_token: float | None = self._model_class.flops_per_token(self.shape, seq_len)
        self.flops_per_sample: float | None = None
        self._config = config
        self._seq_len = seq_len

    def build_model(self, stage: StageSpec | None = None) -> Model:
        """The model, or one pipeline stage of it, on the meta device."""
        with torch.device("meta"):
            return self._model_class(self.shape, self._seq_len, stage)

    def nll_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The negative log-likelihood, summed over all valid labels, float32 []."""
        nll_sum = F.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_LABEL, reduction="sum"
        )
        # A DTensor with loss parallelism, which splits logits over the vocabulary.
        return nll_sum.full_tensor() if isinstance(nll_sum, DTensor) else nll_sum

    def data_identity(self) -> dict[str, object]:
        return {
            "fingerprint": self.train_data.fingerprint,
            "data.seq_len": self._seq_len,
            "data.shuffle": self._config.data.shuffle,
            "seed": self._config.seed,
        }

    def describe_data(self) -> str:
        data = self.train_data
        return (
            f"{self._config.data.source}: {data.num_tokens:,} training tokens in"
            f" {data.num_samples:,} samples of {self._seq_len}"
        )

    def train_batches(self, plan: LaunchPlan, world: World, start: int, end: int | None) -> PrefetchedBatches:
        source = BatchSource(
            dataset=self.train_data,
            batch=plan.batch,
            dp_rank=world.dp_rank,
            dp_size=plan.layout.dp,
            seed=self._config.seed,
            shuffle=self._config.data.shuffle,
            end_position=end,
            pin_memory=world.device.type == "cuda",
        )
        return PrefetchedBatches(source, start, self._config.data.num_workers)

    def val_batches(self, batch: Batch, world: World, num_samples: int) -> PrefetchedBatches:
        assert self.val_data is not None
        source = BatchSource(
            dataset=self.val_data,
            batch=batch,
            dp_rank=world.dp_rank,
            dp_size=world.layout.dp,
            seed=self._config.seed,
            shuffle=False,
            end_position=num_samples,
            pin_memory=world.device.type == "cuda",
        )
        return PrefetchedBatches(source, 0, self._config.data.num_workers)


def build_task(config: RunConfig, run: RunDir | None = None, checks_data: bool = True) -> CausalLM | UserTask:
    """The task of a config; a run loads the user's own code from its code snapshot.

    With `checks_data` this rank looks at the size of every shard, which one of a job does.
    """
    return UserTask(config, run) if config.has_user_task else CausalLM(config, run, checks_data)
