"""Reads a run's health samples from ``health/HOST.jsonl``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from trainkit.capability import Reader
from trainkit.run.events import Entry
from trainkit.run.files import Record, read_jsonl_reversed
from trainkit.run.rundir import RunDir

BY_CGROUP, BY_PROCESSES = "cgroup", "processes"
"""The method that measured ``job_mem_gib``: the memory of the job's cgroup, or the sum of the PSS of its
processes."""


def health_dir(run: RunDir) -> Path:
    """Return the folder that contains one sample file per host."""
    return run.path / "health"


def health_file(run: RunDir, host: str) -> Path:
    """Return the file that contains a host's samples: CPUs, memory, network, disks and GPUs."""
    return health_dir(run) / f"{host}.jsonl"


class HealthSample(Entry):
    """Measurements of a node at one point in time."""

    __slots__ = ()

    @property
    def gpus(self) -> list[Record]:
        """Return the node's GPUs, each with ``index``, ``util_percent`` and other values."""
        return self.records("gpus")


class HealthFiles(Reader):
    """Finds the newest sample of each node; reads only the end of files that have changed."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(run)
        self._seen: dict[str, tuple[int, int]] = {}
        self.newest: dict[str, HealthSample] = {}
        """Maps each host to its newest sample."""

    def update(self) -> None:
        """Read the samples that were written since the last call."""
        try:
            entries = [entry for entry in os.scandir(health_dir(self.run)) if entry.name.endswith(".jsonl")]
        except FileNotFoundError:
            entries = []
        names = {entry.name for entry in entries}
        for name in self._seen.keys() - names:
            del self._seen[name]
            self.newest.pop(Path(name).stem, None)
        for entry in entries:
            state = entry.stat()
            key = (state.st_mtime_ns, state.st_size)
            if self._seen.get(entry.name) != key:
                self._seen[entry.name] = key
                sample = newest_sample(Path(entry.path))
                if sample is not None:
                    self.newest[entry.name.removesuffix(".jsonl")] = sample


def newest_sample(file: Path) -> HealthSample | None:
    """Return the last sample in a file, or None if the file has no samples."""
    return next(samples_reversed(file), None)


def samples_reversed(file: Path) -> Iterator[HealthSample]:
    """Yield the samples in a file, starting with the newest."""
    return map(HealthSample, read_jsonl_reversed(file))
