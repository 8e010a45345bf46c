"""Creates the report of a sweep, another group of runs, or a bench, with all runs on one page.

Because a sweep can have thousands of runs, only a limited number of records is read per run.
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
from trainkit.capabilities.report.run_report import Report
from trainkit.capabilities.report.thinned import MAX_BUCKETS, Thinned, Wanted, read_all
from trainkit.cli.output import masked
from trainkit.config.schema import flatten
from trainkit.formats import plural, shown
from trainkit.observe.group import (
    FAILED,
    ORDER,
    GroupStatus,
    TrialStatus,
    count_states,
    state_counts,
)
from trainkit.observe.ranking import NUM_READERS, Ranking
from trainkit.observe.status import ACTIVE_STATES, FlatConfig
from trainkit.observe.values import with_effect
from trainkit.run.end import Best
from trainkit.run.events import StepRecord, read_events, steps_of
from trainkit.run.files import (
    INLINE,
    LEFT_OUT,
    Record,
    numbers,
    opened,
    parse_records,
    read_object,
    reversed_lines,
    sampled_lines,
    to_json,
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
"""Maximum number of lines in a chart; more lines would overlap too much."""
MAX_DRAWN = 400
"""Maximum number of runs whose curves are read. The maximum exceeds `MAX_LINES`, because a line can be the
mean of several runs."""
NUM_BUCKETS = 6000
"""Total number of buckets for all curves of a metric, which limits the size of a page with many runs."""
MIN_BUCKETS = 64
"""Minimum number of buckets of a curve."""
CURVE_BYTES = 2**29
"""Total number of bytes to read for all curves, which takes a few seconds. Files are read only in part if
their total size exceeds `CURVE_BYTES`."""
OPEN_ROWS = 100
"""Number of runs that the page shows without expanding the list."""
MAX_ROWS = 2000
"""Maximum number of runs that the page lists."""
MAX_AXIS_KEYS = 6
"""Maximum number of config keys for which a chart plots the results against the values of the key."""
NUM_SAMPLES = 64
"""Number of evenly spaced records that are read from a long metrics file."""
WHOLE_BYTES = 65_536
"""Size of metrics.jsonl up to which the file is read completely."""
EVENTS = ("submitted", "started", "training", "first_step", "requeue_decision", "stopped", "finished")
REPEAT = "repeat"
REPETITIONS = (SEED, REPEAT)
"""Config keys that distinguish repetitions of the same trial. Repetitions of a trial are drawn as one
line."""


@dataclass(frozen=True)
class Objective:
    """The metric by which trials are compared."""

    name: str
    label: str
    is_lowest_best: bool


SPEED = Objective("tokens_per_s", "tokens per second", False)
"""The objective of a bench, which compares speeds."""


def objective_of(ranking: Ranking) -> Objective:
    """Return the objective of a sweep, based on the metric that ranks its runs."""
    label = "best validation loss" if ranking.metric == "val_loss" else ranking.label
    return Objective(ranking.metric, label, ranking.mode == "min")


@dataclass(frozen=True, kw_only=True)
class TrialReport(TrialStatus):
    """The results of one run; unknown results are None."""

    job_id: str | None = field(metadata=LEFT_OUT)
    best: Best | None = field(metadata=LEFT_OUT)
    cluster: str | None = field(default=None, metadata=LEFT_OUT)
    age_s: float | None = field(default=None, metadata=LEFT_OUT)
    step: int | None
    result: float | None
    """The value of the objective for this run."""
    tokens_per_s: float | None
    """Median of ``tokens_per_s`` over the records that were read."""
    worker_hours: float | None
    counts_samples: bool = field(default=False, metadata=LEFT_OUT)
    """True if ``tokens_per_s`` counts samples instead of tokens."""
    kept: dict[int, float] = field(default_factory=dict, metadata=LEFT_OUT)
    """Maps each attempt to its last step that was neither recomputed nor lost."""


@dataclass(frozen=True)
class SweepReport:
    """The results of all runs of a sweep."""

    name: str
    run_dir: str
    keys: list[str]
    objective: Objective
    trials: list[TrialReport]
    """All trials: failed trials first, the others sorted by result."""
    states: dict[str, int]
    best: TrialReport | None
    is_cuda: bool
    worker_hours: float | None
    curves: dict[int, Thinned] = field(metadata=LEFT_OUT)
    """Maps the index of a trial to its curves, for the trials that are drawn on the page."""
    config: FlatConfig = field(metadata=LEFT_OUT)
    provenance: dict[str, object] = field(metadata=LEFT_OUT)

    def to_dict(self) -> dict[str, object]:
        """Return the report as a JSON object, with the trials under the key `points`, as in sweep.json."""
        return {"points" if key == "trials" else key: value for key, value in to_json(self).items()}

    @property
    def has_speed(self) -> bool:
        """Return whether the speed of at least one run is known."""
        return any(trial.tokens_per_s is not None for trial in self.trials)

    @property
    def counts_samples(self) -> bool:
        """Return whether all speeds are in samples per second."""
        known = [trial.counts_samples for trial in self.trials if trial.tokens_per_s is not None]
        return bool(known) and all(known)


@dataclass(frozen=True)
class ReportJson:
    """The path of a run's report, and the values that the report shows."""

    report: str
    """The path of the HTML page."""
    values: Report = field(metadata=INLINE)


@dataclass(frozen=True)
class SweepJson:
    """The path of a group's report, and the values that the report shows."""

    report: str
    """The path of the HTML page."""
    name: str
    run_dir: str
    keys: list[str]
    """The config keys whose values differ between the trials."""
    objective: Objective
    points: list[TrialReport]
    """All trials: failed trials first, the others sorted by result."""
    states: dict[str, int]
    """Maps each state to the number of trials in that state."""
    best: TrialReport | None
    is_cuda: bool
    worker_hours: float | None


ReportOrSweep = ReportJson | SweepJson


def read_sweep(
    group: RunGroup, status: GroupStatus, now: float, speeds: Mapping[int, float | None] | None = None
) -> SweepReport:
    """Compute the report of a sweep.

    `now` is in seconds since the epoch, and is used as the end time of attempts that are still running.
    `speeds` maps the index of each trial to the speed that a bench measured. If `speeds` is given, trials are
    compared by speed.
    """
    record, plan = group.record, PlanRecord(group.record.plan)
    objective = objective_of(status.ranking) if speeds is None else SPEED

    def read(trial: TrialStatus) -> TrialReport:
        size = group.trials[trial.index].plan.get("world_size", plan.count("world_size"))
        return _read_trial(trial, size if isinstance(size, int) else None, now, speeds)

    with ThreadPoolExecutor(NUM_READERS) as readers:
        found = list(readers.map(read, status.trials))
    trials = sorted(found, key=lambda trial: _order(trial, objective))
    known_hours = [trial.worker_hours for trial in found if trial.worker_hours is not None]
    results = [trial for trial in trials if trial.result is not None]
    return SweepReport(
        name=status.name,
        run_dir=status.run_dir,
        keys=status.keys,
        objective=objective,
        trials=trials,
        states=count_states(trial.state for trial in found),
        best=min(results, key=lambda trial: _rank(trial, objective), default=None),
        is_cuda=plan.text("device") == "cuda",
        worker_hours=sum(known_hours) if known_hours else None,
        curves=_read_curves(trials, status.keys, objective),
        config=with_effect(dict(flatten(record.config)), plan),
        provenance=read_object(group.provenance_file),
    )


def _order(trial: TrialReport, objective: Objective) -> tuple[bool, int, float, int]:
    """Return the sort key of a trial, so that failed trials come first, and trials without a result last."""
    is_failed = trial.state in FAILED
    severity = ORDER.index(trial.state) if trial.state in ORDER else 0
    return (
        not is_failed,
        severity if is_failed or trial.result is None else 0,
        _rank(trial, objective),
        trial.index,
    )


def _rank(trial: TrialReport, objective: Objective) -> float:
    if trial.result is None:
        return float("inf")
    return trial.result if objective.is_lowest_best else -trial.result


def _read_trial(
    status: TrialStatus,
    world_size: int | None,
    now: float,
    measured: Mapping[int, float | None] | None,
) -> TrialReport:
    run = RunDir(status.run_dir)
    records = sample_records(run.metrics_file)
    end = now if status.state in ACTIVE_STATES else timestamp(records[-1].time) if records else None
    attempts = ended_attempts(attempts_of(read_events(run, *EVENTS)), end)
    speeds = numbers(records, "tokens_per_s")
    tokens_per_s = median(speeds) if speeds else None
    if measured is not None:
        tokens_per_s = measured[status.index]
    result = None if status.best is None else float(status.best.value)
    return TrialReport(
        **vars(status) | {"step": records[-1].step if records else None},
        result=result if measured is None else tokens_per_s,
        tokens_per_s=tokens_per_s,
        worker_hours=worker_hours(attempts, world_size) if attempts else None,
        counts_samples=bool(records) and records[-1].samples_per_s is not None,
        kept={attempt.number: attempt.kept_step for attempt in attempts},
    )


def sample_records(path: Path) -> list[StepRecord]:
    """Return the records of a metrics file, or about `NUM_SAMPLES` evenly spaced ones if the file is long."""
    with opened(path) as stream:
        if stream is None:
            return []
        size = os.fstat(stream.fileno()).st_size
        if size <= WHOLE_BYTES:
            return list(steps_of(parse_records(stream)))
        lines = sampled_lines(stream, 0, size, NUM_SAMPLES - 1)
        # Read two lines, because the last line may be incomplete.
        lines += list(islice(reversed_lines(stream, size), 2))[::-1]
    return list(steps_of(parse_records(lines)))


def _repetitions(
    trials: Sequence[TrialReport], keys: Sequence[str], objective: Objective
) -> list[list[TrialReport]]:
    """Group trials that are repetitions of each other; sort groups and the trials in each, best first."""
    own = [key for key in keys if key not in REPETITIONS]
    found: dict[str, list[TrialReport]] = {}
    for trial in sorted(trials, key=lambda trial: (_rank(trial, objective), trial.index)):
        same = repr([trial.values.get(key) for key in own]) if keys else str(trial.index)
        found.setdefault(same, []).append(trial)
    return list(found.values())


def _read_curves(
    trials: Sequence[TrialReport], keys: Sequence[str], objective: Objective
) -> dict[int, Thinned]:
    """Read the curves of the best trials; return a mapping from trial index to curves."""
    started = [trial for trial in trials if trial.step is not None]
    lines = _repetitions(started, keys, objective)[:MAX_LINES]
    chosen = [trial for line in lines for trial in line][:MAX_DRAWN]
    if not chosen:
        return {}
    most = max(MIN_BUCKETS, min(MAX_BUCKETS, NUM_BUCKETS // len(lines)))
    most_bytes = CURVE_BYTES // len(chosen)
    wanted = [Wanted(trial.run_dir, trial.kept, most, most_bytes) for trial in chosen]
    sizes = [RunDir(trial.run_dir).metrics_file.stat().st_size for trial in chosen]
    read = read_all(wanted, sum(min(size, most_bytes) for size in sizes))
    found = {trial.index: thinned for trial, thinned in zip(chosen, read, strict=True)}
    for line in lines:
        own = [found[trial.index] for trial in line if trial.index in found]
        for thinned in own:
            # Curves can be averaged only if their buckets have the same width.
            thinned.widen(max(one.width for one in own))
    return found


def render_sweep(report: SweepReport, metric: str | None = None) -> str:
    """Return the HTML page of a sweep; the curves of `metric` come first."""
    keys = [key for key in report.keys if key != REPEAT]
    curves, names = _curve_charts(report, metric)
    lines = _repetitions(report.trials, report.keys, report.objective)
    return render_page(
        TEMPLATE,
        title=report.name,
        report=report,
        verdict=_summary(report),
        trials=report.trials[:MAX_ROWS],
        num_open=OPEN_ROWS,
        num_hidden=max(0, len(report.trials) - MAX_ROWS),
        failed=FAILED,
        quote=shlex.quote,
        curves=curves[:MAX_CHARTS],
        num_more=len(curves[MAX_CHARTS:]),
        names=names,
        all_points=csv_command(
            report.run_dir, chain.from_iterable(own.names for own in report.curves.values())
        ),
        has_means=any(len(line) > 1 for line in lines),
        num_lines=len(lines),
        by_key=_key_charts(report, sorted(keys, key=SEED.__eq__)[:MAX_AXIS_KEYS]),
        max_lines=MAX_LINES,
        command=shlex.join(Record(report.provenance).texts("argv")),
    )


def trial_name(trial: TrialReport) -> str:
    """Return the name of a trial: its values for the swept keys, or its number if it has no values."""
    return shown(trial.written) or f"trial {trial.index}"


def _summary(report: SweepReport) -> str:
    text = f"{report.name}: {plural(len(report.trials), 'run')}, {state_counts(report.states)}"
    if num_diverged := sum(trial.diverged_since is not None for trial in report.trials):
        text += f", {num_diverged:,} of them diverged"
    if report.best is None or report.best.result is None:
        return f"{text}; no results yet."
    label = report.objective.label.capitalize()
    return f"{text}. {label}: {result_figure(report.best.result)} with {trial_name(report.best)}."


def _curve_charts(report: SweepReport, first: str | None = None) -> tuple[list[Chart], list[Drawn]]:
    """Return a chart for each metric, beginning with `first`, and the legend of these charts."""
    keys = [key for key in report.keys if key not in REPETITIONS]
    by_name = {f"trial {index}": thinned for index, thinned in report.curves.items()}
    metrics = metric_order(dict.fromkeys(name for own in by_name.values() for name in own.names), first)
    trials = {trial.index: trial for trial in report.trials}
    runs = []
    for index, own in report.curves.items():
        trial = trials[index]
        values = {key: trial.values.get(key) for key in keys}
        typed = {key: trial.written[key] for key in keys if key in trial.written}
        runs.append(DrawnRun(f"trial {index}", values, {name: own.means(name) for name in metrics}, typed))
    series = series_of(runs, keys, len(keys) < len(report.keys))
    best = None if report.best is None else f"trial {report.best.index}"
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
                found.append((round(mean.diverged_at), mean.diverged_to))
                spread = None if spread is None else [*spread, math.nan]
            lines.append(replace(style, points=found, spread=spread))
        charts.append(line_chart(title_of(metric, counts_samples), lines, has_names=False))
    names = [Drawn(line.kind, line.style, line.name) for line in styles]
    return [chart for chart in charts if chart is not None], names if len(names) > 1 else []


def _styles(series: Sequence[Series], keys: Sequence[str]) -> list[tuple[Color, str]]:
    """Return the colour and the dash pattern of each line.

    The first key that differs between the trials determines the colour; the other keys determine the dash
    pattern.
    """
    known = [one.values or {} for one in series]
    by = next((key for key in keys if len({repr(own.get(key)) for own in known}) > 1), None)
    if by is None:
        return [(PALETTE[index % len(PALETTE)], dash(index // len(PALETTE))) for index in range(len(series))]
    others = [repr([own.get(key) for key in keys if key != by]) for own in known]
    order = list(dict.fromkeys(others))
    colors = colors_of([own.get(by) for own in known])
    return [(color, dash(order.index(other))) for color, other in zip(colors, others, strict=True)]


def _key_charts(report: SweepReport, keys: Sequence[str]) -> list[Chart]:
    """For each key, return a chart of the results against the key's values; diverged runs are included."""
    known = [trial for trial in report.trials if trial.result is not None or trial.diverged_since is not None]
    best = None if report.best is None else report.best.index
    label = report.objective.label.capitalize()
    charts = [
        dot_chart(
            f"{label} by {key}",
            key,
            [
                Dot(masked(trial.values.get(key), key), trial.result, trial_name(trial), trial.index == best)
                for trial in known
            ],
        )
        for key in keys
    ]
    return [chart for chart in charts if chart is not None]
