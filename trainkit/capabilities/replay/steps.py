"""Which attempt of a run computed a step, which samples the step has, and from which documents they come."""

from __future__ import annotations

import gzip
import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from shlex import join
from typing import Any

import numpy as np

from trainkit.capabilities.texts.inputs import FORMS, ROWS, TEXT, dataset_spec, find_inputs
from trainkit.capabilities.texts.prepare import INPUTS_FILE
from trainkit.capabilities.texts.tokenize import Tokenizer
from trainkit.config.schema import RunConfig
from trainkit.config.training import DataConfig
from trainkit.data.dataset_file import BYTES, PLACES, places_file
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
from trainkit.run.own_folders import own_environ
from trainkit.run.record import JobRecord, read_job
from trainkit.run.rundir import AttemptDir, RunDir


@dataclass(frozen=True)
class Start:
    """The event ``training`` of an attempt: where it began, and on what; None where it does not say."""

    time: str | None = None
    step: int = 0
    total_steps: int = 0
    samples_seen: int = 0
    num_samples: int | None = None
    """None for a stream."""
    data: str | None = None
    """The fingerprint of the data."""
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
    """A step of a run: who computed it, and where its samples are in the sequence of all samples."""

    step: int
    attempt: AttemptDir
    job: JobRecord
    """The job.json of the run."""
    config: RunConfig
    plan: LaunchPlan
    start: int
    """Position of its first sample."""
    stop: int
    is_stream: bool
    """Whether the samples come from a stream and have no position."""
    began: Start = field(default_factory=Start)


@dataclass(frozen=True)
class StepSample:
    """One sample of a step."""

    position: int
    """In the sequence of all samples, over all epochs."""
    index: int
    """In the dataset."""
    ranks: tuple[int, ...]
    """The ranks that read it: several if they share the work on a sample."""
    microbatch: int
    documents: tuple[Document, ...] = ()
    text: str = ""
    """Of a user's task: the shortened repr of the item."""


def attempt_starts(run: RunDir) -> dict[int, Start]:
    """Where each attempt began."""
    return {
        event.attempt: read_record(Start, event.values)
        for event in read_events(run, "training")
        if event.attempt is not None and event.count("samples_seen") is not None
    }


def find_step(run: RunDir, step: int) -> RunStep:
    """A step of a run, by the newest attempt that computed it, else the one that would.

    Raises UsageError for a step that the run does not have.
    """
    _refuse_other_runs(run)
    started = attempt_starts(run)
    if not started:
        raise UsageError(
            f"{run.shown} has not begun to train",
            hint="steps are known once the first attempt of the built-in trainer has loaded its data",
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
            hint="a run copied from another has no earlier ones",
        )
    attempt = run.attempt(number)
    config, plan = config_and_plan(attempt)
    degrees, batch = vars(plan.layout).values(), plan.batch
    if min(*degrees, batch.device_batch_size) < 1 or plan.layout.world_size != plan.world_size:
        raise UsageError(
            f"{attempt.plan_file} is damaged: its layout is not that of {plural(plan.world_size, 'rank')}",
            hint="restore the file, or look at a step of another attempt",
        )
    known = [(started[number].step, started[number].samples_seen)]
    own = [record for record in records if record.attempt == number and record.step < step]
    known += [(record.step, seen) for record in own if (seen := record.count("samples_seen")) is not None]
    at, samples_seen = max(known)
    size = plan.batch.global_batch_size
    start = samples_seen + (step - 1 - at) * size
    job, stop = read_job(run), start + size
    if config.train.epochs is not None and newest.num_samples is not None:
        stop = min(stop, round(config.train.epochs * newest.num_samples))
    return RunStep(step, attempt, job, config, plan, start, stop, newest.num_samples is None, started[number])


def _refuse_other_runs(run: RunDir) -> None:
    """Raise UsageError for a run of a COMMAND, whose steps only the command knows, and for a replay."""
    refuse_replay(run)
    numbers = run.attempt_numbers()
    plan = read_plan(run.attempt(numbers[-1]) if numbers else run)
    if plan.is_command:
        command = plan.texts("command")
        raise UsageError(
            f"{run.shown} runs a command, {join(command)!r}, whose steps trainkit does not know",
            hint="only runs of the built-in trainer, also with your own task, can be replayed",
        )


def step_samples(at: RunStep) -> list[StepSample]:
    """The samples of a step in their order; prepares the data again if its cache is gone.

    Raises UsageError for a stream and for data that cannot be read, TrainkitError if a user's task fails.
    """
    if at.is_stream:
        raise UsageError(
            f"{at.attempt.run.shown} trains on a stream, whose samples have no position",
            hint="only datasets with a length can be read at any step",
        )
    config = at.config
    with submission_folder(at.job):
        if not config.has_decoder:
            return list(_items(at))
        data = open_dataset(config.data, config.data.seq_len, "train")
        refuse_other_data(at.attempt.number, at.began.data, data.fingerprint)
        sources = SampleSources(config.data, data)
        positions = np.arange(at.start, at.stop, dtype=np.int64)
        indices = data.sample_index(positions, config.seed, config.data.shuffle).tolist()
        return [
            StepSample(position, index, *_reader(at, position), tuple(sources.documents(index)))
            for position, index in zip(positions.tolist(), indices, strict=True)
        ]


def refuse_other_data(attempt: int, before: str | None, now: str | None) -> None:
    """Raise UsageError if the fingerprint of the data is not that of an attempt; None is unknown."""
    if before is not None and now is not None and before != now:
        raise UsageError(
            f"the training data has changed since attempt {attempt}: its steps had other samples",
            hint="restore it (for `stdlib`, the Python version too)",
        )


def _reader(at: RunStep, position: int) -> tuple[tuple[int, ...], int]:
    """The ranks that read a position, and their microbatch."""
    layout = at.plan.layout
    microbatch, dp_rank = divmod((position - at.start) // at.plan.batch.device_batch_size, layout.dp)
    ranks = tuple(rank for rank in range(layout.world_size) if layout.dp_rank(rank) == dp_rank)
    return ranks, microbatch


def _items(at: RunStep) -> Iterator[StepSample]:
    """The items of a user's task, which another process reads: only the trainer may import torch."""
    request = {"run": str(at.attempt.run.path), "attempt": at.attempt.number}
    request |= {"start": at.start, "stop": at.stop}
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
    for position, (index, text) in zip(range(at.start, at.stop), found["items"], strict=True):
        yield StepSample(position, index, *_reader(at, position), text=text)


_BLOCK = 1 << 20


@dataclass(frozen=True)
class Document:
    """A part of a sample that comes from one document, or from one text file."""

    file: str
    """The source file; the shard of a dataset of an older version, which does not know it."""
    unit: str
    """What `position` counts: ``byte`` of a text from 0, ``line`` or ``row`` from 1, ``token`` of a shard."""
    position: int
    skipped_tokens: int
    """Tokens of the document before the sample; 0 for a text file, whose `position` counts them."""
    num_tokens: int
    text: str
    """Of these tokens."""

    @property
    def where(self) -> str:
        """The position in words: ``corpus.jsonl line 7``; a file in the current folder is relative to it."""
        return f"{shown_path(self.file)} {self.unit} {self.position:,}"


class SampleSources:
    """Where the samples of a dataset come from."""

    def __init__(self, config: DataConfig, data: TokenShards | TokenMixture) -> None:
        parts = data.parts if isinstance(data, TokenMixture) else (data,)
        self._sources = [_Source(*item) for item in zip(components(config), parts, strict=True)]
        self._ends = np.cumsum([part.num_samples for part in parts], dtype=np.int64)

    def documents(self, index: int) -> list[Document]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        before = int(self._ends[number - 1]) if number else 0
        return list(self._sources[number].documents(index - before))


class _Source:
    """Where the samples of one prepared folder come from."""

    def __init__(self, config: DataConfig, data: TokenShards) -> None:
        self._config, self._data = config, data
        self._places = lru_cache(maxsize=64)(_read_places)

    @cached_property
    def _files(self) -> Sequence[str]:
        """Inputs by number: their paths, or in a prepared folder, which may be a copy, their names."""
        if prepared_folder(self._config) is None:
            return [source.path for source in find_inputs(dataset_spec(self._config))]
        return [str(record["name"]) for record in read_json(self._data.folder / INPUTS_FILE)]

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        """None if it is not known: a prepared folder has only its name."""
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
                # The pieces of a text file follow each other.
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
        """The length of the text of some tokens, as far as the tokenizer restores it."""
        if self._data.tokenizer.kind == BYTES:
            return stop - first
        return len(self._text(shard, first, stop).encode())

    def _text(self, shard: Path, first: int, stop: int) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(self._data.tokens_of(shard, first, stop))


def _read_places(file: Path) -> Any:
    """The places of a shard's texts; None for a dataset of an older version."""
    return np.fromfile(file, dtype=PLACES) if file.is_file() else None


def _continues(place: Any, following: Any) -> bool:
    return bool(
        FORMS[int(place["form"])] == TEXT
        and following["input"] == place["input"]
        and following["form"] == place["form"]
    )


class _LineCounter:
    """Counts the lines of one file before some bytes; reads a file that is not compressed about once."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._counts = [0]
        """Line ends before each block that was counted, and after the last one."""

    def count(self, end: int) -> int:
        """The number of line ends in the first `end` bytes, decompressed."""
        with gzip.open(self._file) if self._file.endswith(".gz") else open(self._file, "rb") as stream:
            block = min(end // _BLOCK, len(self._counts) - 1)
            stream.seek(block * _BLOCK)
            while (block + 1) * _BLOCK <= end:
                self._counts.append(self._counts[block] + stream.read(_BLOCK).count(b"\n"))
                block += 1
            return self._counts[block] + stream.read(end - block * _BLOCK).count(b"\n")


_line_counter = lru_cache(maxsize=64)(_LineCounter)
