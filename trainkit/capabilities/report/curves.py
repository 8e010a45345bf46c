"""Reads the curves of runs into one table, for plotting and for use in Python programs.

table = trainkit.curves("lr-sweep", metrics=["loss", "val_loss"])
pandas.DataFrame(table).groupby(["optimizer.lr", "seed"])["val_loss"].min()
"""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from trainkit.capabilities.report.compared_runs import (
    ComparedRun,
    compared_runs,
    compared_value,
    differing_keys,
)
from trainkit.capabilities.report.plot import AXES, LARGEST, DrawnRun, draw
from trainkit.cli.output import masked
from trainkit.errors import UsageError
from trainkit.formats import cell, did_you_mean, plural, shown_value
from trainkit.observe.notebook import paragraph, table
from trainkit.observe.ranking import NOT_METRICS
from trainkit.run.events import StepRecord, later_metrics, read_events, read_steps
from trainkit.run.files import parse_time
from trainkit.run.history import Attempt, attempts_of, ended_attempts, read_plan
from trainkit.run.rundir import RunDir

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ("run", *AXES.values())
"""Columns present in every table. A table also has a column for each config key that differs between the
runs, and for each metric."""
LAST_STEP = 2**53
"""Upper limit for step numbers, because a float cannot represent every integer above this limit."""
SHOWN_ROWS = 10
"""Number of rows that a notebook displays."""


class Curves(dict[str, list[Any]]):
    """A table with one row per logged step of each run: a dictionary of columns of equal length.

    The columns are ``run``, the keys that differ between the runs, ``step``, ``tokens``, ``time_s``,
    ``gpu_hours`` and the metrics. If a config key has the same name as another column, the key's column is
    called ``config.NAME``. A value that was not logged is None. Non-finite values are nan, except for -inf,
    which is kept. `pandas.DataFrame(curves)` converts the table to a DataFrame.
    """

    def __init__(
        self,
        runs: Sequence[tuple[ComparedRun, Sequence[StepRecord]]],
        metrics: Sequence[str],
        keys: Sequence[str] | None = None,
    ) -> None:
        self.metrics = tuple(metrics)
        self.keys_that_differ = tuple(differing_keys(one.values for one, _ in runs))
        """The config keys that differ between the runs, including keys that are not columns."""
        self.unreadable = tuple(one.name for one, _ in runs if not one.values)
        """The names of the runs whose config cannot be read. The config keys of runs with an unreadable
        config are unknown."""
        shown = self.keys_that_differ if keys is None else keys
        taken = {*COLUMNS, *metrics}
        named = {key: f"config.{key}" if key in taken else key for key in shown}
        super().__init__({name: [] for name in ("run", *named.values(), *COLUMNS[1:], *metrics)})
        self._runs: list[tuple[ComparedRun, slice]] = []
        self._on_gpu = all(read_plan(one.run).text("device") == "cuda" for one, _ in runs)
        for one, records in runs:
            values = {
                column: masked(compared_value(key, one.values.get(key)), key) for key, column in named.items()
            }
            rows, begin = _rows(one.run, records, metrics), self.num_rows
            for row in rows:
                for name, value in {"run": one.name, **values, **row}.items():
                    self[name].append(value)
            self._runs.append((one, slice(begin, begin + len(rows))))

    @property
    def num_rows(self) -> int:
        """The number of rows in the table."""
        return len(self["run"])

    def rows(self) -> Iterator[dict[str, object]]:
        """Yield each row as a dictionary that maps column names to values."""
        return (dict(zip(self, values, strict=True)) for values in zip(*self.values(), strict=True))

    def points(self, metric: str, column: str = "step") -> Iterator[tuple[str, list[tuple[float, float]]]]:
        """Yield each run's name and its points as ``(x, y)`` pairs.

        x is the value of `column`, and y is the value of the metric.

        Steps without one of the two values are omitted.
        """
        for one, own in self._runs:
            pairs = zip(self[column][own], self[metric][own], strict=True)
            yield one.name, [(x, y) for x, y in pairs if x is not None and y is not None]

    def num_without(self, metric: str) -> int:
        """Return the number of runs that have not logged the metric."""
        return sum(all(value is None for value in self[metric][own]) for _, own in self._runs)

    def write_csv(self, stream: TextIO) -> None:
        """Write the table as CSV with a header line.

        Values that were not logged become empty fields.
        """
        writer = csv.writer(stream)
        writer.writerow(self)
        for row in zip(*self.values(), strict=True):
            texts = (shown_value(value) if isinstance(value, list | dict) else value for value in row)
            writer.writerow(["" if value is None else value for value in texts])

    def plot(self, *, x: str = "step", smooth: float = 0.0, by: str | None = None) -> Figure:
        """Plot one chart per metric, with a line per combination of key values, as a matplotlib figure.

        Each line is the mean over seeds, with the sample standard deviation drawn as a band. `x` selects the
        horizontal axis: ``step``, ``tokens``, ``time`` or ``gpu_hours``. `smooth` is the weight of earlier
        values in an exponential moving average: at least 0 and less than 1. The values of the key `by`
        determine the line colours; by default, `by` is the first key that differs between the runs.

        Each line shares its matplotlib label, the legend text, with its band and its legend entry.
        The figure's `savefig` writes the same file as ``trainkit compare --plot``.

        Raises UsageError if no run has numeric values for a metric, the runs do not differ in the key `by`,
        or matplotlib is missing.
        """
        if x not in AXES:
            raise UsageError(f"unknown axis {x}", hint=did_you_mean(x, AXES) or f"axes are {', '.join(AXES)}")
        steps = self["step"]
        runs = [
            DrawnRun(
                one.name,
                {key: compared_value(key, one.values.get(key)) for key in self.keys_that_differ}
                if one.values
                else None,
                {
                    metric: {
                        step: (at, value)
                        for step, at, value in zip(
                            steps[own], self[AXES[x]][own], self[metric][own], strict=True
                        )
                        if at is not None and value is not None
                    }
                    for metric in self.metrics
                },
                {key: one.values[key] for key in self.keys_that_differ if key in one.values},
            )
            for one, own in self._runs
        ]
        return draw(runs, self.keys_that_differ, self.metrics, x, smooth, by, on_gpu=self._on_gpu)

    def __repr__(self) -> str:
        return f"<curves of {plural(len(self._runs), 'run')}, {self.num_rows:,} rows: {', '.join(self)}>"

    def _repr_html_(self) -> str:
        columns = [(name, [cell(one) for one in own[:SHOWN_ROWS]]) for name, own in self.items()]
        more = paragraph(f"{self.num_rows:,} rows") if self.num_rows > SHOWN_ROWS else ""
        return table(columns) + more


def curves(*runs: object, metrics: Sequence[str] = ("loss",), keys: Sequence[str] | None = None) -> Curves:
    """Read the curves of runs and groups of runs into a table.

    `runs` are names, folders, or objects returned by `trainkit.submit` and `trainkit.runs`. `metrics` are
    names of metrics that the trainer or your script has logged to metrics.jsonl. `keys` are the config keys
    that become columns; default: the keys that differ between the runs.

    Raises UsageError if a run does not exist, no run has one of the keys, or no run has logged one of the
    metrics.
    """
    names = [str(getattr(run, "path", run)) for run in _flat(runs)]
    if not names:
        raise UsageError(
            "no runs were given", hint='pass runs or groups of runs: trainkit.curves("lr-sweep")'
        )
    wanted = [metrics] if isinstance(metrics, str) else list(dict.fromkeys(metrics))
    if not wanted:
        raise UsageError("no metrics were given", hint='pass metrics, for example metrics=["loss"]')
    found = compared_runs(names)
    known = set[str]().union(*(one.values for one in found))
    for key in keys or ():
        if key not in known:
            hint = did_you_mean(key, known) or "`trainkit schema` lists the keys"
            raise UsageError(f"no run has the key {key}", hint=hint)
    read = [(one, _records(one.run)) for one in found]
    logged = {name for _, records in read for record in records for name in record.values}
    for name in wanted:
        if name not in logged:
            has = sorted(logged - NOT_METRICS)
            hint = did_you_mean(name, has) or (f"the runs have logged {', '.join(has)}" if has else "")
            raise UsageError(f"no run has logged {name}", hint=hint or "the runs have logged nothing yet")
    return Curves(read, wanted, keys)


def _flat(runs: Iterable[object]) -> Iterator[object]:
    for run in runs:
        if isinstance(run, list | tuple):
            yield from _flat(run)
        else:
            yield run


def _records(run: RunDir) -> list[StepRecord]:
    """Return the records of all steps in all attempts, in order.

    A COMMAND logs validation losses as events; the losses are added to the records of the same steps.
    """
    found: dict[tuple[int, int], dict[str, object]] = {}
    attempt = 0  # A record without an attempt number belongs to the same attempt as the previous record.
    for record in read_steps(run):
        attempt = attempt if record.attempt is None else record.attempt
        if 0 <= record.step < LAST_STEP:
            found.setdefault((attempt, record.step), {}).update(record.values, attempt=attempt)
    for event in read_events(run, "evaluated"):
        if (step := event.step) is not None and "val_loss" in event.values:
            own: dict[str, object] = {"step": step, "time": event.time, "attempt": event.attempt or attempt}
            found.setdefault((event.attempt or attempt, step), own).setdefault(
                "val_loss", event.values["val_loss"]
            )
    for name, values in later_metrics(run).items():
        for step, value in values.items():
            place, before = _places_of(step, found)
            # A step that the training did not log gets the time of the logged step before it.
            time = found[before].get("time") if before in found else None
            own = {"step": step, "attempt": place[0], "time": time}
            found.setdefault(place, own)[name] = value
    return [StepRecord(found[place]) for place in sorted(found)]


def _places_of(step: int, found: Collection[tuple[int, int]]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return `step` and the last logged step up to it, each with the newest attempt that logged this step."""
    attempt, before = max((place for place in found if place[1] <= step), default=(0, step))
    return (attempt, step), (attempt, before)


def _rows(run: RunDir, records: Iterable[StepRecord], metrics: Sequence[str]) -> list[dict[str, object]]:
    """Return a row for each step that was kept, with its metrics and the training time up to that step.

    Training time excludes queueing and startup. If a step was computed twice, the durations of both
    computations are included.
    """
    events = read_events(run, "started", "training")
    attempts = {one.number: one for one in ended_attempts(attempts_of(events), None)}
    size = read_plan(run).count("world_size")
    kept: dict[int, dict[str, object]] = {}
    time_s, before = 0.0, None
    gpu_hours: float | None = 0.0
    for record in records:
        attempt = attempts.get(record.attempt or 0, Attempt(0))
        if before is not None and before.attempt != record.attempt:
            # Drop later steps, because the attempt of this record computed them again.
            for stale in [step for step in kept if step >= record.step]:
                del kept[stale]
            before = None
        spent_s = _seconds(record, before, attempt)
        before = record
        time_s += spent_s
        num_ranks = attempt.world_size or size
        gpu_hours = None if gpu_hours is None or num_ranks is None else gpu_hours + spent_s * num_ranks / 3600
        if record.step <= attempt.kept_step:
            tokens = record.count("tokens") if record.step else 0  # step 0 is the validation before training
            row: dict[str, object] = {"step": record.step, "tokens": tokens}
            row |= {"time_s": round(time_s, 3), "gpu_hours": gpu_hours}
            kept[record.step] = row | {name: _value(record, name) for name in metrics}
    rows = [kept[step] for step in sorted(kept)]
    for name in metrics:
        # A loss that was never finite has diverged, so keep it. Any other metric that was never finite was
        # not measured, so drop it.
        if not name.endswith("loss") and not any(_is_finite(row[name]) for row in rows):
            for row in rows:
                row[name] = None
    return rows


def _value(record: StepRecord, name: str) -> float | None:
    """Return the value of a metric at a step, or None if it was not logged or is not a number.

    Non-finite values are returned as nan or -inf. Numbers beyond `LARGEST` are treated as non-finite, because
    sums of such numbers overflow.
    """
    value: object = record.values.get(name)
    if name not in record.values or isinstance(value, bool | str | list | dict):
        return None
    if not isinstance(value, int | float):
        return math.nan
    return value if abs(value) <= LARGEST else -math.inf if value < 0 else math.nan


def _is_finite(value: object) -> bool:
    return isinstance(value, float | int) and math.isfinite(value)


def _seconds(record: StepRecord, before: StepRecord | None, attempt: Attempt) -> float:
    """Return the seconds since the previous record or, if there is none, since the attempt began training."""
    now = parse_time(record.time)
    if now is None:
        return 0.0
    since = attempt.training if before is None else None
    if before is not None and (earlier := parse_time(before.time)) is not None:
        since = earlier.timestamp()
    return max(0.0, now.timestamp() - since) if since is not None else record.number("step_s") or 0.0


def writable_file(option: str, file: Path, *, overwrites: bool) -> Path:
    """Return the output file given with an option after checking that it can be written.

    Raises UsageError if the file exists and `overwrites` is False, or if its parent folder does not exist.
    """
    if file.is_symlink() or (file.exists() and not file.is_file()):
        raise UsageError(
            f"{option} {file} already exists and is not a regular file", hint="name another file"
        )
    if file.exists() and not overwrites:
        raise UsageError(f"{option} {file} already exists", hint="choose a new file name, or add --overwrite")
    if not file.parent.is_dir():
        raise UsageError(
            f"{option} {file}: no such folder: {file.parent}",
            hint="create the folder, or choose another one",
        )
    return file
