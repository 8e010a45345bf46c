"""Build the batches of a stream: training data that is read sequentially and has no length.

Every data-parallel rank reads all samples, but collates only its own. A rank's samples have the same
positions as with map-style data. A checkpoint contains the stream's position after the checkpoint's step, not
the position up to which the worker process has read ahead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging import getLogger
from typing import Any

from torch.utils.data import IterableDataset

from trainkit.config.schema import RunConfig
from trainkit.errors import Problem, TrainkitError
from trainkit.job.rank_env import find_rank_env
from trainkit.run.rollbacks import position_of
from trainkit.task import Stream
from trainkit.trainer.checkpoint.state import StreamState
from trainkit.trainer.stateless_random import stable_key
from trainkit.trainer.task_batches import (
    PREFETCH,
    ForkedLoader,
    Positions,
    StepSamples,
    TaskBatches,
    digest_of,
    read_in_worker,
    seed_generators,
)
from trainkit.trainer.user_code import TRACEBACK_HINT, TaskError, describe, line_of, refusal

log = getLogger(__name__)
NUM_FIRST = 3
"""Number of leading samples that determine a stream's fingerprint."""
WHOLE_HINT = (
    "every rank must read the whole stream, because trainkit divides it among the ranks; give a WebDataset "
    "nodesplitter=lambda src: src"
)


def is_stream(data: object) -> bool:
    """Return whether a dataset is a stream, which is iterated over instead of being indexed."""
    return isinstance(data, IterableDataset) or (
        hasattr(data, "__iter__") and not hasattr(data, "__getitem__")
    )


class StreamData:
    """A user's stream with its fingerprint."""

    num_samples = None

    def __init__(self, samples: Stream, config: RunConfig) -> None:
        if config.train.epochs is not None:
            message = (
                f"is {config.train.epochs:g}, but train_dataset() of {config.task} returned a "
                f"{type(samples).__name__}, which has no length"
            )
            raise TaskError("train.epochs", message, "set train.steps, and remove train.epochs")
        if isinstance(samples, Iterator):
            hint = (
                "return an object whose __iter__() starts from the first sample on every call: "
                "a class with `def __iter__(self): yield …`"
            )
            message = f"train_dataset() returned a {type(samples).__name__}, which can be read only once"
            raise refusal(config, message, hint)
        self.samples: Any = samples
        self.config = config
        self.has_state = all(hasattr(samples, name) for name in ("state_dict", "load_state_dict"))
        self.first: list[str] = []
        """Digests of the first samples; empty if the user's dataset provides its own fingerprint."""
        self.fingerprint: str = getattr(samples, "fingerprint", None) or ""
        if not self.fingerprint:
            # Read the first samples in a separate process, because reading may open files whose descriptors a
            # forked worker must not inherit.
            [(self.first, problem)] = read_in_worker(lambda _: _first_digests(self), [0], config)
            if problem is not None:
                raise TaskError(problem.key, problem.message, problem.hint)
            self.fingerprint = hashlib.sha256("".join(self.first).encode()).hexdigest()

    def continues_at(self, saved: StreamState) -> bool:
        """Return whether the stream itself can restore a saved state, without rereading earlier samples."""
        return self.has_state and saved.state is not None

    def describe(self) -> str:
        name = type(self.samples).__name__
        resume = "" if self.has_state else "; without state_dict(), a resume skips over the earlier samples"
        return f"a stream ({name}), in its own order{resume}"


def _first_digests(data: StreamData) -> tuple[list[str], Problem | None]:
    """Return the digests of the first samples, or the problem that prevents reading the samples."""
    cursor = Cursor(data)
    found: list[str] = []
    try:
        for position in range(NUM_FIRST):
            item = cursor.next(position)
            if cursor.epoch > 0:
                break
            found.append(digest_of(item))
    except TaskError as error:
        return [], error.problem
    except RuntimeError as error:
        hint = WHOLE_HINT if find_rank_env().world_size > 1 else TRACEBACK_HINT
        return [], refusal(data.config, f"in train_dataset() {error}", hint).problem
    return found, None


class Cursor:
    """Reads a stream, one epoch after another."""

    def __init__(self, data: StreamData) -> None:
        self._data = data
        self._stream = data.samples
        self._iterator: Iterator[Any] | None = None
        self.epoch = 0
        self.samples = 0
        """Number of samples read so far in the current epoch."""
        self._is_restored = False
        """True if reading started in the middle of an epoch."""

    def next(self, position: int) -> Any:
        """Read the training sample at a position; the position seeds the random number generators.

        Raises TaskError if the stream cannot be used for training, and RuntimeError for any other error in
        the user's code.
        """
        while True:
            seed_generators(stable_key(self._data.config.seed, "train", "item", position))
            with self._errors(f"training sample {position} cannot be read"):
                if self._iterator is None:
                    self._begin(None)
                assert self._iterator is not None
                for item in self._iterator:
                    self._compare_first(item)
                    self.samples += 1
                    return item
            if self.samples == 0:
                message = "train_dataset() has no samples"
                if self.epoch > 0:
                    message = f"epoch {self.epoch} of its stream, counted from 0, has no samples"
                hint = (
                    "__iter__() must start from the first sample in every epoch; check the "
                    "paths that the stream reads"
                )
                raise self._refusal(message, hint, "__iter__")
            self.epoch, self.samples, self._iterator = self.epoch + 1, 0, None

    def seek(self, saved: StreamState, position: int) -> None:
        """Continue reading at `position`, which directly follows the last sample of `saved`."""
        data, stateful = self._data, self._data.continues_at(saved)
        last = position - 1
        seed_generators(stable_key(data.config.seed, "train", "item", last))
        self.epoch, self._is_restored = saved.epoch, stateful
        with self._errors("the stream cannot be resumed"):
            self._begin(saved.state if stateful else None)
        for index in range(0 if stateful else saved.samples):
            self.next(last - saved.samples + index)
        self.samples = saved.samples
        if digest_of(self.next(last)) == saved.digest:
            return
        if stateful:
            message = f"after load_state_dict(), its stream does not continue with sample {last}"
            hint = (
                "load_state_dict() must restore the full state that state_dict() returned, "
                "including any shuffle buffer;"
                " without state_dict() and load_state_dict(), a resume skips over the earlier samples"
            )
            raise self._refusal(message, hint, "load_state_dict")
        message = f"sample {last} of its stream is not the sample after which the checkpoint was saved"
        hint = "a stream must yield the same samples in the same order whenever it is read; restore its data"
        raise self._refusal(message, hint, "__iter__")

    def where(self) -> tuple[int, int, Any]:
        """Return the epoch, the number of its samples that were read, and the ``state_dict()`` as JSON."""
        if not self._data.has_state or self.samples == 0:
            return self.epoch, self.samples, None
        with self._errors("state_dict() of the stream failed"):
            state = self._stream.state_dict()
        try:
            # Copy the state, because the stream may later modify the returned object.
            copied = json.loads(json.dumps(state, allow_nan=False))
            if copied != state:
                raise ValueError("the restored state would have different values")
        except (TypeError, ValueError) as error:
            message = f"the state_dict() of its stream cannot be saved as JSON: {error}"
            hint = "return dictionaries with string keys, lists, strings and finite numbers"
            raise self._refusal(message, hint, "state_dict") from None
        return self.epoch, self.samples, copied

    def _begin(self, state: Any) -> None:
        if hasattr(self._stream, "set_epoch"):
            self._stream.set_epoch(self.epoch)
        if state is not None:
            self._stream.load_state_dict(state)
        self._iterator = iter(self._stream)

    def _compare_first(self, item: object) -> None:
        """Raise TaskError unless the stream's first samples match its fingerprint."""
        first = [] if self._is_restored or self.epoch > 0 else self._data.first
        if self.samples < len(first) and digest_of(item) != first[self.samples]:
            message = f"sample {self.samples} of its stream is different when the stream is read again"
            raise self._refusal(
                message,
                "__iter__() must start from the first sample on every call, in the same order on all ranks",
                "__iter__",
            )

    def _refusal(self, message: str, hint: str, method: str) -> TaskError:
        place = line_of(getattr(type(self._stream), method, None))
        return refusal(self._data.config, f"{message}{f' ({method}(){place})' if place else ''}", hint)

    @contextmanager
    def _errors(self, failed: str) -> Iterator[None]:
        """Convert any error in the stream to a RuntimeError with file and line, so the run can restart."""
        try:
            yield
        except TrainkitError:
            raise
        except Exception as error:
            raise RuntimeError(f"{failed}: {describe(error)}") from error


@dataclass
class _Reader(IterableDataset[Any]):
    """Yields this rank's microbatches; runs in the process that reads ahead.

    Each item has the format that `TaskBatches` expects from its loader. The last microbatch of each step
    includes the StreamState.
    """

    data: StreamData
    collate: Callable[[list[object]], Any]
    positions: Positions
    saved: StreamState | None
    takes_state: bool

    def __iter__(self) -> Iterator[tuple[Any, int, float, StreamState | None] | Problem]:
        try:
            cursor, positions = Cursor(self.data), self.positions
            if self.saved is not None:
                cursor.seek(self.saved, position_of(positions.start - 1, positions.skipped) + 1)
            for step in positions.steps():
                yield from self._step(cursor, step)
        except TaskError as error:
            # Yield the problem instead of raising an error, because a DataLoader would replace the error with
            # an error of its own.
            yield error.problem

    def _step(
        self, cursor: Cursor, step: StepSamples
    ) -> Iterator[tuple[Any, int, float, StreamState | None]]:
        last, requests = step.stop - 1, self.positions.requests(step)
        request = next(requests, None)
        items: list[object] = []
        ready: tuple[Any, int, float] | None = None
        for number in range(step.start, step.stop):
            position = position_of(number, self.positions.skipped)
            for skipped in range(position_of(number - 1, self.positions.skipped) + 1, position):
                cursor.next(skipped)
            before = cursor.where() if number == last and self.takes_state else None
            item = cursor.next(position)
            if request is None or number < request.first:
                continue  # another rank collates this sample
            items.append(item)
            if number == request.stop - 1:
                if ready is not None:
                    yield *ready, None
                seed, first = self.data.config.seed, request.position
                seed_generators(stable_key(seed, "train", "collate", first))
                ready, items = (self.collate(items), stable_key(seed, "train", "pass", first), 1.0), []
                request = next(requests, None)
        # Yield the last microbatch only after the other ranks' samples have been read, so that its
        # StreamState covers these samples too.
        assert ready is not None
        yield *ready, None if before is None else StreamState(*before, digest_of(item))


def stream_batches(
    data: StreamData,
    collate: Callable[[list[object]], Any],
    positions: Positions,
    saved: StreamState | None,
    takes_state: bool,
    pin_memory: bool,
) -> TaskBatches:
    """Return the batches of a stream; a worker process reads ahead unless `data.num_workers` is 0."""
    num_workers = data.config.data.num_workers
    if takes_state and saved is not None and saved.samples and not data.continues_at(saved):
        log.info(f"skipping {saved.samples:,} samples of epoch {saved.epoch} of the stream")
    loader = ForkedLoader(
        _Reader(data, collate, positions, saved, takes_state),
        min(1, num_workers),
        prefetch=PREFETCH * num_workers,
        pin_memory=pin_memory,
    )
    return TaskBatches(loader, positions)
