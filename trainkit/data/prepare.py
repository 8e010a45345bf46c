"""Turns texts into a folder of token shards, with several processes and in constant memory.

The work is cut into units that know nothing of each other; each publishes its shards by rename and a small
record last. So a prepare that was killed goes on where it was, and the result is the same to the byte
whatever the number of workers and interruptions. `dataset.json` comes last of all.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from trainkit import rundir
from trainkit.data.dataset_file import (
    SPLITS,
    TRAIN,
    DatasetFile,
    Shard,
    TokenizerIdentity,
    is_dataset,
    read_dataset_file,
    write_shared_json,
)
from trainkit.data.lock import exclusive
from trainkit.data.recipe import Recipe
from trainkit.data.sources import find_inputs
from trainkit.data.tokenize_unit import WORK_FOLDER, UnitJob, digest_unit, run_unit
from trainkit.data.tokenizer import token_dtype
from trainkit.data.tokenizer_identity import identify
from trainkit.data.units import LAYOUT_VERSION, UNIT_BYTES, plan_units
from trainkit.errors import TrainkitError, UsageError

J = TypeVar("J")
R = TypeVar("R")


def run_all(
    function: Callable[[J], R], jobs: Sequence[J], workers: int, on_done: Callable[[int], None]
) -> list[R]:
    """The results in the order of the jobs; `on_done` is called with the number of each job as it ends.

    One worker, or one job, runs in this process. The first failure ends the others and is raised;
    TrainkitError when a worker was killed.
    """
    num_workers = min(workers, len(jobs))
    if num_workers <= 1:
        return [_run_here(function, job, number, on_done) for number, job in enumerate(jobs)]
    lifeline, end = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, initializer=_begin_worker, initargs=(lifeline,))
    results: dict[int, R] = {}
    try:
        numbers = {pool.submit(function, job): number for number, job in enumerate(jobs)}
        for future in as_completed(numbers):
            results[numbers[future]] = future.result()
            on_done(numbers[future])
    except BrokenProcessPool:
        raise TrainkitError(
            "a worker process was killed, most likely for want of memory",
            hint="start the same command again with fewer workers: it goes on where it was",
        ) from None
    finally:
        if len(results) < len(jobs):
            end.close()  # nobody waits for work that is not wanted any more
        pool.shutdown(wait=True, cancel_futures=True)
        end.close()
        lifeline.close()
    return [results[number] for number in range(len(jobs))]


def _run_here(function: Callable[[J], R], job: J, number: int, on_done: Callable[[int], None]) -> R:
    result = function(job)
    on_done(number)
    return result


def _begin_worker(lifeline: Connection) -> None:
    """Leave signals to the parent, cores to the other workers, and die with the parent.

    A terminal or a scheduler signals the whole group; what the parent does then is its decision.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_follow, args=(lifeline,), daemon=True).start()


def _follow(lifeline: Connection) -> None:
    """Only the parent holds the other end, which closes when it dies."""
    with suppress(EOFError):
        lifeline.recv()
    os._exit(1)


PLAN_FILE = "plan.json"
"""What was begun, while the folder is not finished."""
INPUTS_FILE = "inputs.json"
"""Apart from dataset.json, which every training process reads: there may be a million inputs."""
OnProgress = Callable[[int, int], None]
"""Called with the bytes of source that are done and those in all."""


@dataclass(frozen=True)
class InputDigest:
    """One source file as it was when it was tokenised."""

    name: str
    role: str
    """``both`` when the file was cut into the two splits, else the split that it went to."""
    size: int
    """Bytes on disk."""
    sha256: str
    """Of the content as it was tokenised, after decompression."""


@dataclass(frozen=True)
class Prepared:
    """What `prepare` left in a folder."""

    folder: Path
    file: DatasetFile
    was_there: bool
    """True when the folder held the same dataset already and nothing was done."""


def prepare(
    recipe: Recipe,
    folder: Path,
    workers: int = 1,
    on_progress: OnProgress | None = None,
    unit_bytes: int = UNIT_BYTES,
) -> Prepared:
    """Make `folder` the dataset of a recipe, going on with what a killed prepare left there.

    Raises UsageError for sources that cannot be used and for a folder that holds anything else, TrainkitError
    when the disk is full or a worker was killed.
    """
    work = _Work(folder, recipe, unit_bytes, workers, on_progress)
    try:
        return _make_or_compare(work, folder)
    except OSError as error:
        raise TrainkitError(
            f"cannot write to {folder}: {error.strerror or error}",
            hint="make room there, or the right to write, and start the same command again: "
            "it goes on where it was",
        ) from error


def _make_or_compare(work: _Work, folder: Path) -> Prepared:
    if not is_dataset(folder):
        _make_work_folder(folder)
        with exclusive(
            folder / WORK_FOLDER / "lock", busy=f"another process is preparing {folder}", wait=False
        ):
            if not is_dataset(folder):
                return Prepared(folder, work.make(), was_there=False)
    return Prepared(folder, work.compare(), was_there=True)


class _Work:
    """One recipe and where it goes."""

    def __init__(
        self, folder: Path, recipe: Recipe, unit_bytes: int, workers: int, on_progress: OnProgress | None
    ) -> None:
        self.folder = folder
        self.workers = workers
        self.on_progress = on_progress
        self.tokenizer = identify(recipe.tokenizer)
        self.inputs = find_inputs(recipe)
        self.options = _options(recipe, unit_bytes)
        self.jobs = [
            UnitJob(folder, recipe, unit, {part.input: self.inputs[part.input] for part in unit.parts})
            for unit in plan_units(self.inputs, recipe.split_fraction, unit_bytes)
        ]

    def make(self) -> DatasetFile:
        self._begin()
        missing = [job for job in self.jobs if not job.record_file.exists()]
        self._run(run_unit, missing)
        records = [rundir.read_json(job.record_file) for job in self.jobs]
        inputs = self._digests([record["digests"] for record in records])
        splits = {
            split: tuple(Shard(**record["shards"][split]) for record in records if split in record["shards"])
            for split in SPLITS
        }
        fingerprint = _fingerprint(self.tokenizer, self.options, inputs)
        dtype = token_dtype(self.tokenizer.vocab_size)
        file = DatasetFile(self.tokenizer, dtype, fingerprint, self.options, splits)
        self._check_not_empty(file)
        staging = self.folder / WORK_FOLDER
        write_shared_json(self.folder / INPUTS_FILE, [asdict(source) for source in inputs], staging)
        file.write(self.folder, staging)
        shutil.rmtree(self.folder / WORK_FOLDER)
        return file

    def compare(self) -> DatasetFile:
        """The finished dataset that is there; UsageError when it was made from anything else."""
        file = read_dataset_file(self.folder)
        wanted = [(source.name, source.role, source.size) for source in self.inputs]
        if file.tokenizer != self.tokenizer:
            raise _different(self.folder, f"made with the tokenizer {file.tokenizer.name}")
        if file.options != self.options:
            raise _different(self.folder, f"made with {_changed(file.options, self.options)}")
        known = [InputDigest(**record) for record in rundir.read_json(self.folder / INPUTS_FILE)]
        if [(source.name, source.role, source.size) for source in known] != wanted:
            raise _different(self.folder, "made from other files")
        if self._digests(self._run(digest_unit, self.jobs)) != known:
            raise _different(self.folder, "made from files that have changed since")
        shutil.rmtree(self.folder / WORK_FOLDER, ignore_errors=True)
        return file

    def _begin(self) -> None:
        """Record what is being made, or see that what was begun here is the same."""
        plan_file = self.folder / WORK_FOLDER / PLAN_FILE
        inputs = [{**asdict(source), "path": None} for source in self.inputs]
        plan = {"tokenizer": asdict(self.tokenizer), "options": self.options, "inputs": inputs}
        if plan_file.exists():
            if rundir.read_json(plan_file) != plan:
                raise _different(self.folder, "begun with other options, or its sources have changed since")
            for partial in plan_file.parent.glob("*.bin.*"):
                partial.unlink()  # of a worker that was killed
            return
        rundir.write_json(plan_file, plan)

    def _run(self, function: Callable[[UnitJob], Any], jobs: list[UnitJob]) -> list[Any]:
        total = sum(job.unit.num_bytes for job in self.jobs)
        done = total - sum(job.unit.num_bytes for job in jobs)

        def on_done(number: int) -> None:
            nonlocal done
            done += jobs[number].unit.num_bytes
            if self.on_progress:
                self.on_progress(done, total)

        return run_all(function, jobs, self.workers, on_done)

    def _digests(self, by_unit: list[list[str]]) -> list[InputDigest]:
        """One digest an input: of its content, or of the digests of its parts where it was cut."""
        found: list[list[str]] = [[] for _ in self.inputs]
        for job, digests in zip(self.jobs, by_unit, strict=True):
            for part, digest in zip(job.unit.parts, digests, strict=True):
                found[part.input].append(digest)
        return [
            InputDigest(
                source.name,
                source.role,
                source.size,
                digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest(),
            )
            for source, digests in zip(self.inputs, found, strict=True)
        ]

    def _check_not_empty(self, file: DatasetFile) -> None:
        if not file.num_tokens(TRAIN):
            raise UsageError(
                "the sources hold no text to train on", hint="give files with text, or a smaller val_fraction"
            )


def _make_work_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    others = sorted(entry.name for entry in folder.iterdir() if entry.name != WORK_FOLDER)
    if others and not (folder / WORK_FOLDER / PLAN_FILE).exists():
        raise UsageError(
            f"{folder} is not empty and holds no dataset: {others[0]} is in it", hint="choose another folder"
        )
    (folder / WORK_FOLDER).mkdir(exist_ok=True)


def _options(recipe: Recipe, unit_bytes: int) -> dict[str, Any]:
    """All that decides about the tokens, besides the tokenizer and the text."""
    return {
        "layout": LAYOUT_VERSION,
        "unit_bytes": unit_bytes,
        "val_fraction": recipe.split_fraction,
        "text_key": recipe.text_key,
    }


def _changed(old: dict[str, Any], new: dict[str, Any]) -> str:
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return ", ".join(f"{key} {old.get(key)} instead of {new.get(key)}" for key in keys)


def _fingerprint(tokenizer: TokenizerIdentity, options: dict[str, Any], inputs: list[InputDigest]) -> str:
    identity = {key: value for key, value in asdict(tokenizer).items() if key != "name"}
    content = {"tokenizer": identity, "options": options, "inputs": [asdict(source) for source in inputs]}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class OtherDataset(UsageError):
    """A folder holds a dataset, or the beginning of one, that was made in another way."""


def _different(folder: Path, how: str) -> OtherDataset:
    return OtherDataset(
        f"{folder} holds another dataset: it was {how}", hint="choose another folder; nothing was overwritten"
    )


_SECONDS_BETWEEN_LINES = 10.0
_MIB = 1 << 20


@contextmanager
def show_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function that takes the bytes that are done and those in all."""
    if not sys.stderr.isatty():
        yield _Lines(what)
        return
    from rich.console import Console  # 50 ms that only a terminal needs
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    def __init__(self, what: str) -> None:
        self.what = what
        self.next_time = time.monotonic() + _SECONDS_BETWEEN_LINES

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() < self.next_time:
            return
        self.next_time = time.monotonic() + _SECONDS_BETWEEN_LINES
        print(f"{self.what}: {done / _MIB:,.0f} of {total / _MIB:,.0f} MiB", file=sys.stderr, flush=True)
