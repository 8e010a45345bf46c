"""The batches of one data-parallel rank, read ahead in threads.

Step after step the job consumes samples at consecutive global positions. Microbatch m of rank r takes
``start + (m x dp + r) x device_batch_size`` and up, so which samples make a step depends on the position
alone, never on how many ranks there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainkit.data.order import sample_index
from trainkit.data.shards import TokenShards
from trainkit.plan.launch import Batch
from trainkit.trainer.stateless_random import hash_int32, stable_key

IGNORE_LABEL = -100
"""A label that counts neither in the loss nor as a token: what fills up the last batch of the data."""


@dataclass(frozen=True)
class Microbatch:
    """What one forward pass reads: tokens and labels int64 [B, T], sample_keys int32 [B]."""

    tokens: Tensor
    labels: Tensor
    sample_keys: Tensor

    def to(self, device: torch.device) -> Microbatch:
        if device.type == "cpu":
            return self
        return Microbatch(
            self.tokens.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            self.sample_keys.to(device, non_blocking=True),
        )


@dataclass(frozen=True)
class StepBatch:
    """This rank's share of one optimizer step."""

    microbatches: list[Microbatch]
    num_tokens: int
    """Labels that count, on this rank."""
    num_samples: int
    """Samples that count, on all ranks together."""


@dataclass(frozen=True)
class BatchSource:
    """Makes the batch that starts at any position; has no state, so threads may share it."""

    dataset: TokenShards
    batch: Batch
    dp_rank: int
    dp_size: int
    seed: int
    shuffle: bool
    end_position: int | None
    """Position after the last sample; None when only the number of steps ends the training."""
    pin_memory: bool = False

    def step_at(self, position: int) -> StepBatch:
        """The batch of the step whose first sample stands at `position`."""
        stop = position + self.batch.global_batch_size
        if self.end_position is not None:
            stop = min(stop, self.end_position)
        microbatches = [
            self._microbatch(
                position + (index * self.dp_size + self.dp_rank) * self.batch.device_batch_size, stop
            )
            for index in range(self.batch.accumulation_steps)
        ]
        num_tokens = sum(int((micro.labels != IGNORE_LABEL).sum()) for micro in microbatches)
        return StepBatch(microbatches, num_tokens, stop - position)

    def _microbatch(self, start: int, stop: int) -> Microbatch:
        size = self.batch.device_batch_size
        count = max(0, min(size, stop - start))
        positions = np.arange(start, start + count, dtype=np.int64)
        rows = np.zeros((size, self.dataset.seq_len + 1), dtype=np.int64)
        if count:
            index = sample_index(positions, self.dataset.num_samples, self.seed, self.shuffle)
            rows[:count] = self.dataset.read(index)
        data = torch.from_numpy(rows)
        labels = data[:, 1:].clone()
        labels[count:] = IGNORE_LABEL
        micro = Microbatch(data[:, :-1].contiguous(), labels, self._sample_keys(start))
        if self.pin_memory:
            return Microbatch(
                micro.tokens.pin_memory(), micro.labels.pin_memory(), micro.sample_keys.pin_memory()
            )
        return micro

    def _sample_keys(self, start: int) -> Tensor:
        """One key a sample for its dropout, from its position in the whole training."""
        positions = torch.arange(start, start + self.batch.device_batch_size, dtype=torch.int64)
        low = (positions & 0x7FFFFFFF).to(torch.int32)
        return hash_int32(
            low, stable_key(self.seed, "sample"), (positions >> 31).to(torch.int32) * 0x2545F491
        )


class PrefetchedBatches:
    """Iterates over a source's steps from a position on, read by `num_workers` threads a few steps ahead.

    Tokens are copied out of memory maps, which leaves Python's lock free, so threads are enough: there is
    no process to fork and nothing to clean up after a crash.
    """

    def __init__(self, source: BatchSource, position: int, num_workers: int) -> None:
        self._source = source
        self._position = position
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="data") if num_workers else None
        self._ahead = max(2, num_workers)
        self._queue: deque[Future[StepBatch]] = deque()

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        if self._pool is None:
            batch = self._source.step_at(self._next_position())
            return batch
        while len(self._queue) < self._ahead:
            self._queue.append(self._pool.submit(self._source.step_at, self._next_position()))
        batch = self._queue.popleft().result()
        self._queue.append(self._pool.submit(self._source.step_at, self._next_position()))
        return batch

    def _next_position(self) -> int:
        position = self._position
        end = self._source.end_position
        self._position = position + self._source.batch.global_batch_size
        return position if end is None else min(position, end)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
