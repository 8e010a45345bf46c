"""Tokenizes texts into a folder of token shards, using several processes and constant memory.

The texts are divided into independent units. For each unit, the shards are first renamed to their final
names, and then a record is written. Therefore, an interrupted preparation can resume where it stopped, and
the result is byte-identical for any number of workers and interruptions. The file `dataset.json` is written
last. During preparation, the lock acquired by `exclusive` prevents other processes from writing to the
folder.
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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from trainkit.capabilities.texts.inputs import DatasetSpec, find_inputs
from trainkit.capabilities.texts.tokenize import WORK_FOLDER, digest_unit, record_file, run_unit, token_dtype
from trainkit.capabilities.texts.units import UNIT_BYTES, Unit, plan_units
from trainkit.data.dataset_file import (
    LAYOUT_VERSION,
    SPLITS,
    TRAIN,
    DatasetFile,
    Options,
    Shard,
    TokenizerIdentity,
    identify,
    is_dataset,
    read_dataset_file,
    write_shared_json,
)
from trainkit.errors import TrainkitError, UsageError
from trainkit.folders import ensure_folder, shown_path
from trainkit.locks import LockBusy, LockUnsupported, NotALock, file_lock
from trainkit.run import files

J = TypeVar("J")
R = TypeVar("R")


class PreparedJson(TypedDict):
    """A dataset that was prepared for training."""

    folder: str
    was_there: bool
    """True if the folder already contained this dataset."""
    num_tokens: dict[str, int]
    """Maps each split to its number of tokens."""
    num_shards: int
    tokenizer: TokenizerIdentity
    fingerprint: str
    """Hash of the tokenizer, the options and the text that produced the dataset."""


def run_jobs(
    function: Callable[[J], R], jobs: Sequence[J], workers: int, on_done: Callable[[int], None]
) -> list[R]:
    """Run the jobs and return their results in order; call `on_done` with the index of each finished job.

    If there is only one job or only one worker, the jobs run in this process. The first exception stops the
    other jobs and is raised. Raises TrainkitError if a worker was killed.
    """
    num_workers = min(workers, len(jobs))
    results: dict[int, R] = {}
    if num_workers <= 1:
        for number, job in enumerate(jobs):
            results[number] = function(job)
            on_done(number)
        return [*results.values()]
    lifeline, end = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, initializer=_begin_worker, initargs=(lifeline,))
    try:
        numbers = {pool.submit(function, job): number for number, job in enumerate(jobs)}
        for future in as_completed(numbers):
            results[numbers[future]] = future.result()
            on_done(numbers[future])
    except BrokenProcessPool:
        raise TrainkitError(
            "a worker process was killed, most likely because the node ran out of memory",
            hint="run the same command again with fewer workers: the preparation resumes where it stopped",
        ) from None
    finally:
        if len(results) < len(jobs):
            end.close()  # Stop the workers immediately, because their results are no longer needed.
        pool.shutdown(wait=True, cancel_futures=True)
        end.close()
        lifeline.close()
    return [results[number] for number in range(len(jobs))]


def _begin_worker(lifeline: Connection) -> None:
    """Initialize a worker process: ignore signals, tokenize with one thread, and exit with the parent.

    A terminal or scheduler sends signals to the whole process group, but only the parent should handle them.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, args=(lifeline,), daemon=True).start()


def _exit_with_parent(lifeline: Connection) -> None:
    """Exit when the write end of the pipe, which only the parent process has open, is closed."""
    with suppress(EOFError):
        lifeline.recv()
    os._exit(1)


PLAN_FILE = "plan.json"
"""File that describes the dataset during its preparation."""
INPUTS_FILE = "inputs.json"
"""File that lists the inputs. The list may be long, so it is not part of dataset.json, which every rank
reads."""
OnProgress = Callable[[int, int], None]
"""A callback that receives the number of source bytes processed so far, and the total number of source
bytes."""


def prepare(
    spec: DatasetSpec,
    folder: Path,
    workers: int = 1,
    on_progress: OnProgress | None = None,
    unit_bytes: int = UNIT_BYTES,
) -> tuple[DatasetFile, bool]:
    """Prepare a dataset in `folder`, or resume an interrupted preparation.

    Returns the dataset, and True if the folder already contained the prepared dataset. Raises UsageError if a
    source is unusable or the folder contains other files. Raises TrainkitError if the disk is full or a
    worker was killed.
    """
    if folder.is_file():
        raise UsageError(
            f"{shown_path(folder)} is a file", hint="specify a new or empty folder for the shards"
        )
    work = _Preparation(folder, spec, unit_bytes, workers, on_progress)
    try:
        if not is_dataset(folder):
            _make_work_folder(folder)
            with exclusive(folder / WORK_FOLDER / "lock", timeout_s=0.0):
                if not is_dataset(folder):
                    return work.make(), False
        return work.compare(), True
    except LockBusy:
        message = f"another process is preparing {shown_path(folder)}"
        raise UsageError(
            message, hint="wait until that process has finished, or choose another folder"
        ) from None
    except OSError as error:
        raise TrainkitError(
            f"cannot write to {shown_path(folder)}: {error.strerror or error}",
            hint="free disk space or make the folder writable, then run the same command again to resume",
        ) from error


class _Preparation:
    """The preparation of one dataset in one folder."""

    def __init__(
        self, folder: Path, spec: DatasetSpec, unit_bytes: int, workers: int, on_progress: OnProgress | None
    ) -> None:
        self.folder = folder
        self.workers = workers
        self.on_progress = on_progress
        self.tokenizer = identify(spec.tokenizer)
        self.inputs = find_inputs(spec)
        self.options: Options = {
            "layout": LAYOUT_VERSION,
            "unit_bytes": unit_bytes,
            "val_fraction": spec.split_fraction,
            "text_key": spec.text_key,
        }
        self.units = plan_units(spec, self.inputs, unit_bytes)

    def make(self) -> DatasetFile:
        self._begin()
        records_of = {record_file(self.folder, unit): unit for unit in self.units}
        missing = [unit for file, unit in records_of.items() if not file.exists()]
        self._run(partial(run_unit, self.folder), missing)
        records = [files.read_json(file) for file in records_of]
        inputs = self._digests([record["digests"] for record in records])
        splits = {
            split: tuple(Shard(**record["shards"][split]) for record in records if split in record["shards"])
            for split in SPLITS
        }
        identity = {key: value for key, value in asdict(self.tokenizer).items() if key != "name"}
        content = {"tokenizer": identity, "options": self.options, "inputs": inputs}
        fingerprint = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        dtype = token_dtype(self.tokenizer.vocab_size)
        file = DatasetFile(self.tokenizer, dtype, fingerprint, self.options, splits)
        if not file.num_tokens(TRAIN):
            raise UsageError(
                "the sources contain no text to train on",
                hint="specify files that contain text, or lower val_fraction",
            )
        staging = self.folder / WORK_FOLDER
        write_shared_json(self.folder / INPUTS_FILE, inputs, staging)
        file.write(self.folder, staging)
        shutil.rmtree(staging)
        return file

    def compare(self) -> DatasetFile:
        """Return the prepared dataset in the folder; raise DatasetMismatch if its inputs are different."""
        file = read_dataset_file(self.folder)
        if file.tokenizer != self.tokenizer:
            raise _mismatch(self.folder, f"prepared with the tokenizer {file.tokenizer.name}")
        if file.options != self.options:
            old, new = file.options, self.options
            keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
            changed = ", ".join(f"{key} {old.get(key)} instead of {new.get(key)}" for key in keys)
            raise _mismatch(self.folder, f"prepared with {changed}")
        known = files.read_json(self.folder / INPUTS_FILE)
        wanted = [{"name": source.name, "role": source.role, "size": source.size} for source in self.inputs]
        if [{key: source[key] for key in ("name", "role", "size")} for source in known] != wanted:
            raise _mismatch(self.folder, "prepared from different files")
        if self._digests(self._run(digest_unit, self.units)) != known:
            raise _mismatch(self.folder, "prepared from files that have changed since then")
        shutil.rmtree(self.folder / WORK_FOLDER, ignore_errors=True)
        return file

    def _begin(self) -> None:
        """Write the plan file or, if the file exists, check that it describes the same dataset."""
        plan_file = self.folder / WORK_FOLDER / PLAN_FILE
        inputs = [{**asdict(source), "path": None} for source in self.inputs]
        plan = {"tokenizer": asdict(self.tokenizer), "options": self.options, "inputs": inputs}
        if plan_file.exists():
            if files.read_json(plan_file) != plan:
                raise _mismatch(
                    self.folder, "started with different options, or its sources have changed since then"
                )
            for partial in plan_file.parent.glob("*.bin.*"):
                partial.unlink()  # left behind by a killed worker
            return
        files.write_json(plan_file, plan)

    def _run(self, function: Callable[[Unit], Any], units: list[Unit]) -> list[Any]:
        total = sum(unit.num_bytes for unit in self.units)
        done = total - sum(unit.num_bytes for unit in units)

        def on_done(number: int) -> None:
            nonlocal done
            done += units[number].num_bytes
            if self.on_progress:
                self.on_progress(done, total)

        return run_jobs(function, units, self.workers, on_done)

    def _digests(self, by_unit: list[list[str]]) -> list[dict[str, object]]:
        """Return the entries for inputs.json, each with a file's name, role, size on disk and hash.

        The hash covers a file's decompressed content or, for a table, its text column; if the file was
        divided into spans, it covers the hashes of the spans. The role is ``both`` if the file was divided
        between the two splits, otherwise the name of its split.
        """
        found: list[list[str]] = [[] for _ in self.inputs]
        for unit, digests in zip(self.units, by_unit, strict=True):
            for span, digest in zip(unit.spans, digests, strict=True):
                found[span.input].append(digest)
        return [
            {
                "name": source.name,
                "role": source.role,
                "size": source.size,
                "sha256": digests[0]
                if len(digests) == 1
                else hashlib.sha256("".join(digests).encode()).hexdigest(),
            }
            for source, digests in zip(self.inputs, found, strict=True)
        ]


def _make_work_folder(folder: Path) -> None:
    ensure_folder(folder, parents=True)
    others = sorted(entry.name for entry in folder.iterdir() if entry.name != WORK_FOLDER)
    if others and not (folder / WORK_FOLDER / PLAN_FILE).exists():
        raise UsageError(
            f"{shown_path(folder)} is neither empty nor a dataset: it contains {others[0]}",
            hint="choose another folder",
        )
    ensure_folder(folder / WORK_FOLDER)


class DatasetMismatch(UsageError):
    """Raised if the folder contains another dataset, whether complete or incomplete."""


def _mismatch(folder: Path, how: str) -> DatasetMismatch:
    return DatasetMismatch(
        f"{shown_path(folder)} contains a different dataset, which was {how}",
        hint="choose another folder; nothing was overwritten",
    )


_SECONDS_BETWEEN_LINES = 10.0
_MIB = 1 << 20


def progress_lines(title: str) -> OnProgress:
    """Return a callback that prints progress to stderr, at most once per `_SECONDS_BETWEEN_LINES`."""
    next_time = time.monotonic() + _SECONDS_BETWEEN_LINES

    def show(done: int, total: int) -> None:
        nonlocal next_time
        if time.monotonic() >= next_time:
            next_time = time.monotonic() + _SECONDS_BETWEEN_LINES
            print(f"{title}: {done / _MIB:,.0f} of {total / _MIB:,.0f} MiB", file=sys.stderr, flush=True)

    return show


@contextmanager
def exclusive(path: Path, timeout_s: float | None = None) -> Iterator[None]:
    """Hold a lock on `path`, like `file_lock`; raise TrainkitError if file locks are not supported."""
    with ExitStack() as stack:
        try:
            stack.enter_context(file_lock(path, timeout_s, mode=0o644))
        except NotALock as error:
            raise UsageError(f"{path} cannot be locked: {error.strerror}", hint=error.hint) from None
        except LockUnsupported as error:
            raise TrainkitError(
                f"the file system of {path} does not support file locks: {error.strerror}",
                hint="use a folder on a file system that supports file locks",
            ) from None
        yield
