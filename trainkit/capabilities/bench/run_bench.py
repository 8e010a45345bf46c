"""Defines a bench: its description in bench.json, and its group of runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Literal

from trainkit.backend import backend_named
from trainkit.backends.jobs import query_jobs_or_warn, utc_clock
from trainkit.backends.slurm.group_chunks import recover_chunks
from trainkit.errors import UsageError
from trainkit.formats import shown
from trainkit.observe.group import GroupFiles, TrialStatus, count_states, state_counts
from trainkit.run.end import read_newest_end
from trainkit.run.files import LEFT_OUT, read_json, read_record, to_json, write_json
from trainkit.run.group import RunGroup
from trainkit.run.manifest import remove_all
from trainkit.run.rundir import RunDir

PROFILED_STEPS = 3
"""Number of steps to profile at the end of each run. Profiled steps are excluded from the speed measurement,
because the profiler slows them down."""
COUNTED_PROFILED_STEPS = PROFILED_STEPS - 1
"""Number of profiled steps that are used to compute the exposed communication. The first profiled step is
excluded, because in this step ranks wait until all profilers have started."""
PROFILED_RANKS = 4
"""Maximum number of ranks to profile. In a large job, profiles of all ranks would take too long to write and
read."""


@dataclass(frozen=True)
class BenchLength:
    """The numbers of warm-up, measured and profiled steps in each run of a bench."""

    steps: int
    warmup: int

    def __post_init__(self) -> None:
        if self.warmup + PROFILED_STEPS >= self.steps:
            raise UsageError(
                f"--steps {self.steps}: {self.warmup} warm-up steps (--warmup) and {PROFILED_STEPS} profiled "
                "steps leave no steps to measure",
                hint=f"at least --steps {self.warmup + PROFILED_STEPS + 1}",
            )

    @property
    def measured(self) -> range:
        return range(self.warmup + 1, self.steps - PROFILED_STEPS + 1)

    @property
    def first_profiled(self) -> int:
        return self.measured.stop

    @property
    def text(self) -> str:
        """Return the numbers of warm-up, measured and profiled steps as text for messages."""
        return (
            f"{self.steps} per run: {self.warmup} warm-up, {len(self.measured)} measured, "
            f"{PROFILED_STEPS} profiled"
        )


def profiled_ranks(world_size: int) -> tuple[int, ...]:
    """Return the ranks to profile: all ranks in a small job, or evenly spaced ranks in a larger one."""
    count = min(world_size, PROFILED_RANKS)
    return tuple(index * (world_size - 1) // max(1, count - 1) for index in range(count))


Kind = Literal["layouts", "settings"]
BENCH_FILE = "bench.json"
"""Name of the file that describes a bench, in the folder of the bench."""
BENCH_VERSION = 2
SUMMARY_FILE = "summary.csv"
PLOTS_FOLDER = "plots"
LAYOUT = "layout"
"""Name of the value that differs between the trials of a layout bench."""


@dataclass(frozen=True)
class BenchRun:
    """A run of a bench; each run measures one trial once."""

    run: str
    """The path of the run folder, relative to the bench folder."""
    values: dict[str, object]
    """The trial's layout, or its values for the swept keys."""
    repeat: int
    """The number of the repeat, starting from 1."""
    degrees: dict[str, int]
    device_batch_size: int | None
    pp_microbatches: int | None
    notes: list[str]

    @property
    def name(self) -> str:
        return trial_name(self.values)


def trial_name(values: Mapping[str, object]) -> str:
    """Return the name of a trial, which is formed from its layout or its values."""
    return str(values[LAYOUT]) if values.keys() == {LAYOUT} else shown(values)


@dataclass(frozen=True)
class Bench:
    """A bench as described in its bench.json. The bench folder is also the folder of its run group."""

    kind: Kind
    config: str
    """The config's file or name, as the user typed it."""
    backend: str
    device: str
    length: BenchLength
    repeats: int
    keys: list[str]
    """The names of the values that define a trial."""
    changes: list[dict[str, object]]
    runs: list[BenchRun]
    """The runs of the bench: all trials in sequence, once per repeat."""
    impossible: dict[str, str]
    left_out: list[str]
    folder: Path = field(default=Path(), metadata=LEFT_OUT)

    @property
    def group(self) -> RunGroup:
        return RunGroup(self.folder)

    def run_dir(self, item: BenchRun) -> RunDir:
        return RunDir(self.folder / item.run)

    @property
    def trials(self) -> list[list[BenchRun]]:
        num_trials = len(self.runs) // self.repeats
        return [self.runs[first::num_trials] for first in range(num_trials)]

    @property
    def summary_file(self) -> Path:
        return self.folder / SUMMARY_FILE

    @property
    def plots_dir(self) -> Path:
        return self.folder / PLOTS_FOLDER

    def write(self) -> None:
        write_json(self.folder / BENCH_FILE, {"version": BENCH_VERSION, **to_json(self)})


def read_bench(folder: Path) -> Bench:
    """Read the description of the bench in a folder.

    Raises UsageError if the folder contains no bench, or if its bench.json cannot be read or has the format
    of another trainkit version.
    """
    file = folder / BENCH_FILE
    hint = f"`trainkit status {quote(str(folder))}/RUN` shows each run of the bench"
    try:
        record = read_json(file)
        if (version := record["version"]) != BENCH_VERSION:
            raise ValueError(
                f"its format version is {version}, but this version of trainkit supports {BENCH_VERSION}"
            )
        bench = replace(read_record(Bench, record, strict=True), folder=folder.absolute())
        group = bench.group
        folders = [group.folder(index) for index in group.trials]
        if [str(bench.folder / item.run) for item in bench.runs] != folders:
            raise ValueError("its list of runs differs from the list in sweep.json")
        if bench.repeats < 1 or any(item.values.keys() != set(bench.keys) for item in bench.runs):
            raise ValueError("at least one run has no value for a swept key")
        return bench
    except FileNotFoundError:
        hint = (
            "`trainkit bench layouts` and `trainkit bench settings` create a bench folder and print its path"
        )
        raise UsageError(f"{folder} is not a bench folder: it contains no {BENCH_FILE}", hint=hint) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{file} cannot be read: {error}", hint=hint) from error


FINISHED = "finished"
ENDED = {FINISHED, "failed", "stopped", "cancelled", "died"}
"""States in which a run of a bench has ended permanently, because benches never restart runs."""


def look_at_runs(bench: Bench, warn: Callable[[str], None]) -> list[TrialStatus]:
    """Return the status of each run in a bench, with the root cause as the reason for a failed run.

    If Slurm has not confirmed the submission of the job array, the function searches Slurm for the array. The
    function also deletes the checkpoints of runs that have ended, because a bench is never resumed.
    """
    recover_chunks(bench.group)
    files = GroupFiles(bench.group)
    trials = []
    for trial in files.status(query_jobs_or_warn(files.open_ids, warn), utc_clock()).trials:
        run = RunDir(trial.run_dir)
        if trial.state in ENDED:
            remove_all(run.checkpoints_dir)
        end = read_newest_end(run.path)
        failure = end.verdict.line if end is not None and end.verdict else trial.reason
        trials.append(replace(trial, reason=None if trial.state == FINISHED else failure))
    return trials


def wait_for_runs(
    bench: Bench, log_line: Callable[[str], None], end_line: Callable[[Bench, TrialStatus], str]
) -> None:
    """Wait until all runs of a bench have ended.

    When a run ends, logs the line that `end_line` returns; also logs the number of runs in each state when
    these numbers change.
    """
    logged, known = "", set[int]()
    while True:
        trials = look_at_runs(bench, log_line)
        states = count_states(trial.state for trial in trials)
        ended = [trial for trial in trials if trial.state in ENDED - {"died"}]
        for trial in ended:
            if trial.index not in known:
                log_line(end_line(bench, trial))
        known = {trial.index for trial in ended}
        text = state_counts(states)
        if text != logged:
            log_line(text)
        # A run may briefly appear to have died: Slurm may remove the job before this host sees the file that
        # records the end of the run.
        is_sure = text == logged or "died" not in states
        logged = text
        if is_sure and ENDED.issuperset(states):
            return
        time.sleep(backend_named(bench.backend).ask_every_s)
