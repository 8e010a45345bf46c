"""What a bench wrote down about itself before its first run: bench.json."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from trainkit.bench.layouts import DEGREES, BenchLayout, Selection
from trainkit.config import RunConfig
from trainkit.config.changes import Change, short_training
from trainkit.errors import UsageError
from trainkit.rundir import RunDir, read_json, write_json

PROFILED_STEPS = 3
"""The last steps, which the profiler records: they are slower, so none of them is measured."""
COUNTED_PROFILED_STEPS = PROFILED_STEPS - 1
"""In the first of them the ranks wait for each other to start their profilers."""
PROFILED_RANKS = 4
"""A profile of every rank of a large job would take long to write and to read."""


@dataclass(frozen=True)
class Length:
    """The steps of every run of a bench, from 1 on: to warm up, to be measured, to be profiled."""

    steps: int
    warmup: int

    def __post_init__(self) -> None:
        if self.warmup + PROFILED_STEPS >= self.steps:
            raise UsageError(
                f"--steps {self.steps}: with {self.warmup} to warm up (--warmup) and {PROFILED_STEPS} that "
                "are profiled none is left to be measured",
                hint=f"at least --steps {self.warmup + PROFILED_STEPS + 1}",
            )

    @property
    def measured(self) -> range:
        """The steps that count."""
        return range(self.warmup + 1, self.steps - PROFILED_STEPS + 1)

    @property
    def first_profiled(self) -> int:
        """The step that the profiler begins with."""
        return self.measured.stop

    @property
    def words(self) -> str:
        return (
            f"{self.steps} steps each: {self.warmup} to warm up, {len(self.measured)} measured, "
            f"{PROFILED_STEPS} profiled"
        )


def profiled_ranks(world_size: int) -> tuple[int, ...]:
    """All ranks of a small job, of a larger one the first, the last, and some in between."""
    count = min(world_size, PROFILED_RANKS)
    return tuple(index * (world_size - 1) // max(1, count - 1) for index in range(count))


def changes(config: RunConfig, length: Length, world_size: int, keeps_name: bool) -> list[Change]:
    """What a bench changes for all of its runs; what is trained, with what and on what stays as it is.

    `keeps_name` is for a name that was typed.
    """
    possible = [
        *([] if keeps_name else _named(config)),
        *short_training(config, length.steps, "bench"),
        *_bare(config),
        *_profiled(config, length, world_size),
    ]
    return [change for change in possible if change.value != change.before]


def _named(config: RunConfig) -> Iterator[Change]:
    yield Change("name", f"{config.name}-layouts"[:100], config.name, "these are not runs of their own")


def _bare(config: RunConfig) -> Iterator[Change]:
    """Nothing is kept of these runs, and none of them is started again."""
    checkpoint, requeue, logging = config.checkpoint, config.requeue, config.logging
    why = "nothing is saved while it is measured"
    yield Change("checkpoint.every_steps", None, checkpoint.every_steps, why)
    yield Change("checkpoint.every_minutes", None, checkpoint.every_minutes, why)
    yield Change("checkpoint.best_metric", None, checkpoint.best_metric, why)
    yield Change("checkpoint.async", False, checkpoint.async_save, "no memory is set apart for saves")
    yield Change("requeue.on", [], list(requeue.on), "a layout that fails has failed")
    yield Change("requeue.follow_ups", 0, requeue.follow_ups, "a layout that fails has failed")
    why = "summary.csv is what is looked at"
    yield Change("logging.tensorboard", False, logging.tensorboard, why)
    yield Change("logging.mlflow", None, logging.mlflow, why)
    yield Change("logging.wandb", None, logging.wandb, why)


def _profiled(config: RunConfig, length: Length, world_size: int) -> Iterator[Change]:
    profiler, why = config.profiler, "the last steps tell what communication is exposed"
    ranks = list(profiled_ranks(world_size))
    yield Change("profiler.start_step", length.first_profiled, profiler.start_step, why)
    yield Change("profiler.num_steps", PROFILED_STEPS, profiler.num_steps, why)
    yield Change("profiler.ranks", ranks, list(profiler.ranks), why)


BENCH_VERSION = 1
BENCH_FILE = "bench.json"
SUMMARY_FILE = "summary.csv"
PLOTS_FOLDER = "plots"


@dataclass(frozen=True)
class BenchRun:
    """One run of a bench, which may not have started yet."""

    layout: str
    run: str
    """Its folder in that of the bench."""
    degrees: dict[str, int]
    device_batch_size: int
    pp_microbatches: int
    notes: list[str]


@dataclass(frozen=True)
class Bench:
    """A bench in its folder."""

    folder: Path
    backend: str
    device: str
    length: Length
    runs: tuple[BenchRun, ...]

    def run_dir(self, item: BenchRun) -> RunDir:
        return RunDir(self.folder / item.run)

    @property
    def summary_file(self) -> Path:
        return self.folder / SUMMARY_FILE

    @property
    def plots_dir(self) -> Path:
        return self.folder / PLOTS_FOLDER


def bench_runs(layouts: Sequence[BenchLayout], folders: Sequence[str]) -> tuple[BenchRun, ...]:
    """The runs of these layouts in these folders."""
    return tuple(
        BenchRun(
            layout=item.name,
            run=folder,
            degrees={name: getattr(item.layout, name) for name in DEGREES},
            device_batch_size=item.values["train.device_batch_size"],
            pp_microbatches=item.values["parallel.pp_microbatches"],
            notes=list(item.notes),
        )
        for item, folder in zip(layouts, folders, strict=True)
    )


def write_bench(bench: Bench, config: str, selection: Selection, changes: Sequence[Change]) -> None:
    """Write bench.json; `config` is the file that was asked for."""
    record: dict[str, Any] = {
        "version": BENCH_VERSION,
        "kind": "layouts",
        "config": config,
        "backend": bench.backend,
        "device": bench.device,
        "length": asdict(bench.length),
        "changes": [change.to_dict() for change in changes],
        "runs": [asdict(item) for item in bench.runs],
        "impossible": dict(selection.impossible),
        "left_out": list(selection.left_out),
    }
    write_json(bench.folder / BENCH_FILE, record)


def read_bench(folder: Path) -> Bench:
    """The bench in a folder.

    Raises UsageError when there is none, it cannot be read, or a newer trainkit made it.
    """
    file = folder / BENCH_FILE
    try:
        record = read_json(file)
        if record["version"] > BENCH_VERSION:
            raise UsageError(
                f"{file} has version {record['version']}; this trainkit knows {BENCH_VERSION}",
                hint="use the trainkit that made it, or a newer one",
            )
        runs = tuple(BenchRun(**item) for item in record["runs"])
        return Bench(folder.absolute(), record["backend"], record["device"], Length(**record["length"]), runs)
    except FileNotFoundError:
        hint = "`trainkit bench layouts CONFIG` makes one and prints its folder"
        raise UsageError(f"{folder} is no folder of a bench: it has no {BENCH_FILE}", hint=hint) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{file} cannot be read: {error}",
            hint=f"`ls {quote(str(folder))}` shows its runs, each of which can be named by its folder",
        ) from error
