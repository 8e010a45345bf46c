"""Build the batches of a user's task, whose samples are read by the worker processes of a `DataLoader`.

As in `causal_lm.py`, the samples of a step depend only on the position at which the step starts. An item's
position is the only seed for random number generators, so a run that resumes with any number of processes
reads the same batches.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from logging import getLogger
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainkit.config.schema import RunConfig
from trainkit.data.order import positions_of, sample_index
from trainkit.errors import Problem
from trainkit.plan.launch import Batch
from trainkit.run.rollbacks import Ranges, position_of
from trainkit.task import Samples
from trainkit.trainer.causal_lm import StepBatch
from trainkit.trainer.stateless_random import stable_key
from trainkit.trainer.torch_private import data_workers
from trainkit.trainer.user_code import TaskError

log = getLogger(__name__)
PREFETCH = 2
"""Number of microbatches that each worker reads ahead."""
START_S = 30.0
"""If a worker is not running after this many seconds, its fork is considered hung."""
MAX_STARTS = 3
POLL_S = 0.01
SAMPLED_ELEMENTS = 1024
"""Number of leading elements of each parameter that ranks compare."""


@dataclass(frozen=True)
class TaskBatch:
    """The input of one forward pass through a user's task."""

    data: Any
    """The value returned by `Task.collate`."""
    seed: int
    """Seed for the random number generators during the pass."""
    weight: float = 1.0
    """Factor by which the loss is multiplied; 0 for a filler batch, which makes a rank take part in the
    collectives."""
    optimizer: str = ""
    """The optimizer whose loss is computed, if optimizers take turns (see `Task.turns`)."""


@dataclass(frozen=True)
class _Request:
    """The samples of one microbatch, as numbers that count the samples in the order of training."""

    first: int
    stop: int
    """Number after the last sample; at most `first` if no samples are left for this rank."""
    filler: range
    """Numbers of the samples to read instead if no samples are left for this rank."""
    skipped: Ranges = ()
    """Positions of the samples that the run leaves out."""

    @property
    def position(self) -> int:
        """Return the position of the first sample, which seeds the random numbers of the microbatch."""
        return position_of(self.first, self.skipped)


class StepSamples(NamedTuple):
    """The samples of a step on all ranks, as numbers that count the samples in the order of training."""

    start: int
    stop: int
    """Number after the last sample."""
    batch: Batch


@dataclass(frozen=True)
class Positions:
    """The samples of this rank's microbatches in the sequence of all trained samples."""

    batch: Batch
    dp_rank: int
    dp_size: int
    start: int
    """Number of samples that were trained before."""
    end: int | None
    """Number of samples to train in total; None if only the number of steps limits training."""
    skipped: Ranges = ()
    """Positions of the samples that the run leaves out."""
    step: int = 0
    """Number of steps that were trained before."""

    def __iter__(self) -> Iterator[_Request]:
        """Iterate over the requests: `DataLoader` uses this object as its sampler."""
        return itertools.chain.from_iterable(map(self.requests, self.steps()))

    def steps(self) -> Iterator[StepSamples]:
        """Yield the samples of all steps."""
        start, step = self.start, self.step
        while self.end is None or start < self.end:
            batch = self.batch.after(step)
            stop = start + batch.global_batch_size
            yield StepSamples(start, stop if self.end is None else min(stop, self.end), batch)
            start, step = stop, step + 1

    def requests(self, step: StepSamples) -> Iterator[_Request]:
        """Yield the samples of this rank's microbatches in a step."""
        size, start, stop = step.batch.device_batch_size, step.start, step.stop
        for micro in range(step.batch.accumulation_steps):
            first = start + (micro * self.dp_size + self.dp_rank) * size
            filler = range(start, min(start + size, stop))
            yield _Request(first, min(first + size, stop), filler, self.skipped)


class SampleReader(Dataset[Any]):
    """Reads microbatches of map-style data; runs in the worker processes."""

    def __init__(
        self, samples: Samples, collate: Callable[[list[Any]], Any], seed: int, split: str, shuffle: bool
    ) -> None:
        self._samples, self._collate = samples, collate
        self._seed, self._split, self._shuffle = seed, split, shuffle
        self._num_samples = len(samples)

    def __getitem__(self, request: _Request) -> tuple[Any, int, float, None]:
        has_samples = request.first < request.stop
        numbers = range(request.first, request.stop) if has_samples else request.filler
        positions, first = positions_of(numbers, request.skipped), request.position
        index = sample_index(positions, self._num_samples, self._seed, self._shuffle)
        items = [self._item(at, i) for at, i in zip(positions.tolist(), index.tolist(), strict=True)]
        seed_generators(stable_key(self._seed, self._split, "collate", first))
        data = self._collate(items)
        return data, stable_key(self._seed, self._split, "pass", first), float(has_samples), None

    def _item(self, position: int, index: int) -> Any:
        seed_generators(stable_key(self._seed, self._split, "item", position))
        try:
            return self._samples[index]
        except Exception as error:
            kind, name = type(error).__name__, {"train": "training", "val": "validation"}[self._split]
            raise RuntimeError(f"{name} sample {index} cannot be read: {kind}: {error}") from error


def seed_generators(seed: int) -> None:
    """Seed the CPU generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


class ForkedLoader:
    """A DataLoader with forked workers; if a worker hangs during its fork, all workers are forked again.

    Before Python 3.12, another thread (such as a gloo thread that finishes a collective) can hold a lock
    during the fork. The forked process then waits forever for the lock (python/cpython#112275).

    Workers are forked nevertheless, because samples then need not be pickled and exist only once in memory.
    """

    def __init__(self, dataset: Dataset[Any], num_workers: int, *, prefetch: int = PREFETCH, **options: Any):
        """Accept the options of a DataLoader; if `num_workers` is 0, read items in this process."""
        self._dataset = dataset
        self._num_workers = num_workers
        self._options = {"batch_size": None, "collate_fn": unchanged, **options}
        if num_workers:
            self._options |= {
                "num_workers": num_workers,
                "multiprocessing_context": "fork",
                "prefetch_factor": prefetch,
                "persistent_workers": True,
            }
        self._loader: DataLoader[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Iterate from the first item, reusing the workers of earlier iterations.

        Raises RuntimeError if the workers cannot be started.
        """
        if self._loader is not None:
            return iter(self._loader)
        for _ in range(MAX_STARTS):
            is_started = mmap.mmap(-1, max(1, self._num_workers))  # memory shared with the workers
            loader = DataLoader(self._dataset, worker_init_fn=partial(_note, is_started), **self._options)
            items = iter(loader)
            stuck = _stuck_workers(data_workers(items), is_started)
            if not stuck:
                self._loader = loader
                return items
            log.warning(
                f"{len(stuck)} of {self._num_workers} data workers hung during the fork; restarting them"
            )
            del items, loader  # otherwise, the loader would report an error when its workers are killed
            for worker in stuck:
                worker.kill()
                worker.join()
        raise RuntimeError(f"data workers hung during the fork, {MAX_STARTS} times in a row")


def _note(is_started: mmap.mmap, worker_id: int) -> None:
    """Mark a worker as running; called in the worker process."""
    is_started[worker_id] = 1


def _stuck_workers(workers: Sequence[BaseProcess], is_started: mmap.mmap) -> list[BaseProcess]:
    """Wait until all workers are running or have exited; return the workers that hang."""
    stuck: list[BaseProcess] = []
    # Count polls instead of seconds, so that time during which the job is suspended does not count.
    for _ in range(round(START_S / POLL_S)):
        started = zip(workers, is_started[:], strict=False)
        stuck = [worker for worker, runs in started if not runs and worker.is_alive()]
        if not stuck:
            break
        time.sleep(POLL_S)
    return stuck


class _Calls(Dataset[Any]):
    """A dataset whose items are the return values of a function."""

    def __init__(self, function: Callable[[int], Any]) -> None:
        self._function = function

    def __getitem__(self, index: int) -> Any:
        return self._function(index)


def read_in_worker(
    function: Callable[[int], Any], indices: Sequence[int], config: RunConfig
) -> Iterator[Any]:
    """Yield the function's result for each index, computed in another process if there are data workers."""
    yield from ForkedLoader(_Calls(function), min(1, config.data.num_workers), sampler=indices)


def unchanged(batch: Any) -> Any:
    """Return a batch unchanged; used as `collate_fn` for batches that are already collated."""
    return batch


def digest_of(value: Any) -> str:
    """Return a digest of nested values; for a model, only the first elements of each parameter are hashed."""
    digest = hashlib.sha256()
    if isinstance(value, nn.Module):
        value = {
            name: (param.shape, None if param.is_meta else param.detach().flatten()[:SAMPLED_ELEMENTS])
            for name, param in value.named_parameters()
        }
    add_to_digest(digest, value)
    return digest.hexdigest()


def add_to_digest(digest: Any, value: Any) -> None:
    """Add nested values to a digest; objects of unknown classes are represented by their class."""
    digest.update(type(value).__name__.encode())
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous()
        digest.update(str((value.dtype, tuple(value.shape))).encode())
        digest.update(
            value.view(torch.uint8).numpy().tobytes()
            if value.numel() and value.dim()
            else str(value).encode()
        )
    elif isinstance(value, np.ndarray):
        digest.update(str((value.dtype, value.shape)).encode())
        if value.dtype == object:
            add_to_digest(digest, value.tolist())
        else:
            digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, str | bytes | int | float | bool | None):
        digest.update(repr(value).encode())
    elif isinstance(value, Mapping):
        for key in value:
            digest.update(repr(key).encode())
            add_to_digest(digest, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            add_to_digest(digest, item)


class TaskBatches:
    """Iterates over the steps of a user's task.

    For each microbatch, `loader` yields the arguments of a TaskBatch, and either the stream's state after the
    microbatch or None. If the stream has a problem, `loader` yields a description of the problem instead.
    """

    def __init__(self, loader: ForkedLoader, positions: Positions) -> None:
        self._positions, self._steps = positions, positions.steps()
        self._loader: ForkedLoader | None = loader
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[StepBatch]:
        """Iterate from the first step, reusing the workers of earlier iterations."""
        assert self._loader is not None
        self._steps, self._iterator = self._positions.steps(), iter(self._loader)
        return self

    def __next__(self) -> StepBatch:
        if self._iterator is None:
            iter(self)
        assert self._iterator is not None
        microbatches, step = [], next(self._steps)
        for _ in range(step.batch.accumulation_steps):
            found = next(self._iterator)
            if isinstance(found, Problem):
                raise TaskError(found.key, found.message, found.hint)
            *batch, state = found
            microbatches.append(TaskBatch(*batch))
        return StepBatch(microbatches, None, step.stop - step.start, state)

    def close(self) -> None:
        """Shut down the workers."""
        self._iterator = self._loader = None
