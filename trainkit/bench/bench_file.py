"""bench.json, which describes a bench, and the changes that a bench makes to its config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from trainkit.config.changes import Change
from trainkit.errors import UsageError
from trainkit.plan.sweep import shown
from trainkit.run.files import read_json, write_json
from trainkit.run.group import BENCH_FILE, RunGroup
from trainkit.run.rundir import RunDir

PROFILED_STEPS = 3
"""The last steps are profiled. They are not measured, because the profiler slows them."""
COUNTED_PROFILED_STEPS = PROFILED_STEPS - 1
"""The first profiled step does not count: its ranks wait for each other to start their profilers."""
PROFILED_RANKS = 4
"""Maximum number of profiled ranks: profiles of all ranks of a large job take long to write and read."""


@dataclass(frozen=True)
class BenchLength:
    """The steps of every run of a bench, from 1 on: to warm up, to be measured, to be profiled."""

    steps: int
    warmup: int

    def __post_init__(self) -> None:
        if self.warmup + PROFILED_STEPS >= self.steps:
            raise UsageError(
                f"--steps {self.steps}: {self.warmup} warm-up steps (--warmup) and {PROFILED_STEPS} profiled "
                "steps leave none to measure",
                hint=f"at least --steps {self.warmup + PROFILED_STEPS + 1}",
            )

    @property
    def measured(self) -> range:
        """The measured steps."""
        return range(self.warmup + 1, self.steps - PROFILED_STEPS + 1)

    @property
    def first_profiled(self) -> int:
        """The first profiled step."""
        return self.measured.stop

    @property
    def text(self) -> str:
        """The number of steps of each kind, for messages."""
        return (
            f"{self.steps} per run: {self.warmup} warm-up, {len(self.measured)} measured, "
            f"{PROFILED_STEPS} profiled"
        )


def profiled_ranks(world_size: int) -> tuple[int, ...]:
    """All ranks of a small job; of a larger one the first, the last and some in between."""
    count = min(world_size, PROFILED_RANKS)
    return tuple(index * (world_size - 1) // max(1, count - 1) for index in range(count))


Kind = Literal["layouts", "settings"]
BENCH_VERSION = 2
"""Version 1 has layouts only, one run of each."""
SUMMARY_FILE = "summary.csv"
PLOTS_FOLDER = "plots"
LAYOUT = "layout"
"""The key by which points of a bench of layouts differ."""


@dataclass(frozen=True)
class BenchRun:
    """One run of a bench: a point, measured once."""

    run: str
    """Its folder, relative to that of the bench."""
    values: dict[str, Any]
    """What is special about its point: the layout, or the values of the swept keys."""
    repeat: int
    """From 1 on."""
    degrees: dict[str, int]
    device_batch_size: int | None
    pp_microbatches: int | None
    notes: list[str]

    @property
    def name(self) -> str:
        """The name of its point."""
        return point_name(self.values)


def point_name(values: Mapping[str, Any]) -> str:
    """The name of a point: the layout, else its values."""
    return str(values[LAYOUT]) if values.keys() == {LAYOUT} else shown(values)


@dataclass(frozen=True)
class Bench:
    """A bench in its folder."""

    folder: Path
    kind: Kind
    backend: str
    device: str
    length: BenchLength
    repeats: int
    keys: tuple[str, ...]
    """The keys of the values of every run."""
    runs: tuple[BenchRun, ...]
    """All points once, then all of them again for each further repeat."""

    def run_dir(self, item: BenchRun) -> RunDir:
        return RunDir(self.folder / item.run)

    @property
    def groups(self) -> list[RunGroup]:
        """The arrays of its runs on Slurm; empty on this machine."""
        folders = dict.fromkeys(self.run_dir(item).path.parent for item in self.runs)
        return [group for group in map(RunGroup, folders) if group.exists()]

    @property
    def points(self) -> list[tuple[BenchRun, ...]]:
        """The runs of every point."""
        num_points = len(self.runs) // self.repeats
        return [self.runs[first::num_points] for first in range(num_points)]

    @property
    def command(self) -> str:
        """The command that made it."""
        return f"trainkit bench {self.kind}"

    @property
    def summary_file(self) -> Path:
        return self.folder / SUMMARY_FILE

    @property
    def plots_dir(self) -> Path:
        return self.folder / PLOTS_FOLDER


def write_bench(
    bench: Bench,
    config: str,
    changes: Sequence[Change] = (),
    impossible: Mapping[str, str] | None = None,
    left_out: Sequence[str] = (),
) -> None:
    """Write bench.json; `config` is the file or name as typed."""
    record: dict[str, Any] = {
        "version": BENCH_VERSION,
        "kind": bench.kind,
        "config": config,
        "backend": bench.backend,
        "device": bench.device,
        "length": asdict(bench.length),
        "repeats": bench.repeats,
        "keys": list(bench.keys),
        "changes": [change.to_dict() for change in changes],
        "runs": [asdict(item) for item in bench.runs],
        "impossible": dict(impossible or {}),
        "left_out": list(left_out),
    }
    write_json(bench.folder / BENCH_FILE, record)


def read_bench(folder: Path) -> Bench:
    """Read the bench in a folder.

    Raises UsageError if there is none, it is unreadable, or a newer trainkit wrote it.
    """
    file = folder / BENCH_FILE
    try:
        record = read_json(file)
        if record["version"] > BENCH_VERSION:
            raise UsageError(
                f"{file} has version {record['version']}; this trainkit supports {BENCH_VERSION}",
                hint="use the trainkit that wrote it, or a newer one",
            )
        if record["version"] == 1:
            record = _from_version_1(record)
        if not record["runs"]:
            raise ValueError("it has no runs")
        return Bench(
            folder=folder.absolute(),
            kind=record["kind"],
            backend=record["backend"],
            device=record["device"],
            length=BenchLength(**record["length"]),
            repeats=record["repeats"],
            keys=tuple(record["keys"]),
            runs=tuple(BenchRun(**item) for item in record["runs"]),
        )
    except FileNotFoundError:
        hint = "`trainkit bench layouts` and `trainkit bench settings` create one and print its folder"
        raise UsageError(
            f"{folder} is not the folder of a bench: it has no {BENCH_FILE}", hint=hint
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{file} cannot be read: {error}",
            hint=f"`trainkit status {quote(str(folder))}/RUN` still shows each of its runs",
        ) from error


def _from_version_1(record: Mapping[str, Any]) -> dict[str, Any]:
    runs = [
        {"values": {LAYOUT: item[LAYOUT]}, "repeat": 1} | {key: item[key] for key in item if key != LAYOUT}
        for item in record["runs"]
    ]
    return {**record, "repeats": 1, "keys": [LAYOUT], "runs": runs}
