"""What a bench wrote down about itself before its first run: bench.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Any

from trainkit.bench.layouts import DEGREES, BenchLayout, Selection
from trainkit.bench.shorten import Length
from trainkit.config.changes import Change
from trainkit.errors import UsageError
from trainkit.frozen import dataclass
from trainkit.rundir import RunDir, read_json, write_json

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
