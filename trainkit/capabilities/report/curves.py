"""The curves of runs as one table, for figures and for programs of one's own.

table = trainkit.curves("lr-sweep", metrics=["loss", "val_loss"])
pandas.DataFrame(table).groupby("optimizer.lr")["val_loss"].min()
"""

from __future__ import annotations

import csv
import html
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from trainkit.capabilities.report.compared_runs import ComparedRun, compared_runs
from trainkit.capabilities.report.plot import AXES, draw
from trainkit.errors import UsageError
from trainkit.formats import did_you_mean, shown_value
from trainkit.run.events import StepRecord, read_events, read_steps
from trainkit.run.files import parse_time
from trainkit.run.history import Attempt, attempts_of, ended_attempts, read_plan
from trainkit.run.rundir import RunDir

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOT_METRICS = frozenset({"step", "time", "attempt", "tokens"})
"""The keys of metrics.jsonl that say of which step a record is."""
SHOWN_ROWS = 10


class Curves(dict[str, list[Any]]):
    """A table with a row per logged step of each run: column -> its values, of equal length.

    The columns are ``run``, the keys in which the runs differ, ``step``, ``tokens``, ``time_s``,
    ``gpu_hours`` and the metrics. A value that was not logged is None, one that was not finite is nan.
    `pandas.DataFrame(curves)` is the same table in pandas.
    """

    def __init__(self, keys: Sequence[str], metrics: Sequence[str]) -> None:
        self.keys_that_differ = tuple(keys)
        self.metrics = tuple(metrics)
        super().__init__({name: [] for name in ("run", *keys, *AXES.values(), *metrics)})

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self["run"])

    def rows(self) -> Iterator[dict[str, object]]:
        """Each row as column -> value."""
        return (dict(zip(self, values, strict=True)) for values in zip(*self.values(), strict=True))

    def write_csv(self, stream: TextIO) -> None:
        """Write a line of columns and a line per row; a value that was not logged is empty."""
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(self)
        writer.writerows(
            [
                "" if value is None else shown_value(value) if isinstance(value, list | dict) else value
                for value in row
            ]
            for row in zip(*self.values(), strict=True)
        )

    def plot(self, *, x: str = "step", smooth: float = 0.0, by: str | None = None) -> Figure:
        """Draw each metric over `x`: a line per value of the keys, with mean and spread over seeds.

        Returns a figure of matplotlib, which `savefig` writes. `smooth` is the weight of the past in a moving
        mean, from 0 to below 1. Lines are coloured by the key `by`, or the first in which the runs differ.
        Raises UsageError for what the runs do not have, or where matplotlib is missing.
        """
        return draw(self, self.keys_that_differ, self.metrics, x, smooth, by)

    def _repr_html_(self) -> str:
        shown = [list(self), *zip(*(column[:SHOWN_ROWS] for column in self.values()), strict=True)]
        lines = ("".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in shown)
        more = f"<p>{self.num_rows} rows</p>" if self.num_rows > SHOWN_ROWS else ""
        return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>{more}"


def read_table(runs: Sequence[ComparedRun], metrics: Sequence[str], keys: Sequence[str]) -> Curves:
    """Read the curves of runs; raises UsageError for a metric that none of them has logged."""
    curves, logged = Curves(keys, metrics), set[str]()
    for one in runs:
        for record, time_s, gpu_hours in _kept_records(one.run):
            logged |= record.values.keys()
            row = {"run": one.name, **one.values, "step": record.step, "tokens": record.count("tokens")}
            row |= {"time_s": time_s, "gpu_hours": gpu_hours}
            row |= {name: _value(record, name) for name in metrics}
            for name, column in curves.items():
                column.append(row.get(name))
    unknown = [name for name in metrics if name not in logged]
    if unknown:
        has = sorted(logged - NOT_METRICS)
        hint = did_you_mean(unknown[0], has) or (f"they have logged {', '.join(has)}" if has else "")
        raise UsageError(f"no run has logged {unknown[0]}", hint=hint or "they have logged nothing yet")
    return curves


def _value(record: StepRecord, name: str) -> float | None:
    """A metric of a step: None if it was not logged, nan if it was not finite."""
    if name not in record.values:
        return None
    value = record.number(name)
    return math.nan if value is None else value


def _kept_records(run: RunDir) -> list[tuple[StepRecord, float | None, float | None]]:
    """The steps that are part of a run's result, each with the time and GPU-hours until then.

    Time counts while steps are computed: neither the queue nor start-up, and a step that was computed again
    counts twice.
    """
    attempts = {
        one.number: one for one in ended_attempts(attempts_of(read_events(run, "started", "training")), None)
    }
    size = read_plan(run).count("world_size")
    kept: dict[int, tuple[StepRecord, float | None, float | None]] = {}
    time_s, gpu_hours, before = 0.0, 0.0, None
    for record in read_steps(run):
        attempt = attempts.get(record.attempt or 0, Attempt(0))
        spent_s = _seconds(record, before if before and before.attempt == record.attempt else None, attempt)
        before = record
        time_s += spent_s
        gpu_hours += spent_s * (attempt.world_size or size or 1) / 3600
        if record.step <= attempt.kept_step:
            kept[record.step] = (record, round(time_s, 3), gpu_hours)
    return [kept[step] for step in sorted(kept)]


def _seconds(record: StepRecord, before: StepRecord | None, attempt: Attempt) -> float:
    """The seconds from the record before, or from the begin of the training in this attempt."""
    now = parse_time(record.time)
    if now is None:
        return 0.0
    since = attempt.training if before is None else None
    if before is not None and (earlier := parse_time(before.time)) is not None:
        since = earlier.timestamp()
    return max(0.0, now.timestamp() - since) if since is not None else record.number("step_s") or 0.0


def curves(*runs: object, metrics: Sequence[str] = ("loss",), keys: Sequence[str] | None = None) -> Curves:
    """The curves of runs and groups: names, folders, or what `trainkit.submit` and `runs` have returned.

    `metrics` are names in metrics.jsonl, of the trainer or of one's own. `keys` are config keys to have as
    columns; by default those in which the runs differ. Raises UsageError for a run or metric that is unknown.
    """
    if not runs:
        raise UsageError("no run is named", hint='name runs or groups: trainkit.curves("lr-sweep")')
    names = [str(getattr(run, "path", run)) for run in runs]
    found, differing = compared_runs(names, keys)
    return read_table(found, metrics, differing)
