"""Define the built-in task: next-token prediction on token shards, with batches prefetched by threads.

Each step consumes samples at consecutive global positions. Microbatch m of data-parallel rank r contains the
`device_batch_size` samples starting at position ``start + (m x dp + r) x device_batch_size``. The samples of
a step therefore depend only on the step's start position, not on the number of ranks.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterator, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from trainkit.config.schema import RunConfig
from trainkit.data.dataset_file import TRAIN, VAL
from trainkit.data.order import IntArray, positions_of
from trainkit.data.shards import TokenMixture, TokenShards, open_dataset
from trainkit.data.sources import has_validation
from trainkit.plan.launch import Batch
from trainkit.plan.model_shape import resolve_model_shape
from trainkit.run.rollbacks import Ranges
from trainkit.run.rundir import RunDir
from trainkit.safetensors import StoredWeights
from trainkit.trainer.checkpoint.state import StreamState, TrainingState
from trainkit.trainer.distributed import World
from trainkit.trainer.models import load_architecture, refuse_unsupported_layout
from trainkit.trainer.models.decoder import Decoder, soft_cap
from trainkit.trainer.models.hf_names import read_decoder_weight
from trainkit.trainer.models.model import Model, StageSpec
from trainkit.trainer.stateless_random import hash_int32, stable_key

IGNORE_LABEL = -100
"""Label of padding in the last batch of the data; such labels are excluded from the loss and the token
count."""
MAX_TOKENS_PER_READ = 1 << 16
MAX_STEPS_PER_READ = 64
"""Maximum number of small steps whose batches are read together; see `BatchSource.steps_at`."""


@dataclass(frozen=True)
class Microbatch:
    """The input of a forward pass: `tokens` and `labels` are int64 [B, T], and `sample_keys` is int32 [B]."""

    tokens: Tensor
    labels: Tensor
    sample_keys: Tensor


def to_device(value: Any, device: torch.device) -> Any:
    """Move a batch to the device: tensors, objects with a ``to`` method, and containers of these."""
    if device.type == "cpu":
        return value
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    # Objects with ``to`` are, for example, a tokenizer's BatchEncoding or a PackedSequence, whose
    # `batch_sizes` must stay on the CPU.
    if callable(getattr(value, "to", None)):
        return value.to(device)
    if isinstance(value, list | tuple):
        items = [to_device(item, device) for item in value]
        is_named = isinstance(value, tuple) and type(value) is not tuple
        return type(value)(*items) if is_named else type(value)(items)
    if isinstance(value, MutableMapping):
        moved = copy.copy(value)
        for key, item in value.items():
            moved[key] = to_device(item, device)
        return moved
    if is_dataclass(value) and not isinstance(value, type):
        instance: Any = copy.copy(value)
        for field in fields(value):
            object.__setattr__(instance, field.name, to_device(getattr(value, field.name), device))
        return instance
    return value


@dataclass(frozen=True)
class StepBatch:
    """One rank's samples for one optimizer step."""

    microbatches: list[Any]
    num_tokens: int | None
    """Number of valid labels on this rank; None for a user's task, whose loss returns its divisor instead."""
    num_samples: int
    """Number of valid samples, summed across all ranks."""
    stream: StreamState | None = None
    """Position in a user's data stream after the step; set only on rank 0."""

    def of_turn(self, number: int, turn: str) -> StepBatch:
        """Return the same samples for one optimizer turn (see `Task.turns`), with different random seeds."""
        if not turn:
            return self
        micros = [
            replace(micro, optimizer=turn, seed=stable_key(micro.seed, number, turn))
            for micro in self.microbatches
        ]
        return replace(self, microbatches=micros)


@dataclass(frozen=True)
class BatchSource:
    """Reads the batches of steps, starting at any sample; stateless, so that threads can share it."""

    dataset: TokenShards | TokenMixture
    batch: Batch
    dp_rank: int
    dp_size: int
    seed: int
    shuffle: bool
    end: int | None
    """Number of samples to train in total; None if only the number of steps limits training."""
    skipped: Ranges = ()
    """Positions of the samples that are left out."""
    pin_memory: bool = False

    def steps_at(self, start: int, num_steps: int) -> list[StepBatch]:
        """Return the batches of `num_steps` consecutive steps, read together to reduce the overhead.

        `start` is the number of samples that were trained before.
        """
        size = self.batch.global_batch_size
        starts = start + size * np.arange(num_steps, dtype=np.int64)
        stops = starts + size
        if self.end is not None:  # the data may end in the middle of a step
            stops = np.minimum(stops, self.end)
        numbers = self._numbers(starts)
        valid = numbers < stops[:, None, None]
        positions = positions_of(numbers, self.skipped)
        tokens = np.zeros((*positions.shape, self.dataset.seq_len + 1), dtype=np.int64)
        if valid.any():
            index = self.dataset.sample_index(positions[valid], self.seed, self.shuffle)
            tokens[valid] = self.dataset.read(index)
        data = torch.from_numpy(tokens)
        inputs, labels = data[..., :-1].contiguous(), data[..., 1:].contiguous()
        labels[~torch.from_numpy(valid)] = IGNORE_LABEL
        keys = self._sample_keys(torch.from_numpy(positions))
        if self.pin_memory:
            inputs, labels, keys = inputs.pin_memory(), labels.pin_memory(), keys.pin_memory()
        num_tokens = (valid.sum(axis=(1, 2)) * self.dataset.seq_len).tolist()
        num_samples = np.maximum(stops - starts, 0).tolist()
        steps = zip(inputs.unbind(), labels.unbind(), keys.unbind(), num_tokens, num_samples, strict=True)
        return [
            StepBatch(
                [Microbatch(*micro) for micro in zip(i.unbind(), t.unbind(), k.unbind(), strict=True)], n, m
            )
            for i, t, k, n, m in steps
        ]

    def _numbers(self, starts: IntArray) -> IntArray:
        """Return the numbers of the samples that this rank reads, as int64 [steps, microbatches, B]."""
        micro = np.arange(self.batch.accumulation_steps, dtype=np.int64) * self.dp_size + self.dp_rank
        offsets = micro[:, None] * self.batch.device_batch_size
        return starts[:, None, None] + offsets + np.arange(self.batch.device_batch_size, dtype=np.int64)

    def _sample_keys(self, positions: Tensor) -> Tensor:
        """Return an int32 dropout key for each sample, derived from its position in the training order."""
        low = (positions & 0x7FFFFFFF).to(torch.int32)
        return hash_int32(
            low, stable_key(self.seed, "sample"), (positions >> 31).to(torch.int32) * 0x2545F491
        )


class PrefetchedBatches:
    """Iterates over the steps of a source; `num_workers` threads prefetch the batches.

    Threads suffice, because copying tokens from a memory map releases the GIL. Worker processes would have to
    be forked, and cleaned up after a crash. Small steps are read in groups to reduce the overhead.
    """

    def __init__(self, source: BatchSource, start: int, num_workers: int, step: int = 0) -> None:
        """Begin after `step` steps, in which `start` samples were trained."""
        self._source, self._start, self._step = source, start, step
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="data") if num_workers else None
        self._ahead = max(2, num_workers)
        self._steps = self._read()

    def __iter__(self) -> Iterator[StepBatch]:
        """Iterate from the first step, regardless of earlier iterations."""
        self._steps = self._read()
        return self

    def __next__(self) -> StepBatch:
        return next(self._steps)

    def _read(self) -> Iterator[StepBatch]:
        queue: deque[Future[list[StepBatch]]] = deque()
        for source, start, num_steps in self._groups():
            if self._pool is None:
                yield from source.steps_at(start, num_steps)
                continue
            queue.append(self._pool.submit(source.steps_at, start, num_steps))
            if len(queue) > self._ahead:
                yield from queue.popleft().result()

    def _groups(self) -> Iterator[tuple[BatchSource, int, int]]:
        """Yield the source, the start and the number of steps of each group of steps that is read together.

        The steps of a group have equally large batches.
        """
        start = self._start
        for count, batch in self._source.batch.stages(self._step):
            source = replace(self._source, batch=batch)
            num_tokens = batch.device_batch_size * batch.accumulation_steps * source.dataset.seq_len
            most = max(1, min(MAX_STEPS_PER_READ, MAX_TOKENS_PER_READ // num_tokens))
            left = math.inf if count is None else count
            while left > 0:
                num_steps = int(min(most, left))
                yield source, start, num_steps
                start, left = start + num_steps * batch.global_batch_size, left - num_steps

    def close(self) -> None:
        """Stop prefetching without waiting for reads in progress."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def nll_sum(logits: Tensor, labels: Tensor, cap: float | None = None, z_loss: float = 0.0) -> Tensor:
    """Return the negative log-likelihood, summed over all valid labels, as a 0-dim float32 tensor.

    Logits [B, T, vocab] are soft-capped if `cap` is set. The gradient, but not the value, contains the z-loss
    (arXiv 2204.02311), which is `z_loss` times the square of the logarithm of the softmax's denominator. With
    loss parallelism, the logits are a DTensor sharded over the vocabulary.
    """
    logits, labels = soft_cap(logits.float(), cap).flatten(0, 1), labels.flatten()
    total = whole(F.cross_entropy(logits, labels, ignore_index=IGNORE_LABEL, reduction="sum"))
    if z_loss and torch.is_grad_enabled():
        squares = log_denominator(logits).square().where(labels != IGNORE_LABEL, 0.0)
        penalty = z_loss * squares.sum()
        total = total + (penalty - penalty.detach())
    return total


def log_denominator(logits: Tensor) -> Tensor:
    """Return the logarithm of the softmax's denominator, float32 [N], for logits [N, vocab]."""
    if not isinstance(logits, DTensor):
        return logits.logsumexp(-1)
    # DTensor would gather the logits for `logsumexp`.
    largest = whole(logits.detach().amax(-1))
    shifted = logits - DTensor.from_local(largest[:, None], logits.device_mesh, [Replicate()])
    return largest + whole(shifted.exp().sum(-1)).log()


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor if the tensor is a DTensor, otherwise the tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class CausalLM:
    """The built-in task: next-token prediction on token shards."""

    def __init__(self, config: RunConfig, run: RunDir | None, checks_data: bool) -> None:
        seq_len = config.data.seq_len
        # Load the architecture first: preparing the data may take a long time, and an invalid architecture
        # should be reported early.
        self._model_class = load_architecture(config.model.architecture, run)
        refuse_unsupported_layout(config, self._model_class)
        self.train_data = open_dataset(config.data, seq_len, TRAIN, checks_data)
        evaluates = config.train.eval_every is not None and has_validation(config.data, checks_data)
        self.val_data = open_dataset(config.data, seq_len, VAL, checks_data) if evaluates else None
        self.shape = resolve_model_shape(config.model, self.train_data.vocab_size)
        self.num_params = self._model_class.num_params(self.shape)
        self.flops_per_sample: float | None = seq_len * self._model_class.flops_per_token(self.shape, seq_len)
        self.reads_weights = config.model.hf is not None and not config.model.from_scratch
        """True if the initial weights are read from the files of `model.hf`."""
        self._stored: StoredWeights | None = None
        self.config = config
        self._seq_len = seq_len

    def build_model(self, stage: StageSpec | None = None) -> Model:
        """Return the model, or one pipeline stage of the model, on the meta device."""
        with torch.device("meta"):
            model = self._model_class(self.shape, self._seq_len, stage)
        if self.config.data.document_mask:
            assert isinstance(model, Decoder)
            model.eos_id = self.train_data.eos_id
        return model

    def read_weight(self, name: str, index: Sequence[slice]) -> Tensor:
        """Read a slice of a parameter's initial value from the files of `model.hf`."""
        if self._stored is None:  # opened on demand, because a resumed run does not read these files
            self._stored = StoredWeights(Path(str(self.config.model.hf)))
        return read_decoder_weight(self._stored, self.shape, name, index)

    def nll_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the `nll_sum` of the model's logits [B, T, vocab] and labels [B, T]."""
        return nll_sum(logits, labels, self.shape.logit_soft_cap, self.config.train.z_loss)

    def data_identity(self) -> dict[str, object]:
        return {
            "fingerprint": self.train_data.fingerprint,
            "data.seq_len": self._seq_len,
            "data.shuffle": self.config.data.shuffle,
            "seed": self.config.seed,
        }

    def describe_data(self) -> str:
        data = self.train_data
        counts = f"{data.num_tokens:,} training tokens in {data.num_samples:,} samples of {self._seq_len}"
        if isinstance(data, TokenShards):
            return f"{self.config.data.source}: {counts}"
        return f"mixture: {counts}; {'; '.join(data.describe(self.config.data.source))}"

    def batches(
        self, split: str, batch: Batch, world: World, state: TrainingState, end: int | None
    ) -> PrefetchedBatches:
        """Return this rank's batches of a split, from the position in `state` up to `end` trained samples.

        The result can be iterated over several times.
        """
        data = self.train_data if split == TRAIN else self.val_data
        assert data is not None
        source = BatchSource(
            dataset=data,
            batch=batch,
            dp_rank=world.dp_rank,
            dp_size=world.layout.dp,
            seed=self.config.seed,
            shuffle=split == TRAIN and self.config.data.shuffle,
            end=end,
            skipped=state.skipped,
            pin_memory=world.device.type == "cuda",
        )
        return PrefetchedBatches(source, state.samples_seen, self.config.data.num_workers, state.step)
