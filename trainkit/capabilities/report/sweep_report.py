"""The report of a sweep, a group or a bench: all of its runs on one page.

A sweep can have thousands of runs, so what is read of each is bounded: records of a long curve are sampled.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median

from trainkit.capabilities.report.goodput import Point
from trainkit.capabilities.report.page import Chart, Line, dot_chart, line_chart, render_page
from trainkit.config.schema import flatten
from trainkit.formats import plural, shown, shown_value
from trainkit.observe.group import (
    FAILED,
    NUM_READERS,
    ORDER,
    GroupStatus,
    PointStatus,
    count_states,
    state_counts,
)
from trainkit.observe.status import ACTIVE_STATES, FlatConfig
from trainkit.observe.values import with_effect
from trainkit.run.end import Best
from trainkit.run.events import StepRecord, read_events, steps_of
from trainkit.run.files import (
    LEFT_OUT,
    Record,
    numbers,
    opened,
    parse_records,
    read_object,
    reversed_lines,
    sampled_lines,
)
from trainkit.run.group import RunGroup
from trainkit.run.history import (
    Attempt,
    PlanRecord,
    attempts_of,
    ended_attempts,
    timestamp,
    worker_hours,
)
from trainkit.run.rundir import RunDir

TEMPLATE = "sweep_report.html.j2"
MAX_LINES = 40
"""Curves that are drawn: more would cover each other."""
MAX_NAMED_LINES = 4
OPEN_ROWS = 100
"""Runs that the page lists unfolded."""
MAX_ROWS = 2000
MAX_AXIS_KEYS = 6
NUM_SAMPLES = 64
"""Records that are read of a long curve, evenly spaced."""
WHOLE_BYTES = 65_536
"""Curves up to this size are read whole."""
EVENTS = ("submitted", "started", "training", "first_step", "requeue_decision", "stopped", "finished")
REPEAT = "repeat"


@dataclass(frozen=True)
class Objective:
    """The figure that the points are compared by."""

    name: str
    label: str
    is_lowest_best: bool


OBJECTIVES = {
    "val_loss": Objective("val_loss", "best validation loss", True),
    "loss": Objective("loss", "last loss", True),
    "tokens_per_s": Objective("tokens_per_s", "tokens per second", False),
}


@dataclass(frozen=True, kw_only=True)
class PointReport(PointStatus):
    """What one run did; None where a value is unknown."""

    job_id: str | None = field(metadata=LEFT_OUT)
    best: Best | None = field(metadata=LEFT_OUT)
    cluster: str | None = field(default=None, metadata=LEFT_OUT)
    step: int | None
    result: float | None
    """Its value of the objective."""
    tokens_per_s: float | None
    """The median of the records that were read."""
    worker_hours: float | None
    curves: dict[str, list[Point]] = field(default_factory=dict, metadata=LEFT_OUT)


@dataclass(frozen=True)
class SweepReport:
    """What the runs of a sweep did."""

    name: str
    run_dir: str
    keys: list[str]
    objective: Objective
    points: list[PointReport]
    """Failures first, then by result."""
    states: dict[str, int]
    best: PointReport | None
    is_cuda: bool
    worker_hours: float | None
    config: FlatConfig = field(metadata=LEFT_OUT)
    provenance: dict[str, object] = field(metadata=LEFT_OUT)


def read_sweep(
    group: RunGroup, status: GroupStatus, now: float, speeds: Mapping[int, float | None] | None = None
) -> SweepReport:
    """Read the report of a sweep; `now`, in seconds since the epoch, ends attempts that still run.

    `speeds` are those that a bench has measured, by the index of a point: points are compared by them.
    """
    record, plan = group.record, PlanRecord(group.record.plan)
    metrics = {point.best.metric for point in status.points if point.best}
    name = "val_loss" if "val_loss" in metrics else "loss"
    objective = OBJECTIVES[name if speeds is None else "tokens_per_s"]

    def read(point: PointStatus) -> PointReport:
        size = group.points[point.index].plan.get("world_size", plan.count("world_size"))
        return _read_point(point, size if isinstance(size, int) else None, objective, now, speeds)

    with ThreadPoolExecutor(NUM_READERS) as readers:
        found = list(readers.map(read, status.points))
    points = sorted(found, key=lambda point: _order(point, objective))
    known_hours = [point.worker_hours for point in found if point.worker_hours is not None]
    results = [point for point in points if point.result is not None]
    return SweepReport(
        name=status.name,
        run_dir=status.run_dir,
        keys=status.keys,
        objective=objective,
        points=points,
        states=count_states(point.state for point in found),
        best=min(results, key=lambda point: _rank(point, objective), default=None),
        is_cuda=plan.text("device") == "cuda",
        worker_hours=sum(known_hours) if known_hours else None,
        config=with_effect(dict(flatten(record.config)), plan),
        provenance=read_object(group.provenance_file),
    )


def _order(point: PointReport, objective: Objective) -> tuple[bool, int, float, int]:
    """Failures first, then by result, then those without one."""
    is_failed = point.state in FAILED
    severity = ORDER.index(point.state) if point.state in ORDER else 0
    return (
        not is_failed,
        severity if is_failed or point.result is None else 0,
        _rank(point, objective),
        point.index,
    )


def _rank(point: PointReport, objective: Objective) -> float:
    if point.result is None:
        return float("inf")
    return point.result if objective.is_lowest_best else -point.result


def _read_point(
    status: PointStatus,
    world_size: int | None,
    objective: Objective,
    now: float,
    measured: Mapping[int, float | None] | None,
) -> PointReport:
    run = RunDir(status.run_dir)
    records = sample_records(run.metrics_file)
    end = now if status.state in ACTIVE_STATES else timestamp(records[-1].time) if records else None
    attempts = ended_attempts(attempts_of(read_events(run, *EVENTS)), end)
    speeds, best = numbers(records, "tokens_per_s"), status.best
    tokens_per_s = median(speeds) if speeds else None
    if measured is not None:
        tokens_per_s = measured[status.index]
    result = tokens_per_s
    if objective.name != "tokens_per_s":
        result = float(best.value) if best is not None and best.metric == objective.name else None
    return PointReport(
        **vars(status),
        step=records[-1].step if records else None,
        result=result,
        tokens_per_s=tokens_per_s,
        worker_hours=worker_hours(attempts, world_size) if attempts else None,
        curves={name: _curve(attempts, records, name) for name in ("loss", "tokens_per_s")},
    )


def sample_records(path: Path) -> list[StepRecord]:
    """The records of a short metrics file; of a long one about `NUM_SAMPLES`, from the first to the last."""
    with opened(path) as stream:
        if stream is None:
            return []
        size = os.fstat(stream.fileno()).st_size
        if size <= WHOLE_BYTES:
            return list(steps_of(parse_records(stream)))
        lines = sampled_lines(stream, 0, size, NUM_SAMPLES - 1)
        lines += list(islice(reversed_lines(stream, size), 2))[::-1]  # the last may be cut off
    return list(steps_of(parse_records(lines)))


def _curve(attempts: Sequence[Attempt], records: Sequence[StepRecord], name: str) -> list[Point]:
    """The points of a curve by step; a step that was computed twice has the value that counts."""
    kept = {attempt.number: attempt.kept_step for attempt in attempts}
    points: dict[float, float] = {
        item.step: float(value)
        for item in records
        if (value := item.number(name)) is not None and item.step <= kept.get(item.attempt or 0, float("inf"))
    }
    return sorted(points.items())[:: max(1, len(points) // (2 * NUM_SAMPLES))]


def render_sweep(report: SweepReport) -> str:
    """The page of a sweep."""
    keys = [key for key in report.keys if key != REPEAT]
    return render_page(
        TEMPLATE,
        title=report.name,
        report=report,
        verdict=_verdict(report),
        points=report.points[:MAX_ROWS],
        num_open=OPEN_ROWS,
        num_hidden=max(0, len(report.points) - MAX_ROWS),
        failed=FAILED,
        value=shown_value,
        quote=shlex.quote,
        curves=_curve_charts(report),
        by_key=_key_charts(report, keys[:MAX_AXIS_KEYS]),
        max_lines=MAX_LINES,
        command=shlex.join(Record(report.provenance).texts("argv")),
    )


def point_name(point: PointReport) -> str:
    """The name of a point: its values, else its number."""
    return shown(point.written) or f"point {point.index}"


def _verdict(report: SweepReport) -> str:
    text = f"{report.name}: {plural(len(report.points), 'run')}, {state_counts(report.states)}"
    if report.best is None or report.best.result is None:
        return f"{text}; no results yet."
    label = report.objective.label.capitalize()
    return f"{text}. {label}: {report.best.result:,.5g} with {point_name(report.best)}."


def _curve_charts(report: SweepReport) -> list[Chart]:
    """The curves of the best points over each other; of many, only the best one has a name."""
    drawn = [point for point in report.points if point.curves["loss"]]
    drawn = sorted(drawn, key=lambda point: _rank(point, report.objective))[:MAX_LINES]
    charts = []
    for name, title in (("loss", "Loss"), ("tokens_per_s", "Tokens per second")):
        lines = []
        for number, point in reversed(list(enumerate(drawn))):
            has_name = len(drawn) <= MAX_NAMED_LINES or number == 0
            color = f"c{number}" if has_name else "thin"
            is_best = number == 0 and point.result is not None
            label = point_name(point) + (" (best)" if is_best else "")
            lines.append(
                Line(point.curves[name], f"{color} best" if is_best else color, label if has_name else "")
            )
        if len(drawn) > MAX_NAMED_LINES and lines:
            lines.append(Line(lines[0].points[:1], "thin", "other points"))
        chart = line_chart(title, lines)
        if chart is not None:
            charts.append(chart)
    return charts


def _key_charts(report: SweepReport, keys: Sequence[str]) -> list[Chart]:
    """The results by each key."""
    known = [point for point in report.points if point.result is not None]
    results = [float(point.result or 0.0) for point in known]
    best = None if report.best is None else known.index(report.best)
    label = report.objective.label.capitalize()
    charts = [
        dot_chart(f"{label} by {key}", key, [point.values.get(key) for point in known], results, best)
        for key in keys
    ]
    return [chart for chart in charts if chart is not None]
