"""The report of a sweep, a group or a bench: all of its runs on one page.

A sweep can have thousands of runs, so what is read of each is bounded: records of a long curve are sampled.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from statistics import median

from trainkit.capabilities.report.charts import (
    MAX_CHARTS,
    PALETTE,
    Chart,
    Color,
    Dot,
    Drawn,
    Line,
    colors_of,
    csv_command,
    dash,
    dot_chart,
    line_chart,
    metric_order,
    title_of,
)
from trainkit.capabilities.report.page import render_page, result_figure
from trainkit.capabilities.report.plot import SEED, DrawnRun, Series, labels_of, mean_line, series_of
from trainkit.capabilities.report.thinned import MAX_BUCKETS, Thinned, Wanted, read_all
from trainkit.cli.output import masked
from trainkit.config.schema import flatten
from trainkit.formats import plural, shown
from trainkit.observe.group import (
    FAILED,
    ORDER,
    GroupStatus,
    PointStatus,
    count_states,
    state_counts,
)
from trainkit.observe.ranking import NUM_READERS, Ranking
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
    PlanRecord,
    attempts_of,
    ended_attempts,
    timestamp,
    worker_hours,
)
from trainkit.run.rundir import RunDir

TEMPLATE = "sweep_report.html.j2"
MAX_LINES = 40
"""Trials whose curves are drawn: more would cover each other."""
MAX_DRAWN = 400
"""Runs whose curves are read, several of a trial."""
NUM_BUCKETS = 6000
"""Buckets of all curves of a metric, so that a page does not grow with its runs."""
MIN_BUCKETS = 64
CURVE_BYTES = 2**29
"""Read of all curves together: seconds of work. Of more, evenly spaced parts are read."""
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
REPETITIONS = (SEED, REPEAT)
"""Keys whose values are repetitions of the same trial."""


@dataclass(frozen=True)
class Objective:
    """The figure that the points are compared by."""

    name: str
    label: str
    is_lowest_best: bool


SPEED = Objective("tokens_per_s", "tokens per second", False)
"""How the points of a bench are compared."""


def objective_of(ranking: Ranking) -> Objective:
    """The objective of a sweep whose runs are ranked by a metric."""
    label = "best validation loss" if ranking.metric == "val_loss" else ranking.label
    return Objective(ranking.metric, label, ranking.mode == "min")


@dataclass(frozen=True, kw_only=True)
class PointReport(PointStatus):
    """What one run did; None where a value is unknown."""

    job_id: str | None = field(metadata=LEFT_OUT)
    best: Best | None = field(metadata=LEFT_OUT)
    cluster: str | None = field(default=None, metadata=LEFT_OUT)
    age_s: float | None = field(default=None, metadata=LEFT_OUT)
    step: int | None
    result: float | None
    """Its value of the objective."""
    tokens_per_s: float | None
    """The median of the records that were read."""
    worker_hours: float | None
    counts_samples: bool = field(default=False, metadata=LEFT_OUT)
    """Whether its ``tokens_per_s`` are samples."""
    kept: dict[int, float] = field(default_factory=dict, metadata=LEFT_OUT)
    """Attempt -> the last step that is part of the run's result."""


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
    curves: dict[int, Thinned] = field(metadata=LEFT_OUT)
    """The curves that are drawn, by the index of their point."""
    config: FlatConfig = field(metadata=LEFT_OUT)
    provenance: dict[str, object] = field(metadata=LEFT_OUT)

    @property
    def has_speed(self) -> bool:
        """Whether the speed of any run is known."""
        return any(point.tokens_per_s is not None for point in self.points)

    @property
    def counts_samples(self) -> bool:
        """Whether the speeds of its runs are samples per second."""
        known = [point.counts_samples for point in self.points if point.tokens_per_s is not None]
        return bool(known) and all(known)


def read_sweep(
    group: RunGroup, status: GroupStatus, now: float, speeds: Mapping[int, float | None] | None = None
) -> SweepReport:
    """Read the report of a sweep; `now`, in seconds since the epoch, ends attempts that still run.

    `speeds` are those that a bench has measured, by the index of a point: points are compared by them.
    """
    record, plan = group.record, PlanRecord(group.record.plan)
    objective = objective_of(status.ranking) if speeds is None else SPEED

    def read(point: PointStatus) -> PointReport:
        size = group.points[point.index].plan.get("world_size", plan.count("world_size"))
        return _read_point(point, size if isinstance(size, int) else None, now, speeds)

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
        curves=_read_curves(points, status.keys, objective),
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
    now: float,
    measured: Mapping[int, float | None] | None,
) -> PointReport:
    run = RunDir(status.run_dir)
    records = sample_records(run.metrics_file)
    end = now if status.state in ACTIVE_STATES else timestamp(records[-1].time) if records else None
    attempts = ended_attempts(attempts_of(read_events(run, *EVENTS)), end)
    speeds = numbers(records, "tokens_per_s")
    tokens_per_s = median(speeds) if speeds else None
    if measured is not None:
        tokens_per_s = measured[status.index]
    result = None if status.best is None else float(status.best.value)
    return PointReport(
        **vars(status) | {"step": records[-1].step if records else None},
        result=result if measured is None else tokens_per_s,
        tokens_per_s=tokens_per_s,
        worker_hours=worker_hours(attempts, world_size) if attempts else None,
        counts_samples=bool(records) and records[-1].samples_per_s is not None,
        kept={attempt.number: attempt.kept_step for attempt in attempts},
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


def _trials(
    points: Sequence[PointReport], keys: Sequence[str], objective: Objective
) -> list[list[PointReport]]:
    """The points that differ in their repetitions alone, the trial with the best of them first."""
    own = [key for key in keys if key not in REPETITIONS]
    found: dict[str, list[PointReport]] = {}
    for point in sorted(points, key=lambda point: (_rank(point, objective), point.index)):
        same = repr([point.values.get(key) for key in own]) if keys else str(point.index)
        found.setdefault(same, []).append(point)
    return list(found.values())


def _read_curves(
    points: Sequence[PointReport], keys: Sequence[str], objective: Objective
) -> dict[int, Thinned]:
    """The curves of the best trials, each file read once; of very long ones, parts."""
    started = [point for point in points if point.step is not None]
    trials = _trials(started, keys, objective)[:MAX_LINES]
    chosen = [point for trial in trials for point in trial][:MAX_DRAWN]
    if not chosen:
        return {}
    most = max(MIN_BUCKETS, min(MAX_BUCKETS, NUM_BUCKETS // len(trials)))
    most_bytes = CURVE_BYTES // len(chosen)
    wanted = [Wanted(point.run_dir, point.kept, most, most_bytes) for point in chosen]
    sizes = [RunDir(point.run_dir).metrics_file.stat().st_size for point in chosen]
    read = read_all(wanted, sum(min(size, most_bytes) for size in sizes))
    found = {point.index: thinned for point, thinned in zip(chosen, read, strict=True)}
    for trial in trials:
        own = [found[point.index] for point in trial if point.index in found]
        for thinned in own:
            thinned.widen(max(one.width for one in own))  # their mean is taken bucket by bucket
    return found


def render_sweep(report: SweepReport) -> str:
    """The page of a sweep."""
    keys = [key for key in report.keys if key != REPEAT]
    curves, names = _curve_charts(report)
    trials = _trials(report.points, report.keys, report.objective)
    return render_page(
        TEMPLATE,
        title=report.name,
        report=report,
        verdict=_verdict(report),
        points=report.points[:MAX_ROWS],
        num_open=OPEN_ROWS,
        num_hidden=max(0, len(report.points) - MAX_ROWS),
        failed=FAILED,
        quote=shlex.quote,
        curves=curves[:MAX_CHARTS],
        num_more=len(curves[MAX_CHARTS:]),
        names=names,
        all_points=csv_command(
            report.run_dir, chain.from_iterable(own.names for own in report.curves.values())
        ),
        has_means=any(len(trial) > 1 for trial in trials),
        num_trials=len(trials),
        by_key=_key_charts(report, sorted(keys, key=SEED.__eq__)[:MAX_AXIS_KEYS]),
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
    return f"{text}. {label}: {result_figure(report.best.result)} with {point_name(report.best)}."


def _curve_charts(report: SweepReport) -> tuple[list[Chart], list[Drawn]]:
    """A chart for each metric, with a line per trial, and the names of the lines."""
    keys = [key for key in report.keys if key not in REPETITIONS]
    by_name = {f"point {index}": thinned for index, thinned in report.curves.items()}
    metrics = metric_order(dict.fromkeys(name for own in by_name.values() for name in own.names))
    points = {point.index: point for point in report.points}
    runs = []
    for index, own in report.curves.items():
        values = {key: points[index].values.get(key) for key in keys}
        runs.append(DrawnRun(f"point {index}", values, {name: own.means(name) for name in metrics}))
    series = series_of(runs, keys, len(keys) < len(report.keys))
    best = None if report.best is None else f"point {report.best.index}"
    styles = []
    labels = labels_of(series, keys)
    for one, label, (color, kind) in zip(series, labels, _styles(series, keys), strict=True):
        is_best = any(run.name == best for run in one.runs)
        styles.append(Line([], color, label, kind=f"{kind} best".strip() if is_best else kind))
    charts, counts_samples = [], report.counts_samples
    for metric in metrics:
        lines = []
        for one, style in zip(series, styles, strict=True):
            if len(one.runs) == 1:
                lines.append(replace(style, points=by_name[one.runs[0].name].points(metric)))
                continue
            mean = mean_line(one, metric)
            found = [(round(x), y) for x, y in zip(mean.x, mean.y, strict=True)]
            spread = None if mean.spread is None else list(mean.spread)
            if mean.diverged_at is not None:
                found.append((round(mean.diverged_at), math.nan))
                spread = None if spread is None else [*spread, math.nan]
            lines.append(replace(style, points=found, spread=spread))
        charts.append(line_chart(title_of(metric, counts_samples), lines, has_names=False))
    names = [Drawn(line.kind, line.style, line.name) for line in styles]
    return [chart for chart in charts if chart is not None], names if len(names) > 1 else []


def _styles(series: Sequence[Series], keys: Sequence[str]) -> list[tuple[Color, str]]:
    """The colour of each line by the first key in which the trials differ, and a dash by the other ones."""
    known = [one.values or {} for one in series]
    by = next((key for key in keys if len({repr(own.get(key)) for own in known}) > 1), None)
    if by is None:
        return [(PALETTE[index % len(PALETTE)], dash(index // len(PALETTE))) for index in range(len(series))]
    others = [repr([own.get(key) for key in keys if key != by]) for own in known]
    order = list(dict.fromkeys(others))
    colors = colors_of([own.get(by) for own in known])
    return [(color, dash(order.index(other))) for color, other in zip(colors, others, strict=True)]


def _key_charts(report: SweepReport, keys: Sequence[str]) -> list[Chart]:
    """The results by each key; a run that has diverged has none, and is shown as such."""
    known = [point for point in report.points if point.result is not None or point.diverged_since is not None]
    best = None if report.best is None else report.best.index
    label = report.objective.label.capitalize()
    charts = [
        dot_chart(
            f"{label} by {key}",
            key,
            [
                Dot(masked(point.values.get(key), key), point.result, point_name(point), point.index == best)
                for point in known
            ],
        )
        for key in keys
    ]
    return [chart for chart in charts if chart is not None]
