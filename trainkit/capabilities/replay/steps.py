"""Finds the attempt that computed a step, the samples in the step, and their source documents."""

from __future__ import annotations

import gzip
import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from shlex import join
from typing import Any, TypedDict

import numpy as np

from trainkit.capabilities.texts.inputs import FORMS, ROWS, TEXT, dataset_spec, find_inputs
from trainkit.capabilities.texts.prepare import INPUTS_FILE
from trainkit.capabilities.texts.tokenize import Tokenizer
from trainkit.config.schema import RunConfig
from trainkit.config.training import DataConfig
from trainkit.data.dataset_file import BYTES, PLACES, places_file
from trainkit.data.order import positions_of
from trainkit.data.shards import TokenMixture, TokenShards, open_dataset
from trainkit.data.sources import components, prepared_folder
from trainkit.errors import TrainkitError, UsageError
from trainkit.folders import shown_path
from trainkit.formats import plural
from trainkit.job.processes import module_argv
from trainkit.launch.repeat import config_and_plan, refuse_replay, submission_folder
from trainkit.plan.launch import LaunchPlan
from trainkit.run.events import read_events, training_curve
from trainkit.run.files import read_json, read_record
from trainkit.run.history import read_plan
from trainkit.run.manifest import Checkpoint, published
from trainkit.run.own_folders import own_environ
from trainkit.run.record import JobRecord, read_job
from trainkit.run.rollbacks import (
    Ranges,
    Rollback,
    SavedPosition,
    in_line,
    merged,
    number_before,
    read_rollbacks,
)
from trainkit.run.rundir import AttemptDir, RunDir


@dataclass(frozen=True)
class Start:
    """The ``training`` event of an attempt, with its first data position, data, libraries and hardware."""

    time: str | None = None
    step: int = 0
    total_steps: int = 0
    samples_seen: int = 0
    num_samples: int | None = None
    """The number of samples in the dataset; None for a stream."""
    data: str | None = None
    """The fingerprint of the training data."""
    trainkit: str | None = None
    torch: str | None = None
    processor: str | None = None
    threads: int | None = None
    cudnn: int | None = None
    nccl: str | None = None
    triton: str | None = None
    driver: str | None = None


@dataclass(frozen=True)
class RunStep:
    """A step of a run, with the attempt that computed it and the positions of the step's samples."""

    step: int
    attempt: AttemptDir
    job: JobRecord
    """The contents of the run's job.json."""
    config: RunConfig
    plan: LaunchPlan
    start: int
    """The number of samples that were trained before the step."""
    stop: int
    """The number of samples that were trained up to the end of the step."""
    is_stream: bool
    """True if the samples come from a stream and therefore have no positions."""
    began: Start = field(default_factory=Start)
    rollbacks: tuple[Rollback, ...] = ()
    """The rollbacks of the run before the attempt."""

    @property
    def positions(self) -> list[int]:
        """Return the positions of the step's samples in the sequence of all samples, over all epochs."""
        found: list[int] = positions_of(range(self.start, self.stop), self.skipped).tolist()
        return found

    @property
    def skipped(self) -> Ranges:
        """Return the positions of the samples that the attempt leaves out."""
        return merged(*(item.skipped for item in self.rollbacks))

    def checkpoints_before(self, step: int) -> list[Checkpoint]:
        """Return the checkpoints before a step with which the attempt continues, oldest first."""
        there = in_line(published(self.attempt.run.checkpoints_dir), self.rollbacks)
        return [one for one in there if one.step < step and self._continues(one)]

    def _continues(self, checkpoint: Checkpoint) -> bool:
        try:
            return SavedPosition.of(checkpoint).num_rollbacks <= len(self.rollbacks)
        except (OSError, ValueError):
            return True  # the trainer rejects a damaged checkpoint


@dataclass(frozen=True)
class StepSample:
    """One sample of a step."""

    position: int
    """The sample's position in the sequence of all samples, over all epochs."""
    index: int
    """The sample's index in the dataset."""
    ranks: tuple[int, ...]
    """The ranks that read the sample; more than one if several ranks process the same sample, as in tensor
    parallelism."""
    microbatch: int
    documents: tuple[Document, ...] = ()
    text: str = ""
    """The shortened repr of the item; empty unless the run trains a user-defined task."""


class StepJson(TypedDict):
    """The samples of a step, in the order of the global batch."""

    step: int
    attempt: int
    """The newest attempt that computed the step, or that will compute it."""
    samples: list[StepSample]


def attempt_starts(run: RunDir) -> dict[int, Start]:
    """Return a mapping from each attempt number to the attempt's `Start`."""
    return {
        event.attempt: read_record(Start, event.values)
        for event in read_events(run, "training")
        if event.attempt is not None and event.count("samples_seen") is not None
    }


def find_step(run: RunDir, step: int) -> RunStep:
    """Return a step as it was computed by the newest attempt that reached it, or as it will be computed.

    Raises UsageError if the step is beyond the last step of the run.
    """
    _refuse_other_runs(run)
    started = attempt_starts(run)
    if not started:
        raise UsageError(
            f"{run.shown} has not started training",
            hint="wait until the built-in trainer has loaded its data",
        )
    newest = started[max(started)]
    if not 1 <= step <= newest.total_steps:
        raise UsageError(f"{run.shown} has no step {step}", hint=f"its steps are 1 to {newest.total_steps}")
    records = [record for record in training_curve(run) if record.attempt is not None]
    last = dict.fromkeys(started, 0) | {record.attempt: record.step for record in records}
    able = [number for number in sorted(started) if started[number].step < step]
    number = next((number for number in reversed(able) if last[number] >= step), able[-1] if able else None)
    if number is None:
        raise UsageError(
            f"no attempt of {run.shown} computed step {step}",
            hint="a run that was copied from another run lacks the steps before the copy",
        )
    attempt = run.attempt(number)
    config, plan = config_and_plan(attempt)
    rollbacks = tuple(item for item in read_rollbacks(run) if item.attempt < number)
    degrees, batch = vars(plan.layout).values(), plan.batch
    if min(*degrees, batch.device_batch_size) < 1 or plan.layout.world_size != plan.world_size:
        raise UsageError(
            f"{attempt.plan_file} is damaged: its layout does not fit {plural(plan.world_size, 'rank')}",
            hint="restore the file, or choose a step of another attempt",
        )
    known = [(started[number].step, started[number].samples_seen)]
    own = [record for record in records if record.attempt == number and record.step < step]
    known += [(record.step, seen) for record in own if (seen := record.count("samples_seen")) is not None]
    at, samples_seen = max(known)
    start = samples_seen + plan.batch.num_samples(at, step - 1 - at)
    job, stop = read_job(run), start + plan.batch.after(step - 1).global_batch_size
    if config.train.epochs is not None and newest.num_samples is not None:
        skipped = merged(*(item.skipped for item in rollbacks))
        stop = min(stop, number_before(round(config.train.epochs * newest.num_samples), skipped))
    is_stream, began = newest.num_samples is None, started[number]
    return RunStep(step, attempt, job, config, plan, start, stop, is_stream, began, rollbacks)


def _refuse_other_runs(run: RunDir) -> None:
    """Raise UsageError for a replay or a run of a COMMAND, because its steps cannot be recomputed."""
    refuse_replay(run)
    numbers = run.attempt_numbers()
    plan = read_plan(run.attempt(numbers[-1]) if numbers else run)
    if plan.is_command:
        command = plan.texts("command")
        raise UsageError(
            f"{run.shown} runs a command, {join(command)!r}, whose steps are unknown to trainkit",
            hint="only runs of the built-in trainer, including your own tasks, can be replayed",
        )


def step_samples(at: RunStep) -> list[StepSample]:
    """Return the samples of a step in order, preparing the data again if the data cache was deleted.

    Raises UsageError if the run trains on a stream or the data cannot be read, and TrainkitError if a user's
    task fails.
    """
    if at.is_stream:
        raise UsageError(
            f"{at.attempt.run.shown} trains on a stream, whose samples have no positions",
            hint="`trainkit data show` needs a dataset with a length",
        )
    config = at.config
    with submission_folder(at.job):
        if not config.has_decoder:
            return list(_items(at))
        data = open_dataset(config.data, config.data.seq_len, "train")
        refuse_other_data(at.attempt.number, at.began.data, data.fingerprint)
        sources = SampleSources(config.data, data)
        indices = data.sample_index(np.array(at.positions), config.seed, config.data.shuffle).tolist()
        return [
            StepSample(position, index, *_reader(at, number), tuple(sources.documents(index)))
            for number, (position, index) in enumerate(zip(at.positions, indices, strict=True))
        ]


def refuse_other_data(attempt: int, before: str | None, now: str | None) -> None:
    """Raise UsageError if two fingerprints of the data differ; None means that a fingerprint is unknown."""
    if before is not None and now is not None and before != now:
        raise UsageError(
            f"the training data has changed since attempt {attempt}, so the steps would contain "
            f"different samples",
            hint="restore the original data; for `stdlib`, use the original Python version",
        )


def _reader(at: RunStep, number: int) -> tuple[tuple[int, ...], int]:
    """Return the ranks that read a sample of a step, and the number of its microbatch.

    `number` is the place of the sample in the step, counted from 0.
    """
    layout = at.plan.layout
    microbatch, dp_rank = divmod(number // at.plan.batch.device_batch_size, layout.dp)
    ranks = tuple(rank for rank in range(layout.world_size) if layout.dp_rank(rank) == dp_rank)
    return ranks, microbatch


def _items(at: RunStep) -> Iterator[StepSample]:
    """Read the items of a user's task in another process, because this process must not import torch."""
    request = {"run": str(at.attempt.run.path), "attempt": at.attempt.number}
    request |= {"positions": at.positions}
    argv = module_argv("trainkit.capabilities.replay.items")
    done = subprocess.run(
        argv,
        input=json.dumps(request),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env=own_environ(),
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["killed"])[-1].strip()
        raise TrainkitError(
            f"the samples of {at.config.task} cannot be read: {last}",
            hint="`trainkit data validate CONFIG` reads every sample",
        )
    found = json.loads(done.stdout.splitlines()[-1])
    refuse_other_data(at.attempt.number, at.began.data, found["data"])
    for number, (position, (index, text)) in enumerate(zip(at.positions, found["items"], strict=True)):
        yield StepSample(position, index, *_reader(at, number), text=text)


_BLOCK = 1 << 20


@dataclass(frozen=True)
class Document:
    """The part of a sample that comes from one document or text file."""

    file: str
    """The source file, or the data shard if an older trainkit version prepared the dataset."""
    unit: str
    """The unit of `position`: a ``byte`` or ``token`` position counts from 0, a ``line`` or ``row`` from
    1."""
    position: int
    skipped_tokens: int
    """Number of tokens of the document that precede the sample; 0 for a text file."""
    num_tokens: int
    text: str
    """The text of this part of the sample."""

    @property
    def where(self) -> str:
        """The position as text, such as ``corpus.jsonl line 7``; long paths are shortened."""
        return f"{shown_path(self.file)} {self.unit} {self.position:,}"


class SampleSources:
    """Finds the source documents for each sample of a dataset."""

    def __init__(self, config: DataConfig, data: TokenShards | TokenMixture) -> None:
        parts = data.parts if isinstance(data, TokenMixture) else (data,)
        self._sources = [_Source(*item) for item in zip(components(config), parts, strict=True)]
        self._ends = np.cumsum([part.num_samples for part in parts], dtype=np.int64)

    def documents(self, index: int) -> list[Document]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        before = int(self._ends[number - 1]) if number else 0
        return list(self._sources[number].documents(index - before))


class _Source:
    """Finds the source documents for each sample of one prepared folder."""

    def __init__(self, config: DataConfig, data: TokenShards) -> None:
        self._config, self._data = config, data
        self._places = lru_cache(maxsize=64)(_read_places)

    @cached_property
    def _files(self) -> Sequence[str]:
        """Return the paths of the input files, or only their names if the prepared folder may be a copy."""
        if prepared_folder(self._config) is None:
            return [source.path for source in find_inputs(dataset_spec(self._config))]
        return [str(record["name"]) for record in read_json(self._data.folder / INPUTS_FILE)]

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer that was used to prepare the text, or None if it is unknown."""
        name = self._config.tokenizer
        if self._data.tokenizer.kind == BYTES:
            return Tokenizer(BYTES)
        return None if name == BYTES else Tokenizer(name)

    def documents(self, index: int) -> Iterator[Document]:
        for shard, first, stop in self._data.places(index):
            places = self._places(places_file(shard))
            if places is None:
                yield Document(str(shard), "token", first, 0, stop - first, self._text(shard, first, stop))
                continue
            at = int(np.searchsorted(places["token"], first, side="right")) - 1
            while first < stop:
                place = places[at]
                # Treat consecutive chunks of a text file as one document.
                while at + 1 < len(places) and _continues(place, places[at + 1]):
                    at += 1
                end = int(places[at + 1]["token"]) if at + 1 < len(places) else stop
                yield self._document(shard, place, first, min(end, stop))
                first, at = min(end, stop), at + 1

    def _document(self, shard: Path, place: Any, first: int, stop: int) -> Document:
        form, position, skipped = FORMS[int(place["form"])], int(place["place"]), first - int(place["token"])
        file, unit = self._files[int(place["input"])], "row"
        if form == TEXT:
            unit, position = "byte", position + self._num_bytes(shard, int(place["token"]), first)
            skipped = 0
        elif form == ROWS and Path(file).is_file():
            unit, position = "line", _line_counter(file).count(position) + 1
        elif form == ROWS:
            unit = "byte"
        return Document(file, unit, position, skipped, stop - first, self._text(shard, first, stop))

    def _num_bytes(self, shard: Path, first: int, stop: int) -> int:
        """Return the number of bytes that tokens encode; exact if decoding restores the original text."""
        if self._data.tokenizer.kind == BYTES:
            return stop - first
        return len(self._text(shard, first, stop).encode())

    def _text(self, shard: Path, first: int, stop: int) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(self._data.tokens_of(shard, first, stop))


def _read_places(file: Path) -> Any:
    """Return the document positions of a shard, or None if an older trainkit version prepared the dataset."""
    return np.fromfile(file, dtype=PLACES) if file.is_file() else None


def _continues(place: Any, following: Any) -> bool:
    return bool(
        FORMS[int(place["form"])] == TEXT
        and following["input"] == place["input"]
        and following["form"] == place["form"]
    )


class _LineCounter:
    """Counts newlines before a position in a file; in total, an uncompressed file is read about once."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._counts = [0]
        """Number of newlines before each counted block, and after the last counted block."""

    def count(self, end: int) -> int:
        """Return the number of newlines in the first `end` bytes of the decompressed file."""
        with gzip.open(self._file) if self._file.endswith(".gz") else open(self._file, "rb") as stream:
            block = min(end // _BLOCK, len(self._counts) - 1)
            stream.seek(block * _BLOCK)
            while (block + 1) * _BLOCK <= end:
                self._counts.append(self._counts[block] + stream.read(_BLOCK).count(b"\n"))
                block += 1
            return self._counts[block] + stream.read(end - block * _BLOCK).count(b"\n")


_line_counter = lru_cache(maxsize=64)(_LineCounter)
