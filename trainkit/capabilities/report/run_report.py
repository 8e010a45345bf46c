"""Creates the report of a run: the results and the use of the allocated time, and an HTML page."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, field
from html import escape

from trainkit.capabilities.report.charts import MAX_CHARTS, Chart, csv_command, run_charts
from trainkit.capabilities.report.goodput import CATEGORIES, Curves, read_curves
from trainkit.capabilities.report.page import render_page
from trainkit.capabilities.report.thinned import Point
from trainkit.formats import GIB, size
from trainkit.observe.status import FlatConfig, RunStatus, failure_lines, loss_text
from trainkit.observe.values import asked_of
from trainkit.run.checkpoint_list import ListedCheckpoint, list_checkpoints
from trainkit.run.events import later_metrics, with_divergence
from trainkit.run.files import LEFT_OUT, Record, numbers, read_object, to_json
from trainkit.run.history import (
    Attempt,
    PlanRecord,
    RunHistory,
    ended_attempts,
    idle_gaps,
    read_plan,
    timestamp,
    worker_hours,
)
from trainkit.shipped import ask_each, placed

TEMPLATE = "report.html.j2"
TIME_MARGIN, MEMORY_MARGIN = 1.2, 1.25
"""Ratio of the recommended time limit to the measured time, and of the recommended to the measured memory."""
NOTHING, NOT_ASKED = "nothing", "nothing: only Slurm jobs request it"
BY = {"cgroup": " of the job's control group", "processes": " of its processes"}
"""Maps a method of measuring a job's memory to a phrase that follows "peak sampled"."""


@dataclass(frozen=True)
class Advice:
    """The requested and the used amount of a resource, and the amount to request for the next run."""

    resource: str
    asked: str
    used: str
    next_time: str


@dataclass(frozen=True)
class Report:
    """The results of a run; unknown results are None."""

    status: RunStatus
    verdict: str
    attempts: list[Attempt]
    allocated_s: float
    queued_s: float | None
    spent: dict[str, float]
    """Maps each time category to seconds. The seconds of all categories add up to `allocated_s`."""
    percent: dict[str, float]
    """Maps each time category to its percentage of `allocated_s`. The mapping is empty if no time was
    allocated."""
    goodput: float | None
    """The fraction of allocated time spent on steps that were neither recomputed nor lost; None if it was not
    measured."""
    world_size: int | None
    worker_hours: float | None
    num_records: int
    num_steps_lost: int
    curves: dict[str, dict[int, list[Point]]] = field(metadata=LEFT_OUT)
    metrics: dict[str, list[Point]] = field(metadata=LEFT_OUT)
    """Maps each metric to its points; non-finite values are nan or -inf."""
    val_loss: list[Point] = field(metadata=LEFT_OUT)
    advice: list[Advice]
    checkpoints: list[ListedCheckpoint]
    config: FlatConfig
    layout: dict[str, int]
    provenance: dict[str, object]
    added: dict[str, object] = field(metadata=LEFT_OUT)
    """Keys that capabilities add to the report."""
    sections: dict[str, str] = field(metadata=LEFT_OUT)
    """Maps the title of each page section added by a capability to the section's HTML."""

    def to_dict(self) -> dict[str, object]:
        return placed("report", {**to_json(self), "status": self.status.to_dict()}, to_json(self.added))


def read_report(history: RunHistory, status: RunStatus, now: float) -> Report:
    """Compute the report of a run.

    `history` contains the run's events, and `now` is the current time in seconds since the epoch.
    """
    run, events = history.run, history.events
    attempts = ended_attempts(events.attempts, now if status.is_active else _last_time(history))
    checkpoints = list_checkpoints(run)
    if attempts and not status.is_active and status.state != "finished" and not status.is_command:
        # Steps after the newest published checkpoint are considered lost.
        saved = [item.step or 0 for item in checkpoints if item.state == "published"]
        attempts[-1].kept_step = max(saved, default=0)
    curves = read_curves(run.metrics_file, attempts)
    idle_s = idle_gaps(attempts)
    spent = {name: sum(own[name] for own in curves.spent.values()) for name in CATEGORIES}
    spent["idle"] += idle_s
    allocated_s = sum(attempt.allocated_s for attempt in attempts) + idle_s
    spent["unmeasured"] += max(0.0, allocated_s - sum(spent.values()))
    total, plan = sum(spent.values()), read_plan(run)
    world_size = plan.count("world_size")
    answers = ask_each(plan.parts, lambda one: one.report(history), lambda name, text: {name: text})
    added = {key: value for own in answers.values() for key, value in own.items()}
    pages = ask_each(plan.parts, lambda one: one.sections(history), lambda name, text: {name: escape(text)})
    config = asked_of(run, plan)
    times = [(item.submitted, item.started) for item in attempts]
    waits = [max(0.0, end - begin) for begin, end in times if begin is not None and end is not None]
    goodput = spent["productive"] / allocated_s if allocated_s > 0 and curves.is_measured else None
    return Report(
        status=status,
        verdict=_summary(status, goodput, attempts),
        attempts=attempts,
        allocated_s=allocated_s,
        queued_s=sum(waits) if waits else None,
        spent=spent,
        percent={} if total <= 0 else {name: round(100 * spent[name] / total, 1) for name in spent},
        goodput=goodput,
        world_size=world_size,
        worker_hours=worker_hours(attempts, world_size),
        num_records=curves.num_records,
        num_steps_lost=curves.num_steps_lost,
        curves=curves.series,
        metrics=curves.metrics | {name: [*own.items()] for name, own in later_metrics(run).items()},
        val_loss=sorted(events.val_losses.items()),
        advice=_advice(config, attempts, Record(to_json(added)), status, curves, plan),
        checkpoints=checkpoints,
        config=config,
        layout={name: size for name, size in plan.record("layout").values.items() if isinstance(size, int)},
        provenance=read_object(run.provenance_file),
        added=added,
        sections={title: html for own in pages.values() for title, html in own.items()},
    )


def render_report(report: Report, metric: str | None = None) -> str:
    """Return the HTML page of a report; the chart of `metric` comes first."""
    failed, charts = report.status.failure, _charts(report, metric)
    return render_page(
        TEMPLATE,
        title=report.status.name,
        report=report,
        status=report.status,
        failure=[] if failed is None else failure_lines(failed, shlex.quote(report.status.run_dir)),
        loss_text=loss_text,
        labels=CATEGORIES,
        charts=charts[:MAX_CHARTS],
        num_more=len(charts[MAX_CHARTS:]),
        all_points=csv_command(report.status.run_dir, report.metrics),
        timeline=_timeline(report),
        command=shlex.join(Record(report.provenance).texts("argv")),
    )


def _charts(report: Report, metric: str | None) -> list[Chart]:
    marks = [
        (float(item.start_step), str(item.number)) for item in report.attempts if item.training is not None
    ]
    series = report.metrics
    # A COMMAND logs validation losses as events, not as metrics.
    if report.val_loss and "val_loss" not in series:
        series = {**series, "val_loss": report.val_loss}
    return run_charts(series, marks, report.status.progress.samples_per_s is not None, metric)


def _timeline(report: Report) -> list[dict[str, object]]:
    """Return a row per attempt with its time spans and ticks, in percent of the run's total time."""
    times = [
        time
        for attempt in report.attempts
        for time in (attempt.submitted, attempt.started, attempt.ended)
        if time
    ]
    if not times or max(times) <= min(times):
        return []
    begin, length = min(times), max(times) - min(times)

    def at(time: float) -> float:
        return round(max(0.0, min(100.0, (time - begin) / length * 100)), 2)

    rows = []
    for item in report.attempts:
        spans = []
        loop = item.training or item.first_step
        for kind, first, last in (
            ("queue", item.submitted, item.started),
            ("startup", item.started, loop or item.ended),
            ("productive", loop, item.ended),
        ):
            if first is not None and last is not None and last > first:
                spans.append((kind, at(first), round(at(last) - at(first), 2)))
        marks = [("save", at(t)) for t in item.saves[-200:]] + [
            ("eval", at(t)) for t in item.evaluations[-200:]
        ]
        stops = list(item.signals)
        if item.ended is not None and item.state not in (None, "finished"):
            stops.append(item.ended)
        rows.append({"attempt": item, "spans": spans, "marks": marks, "stops": [at(time) for time in stops]})
    return rows


ENDED = {name: name for name in ("finished", "failed", "died", "stopped")} | {"cancelled": "was cancelled"}
"""Maps the final state of a run to the verb used in the first sentence of the page."""


def _summary(status: RunStatus, goodput: float | None, attempts: list[Attempt]) -> str:
    done, planned = status.progress.step, status.progress.total_steps
    step = "at an unknown step" if done is None else f"at step {done:,}"
    total = "" if planned is None or done is None else f" of {planned:,}"
    tries = f" after {len(attempts)} attempts" if len(attempts) > 1 else ""
    since = status.progress.diverged_since
    said = with_divergence(None, since) if status.state == "finished" else status.reason
    why = f": {said}" if said else ""
    useful = (
        "the share of the allocated time spent on productive steps is unknown"
        if goodput is None
        else f"{goodput:.0%} of the allocated time was spent on productive steps"
    )
    state = ENDED.get(status.state, f"is {status.state}")
    return f"{status.name} {state} {step}{total}{tries}{why}; {useful}."


def _advice(
    config: FlatConfig,
    attempts: list[Attempt],
    added: Record,
    status: RunStatus,
    curves: Curves,
    plan: PlanRecord,
) -> list[Advice]:
    found, asks = [], plan.is_job
    longest_s = max((attempt.allocated_s for attempt in attempts), default=0.0)
    if longest_s:
        following = "unknown: the run did not finish"
        if status.state == "finished":
            lost_s = sum(own["lost"] for own in curves.spent.values())
            needed_s = sum(attempt.allocated_s for attempt in attempts) - lost_s
            minutes = 5 * math.ceil(needed_s * TIME_MARGIN / 300)
            what = "the measured time" if len(attempts) == 1 else "all attempts, excluding repeated steps"
            following = f"--time {minutes // 60:02d}:{minutes % 60:02d}:00 (20 % above {what})"
        minutes, seconds = divmod(round(longest_s), 60)
        longest = f"{minutes:,} min {seconds:02d} s" if longest_s >= 60 else f"{longest_s:.1f} s"
        asked = str(config.get("resources.slice") or config.get("resources.time"))
        used = f"{longest} (longest attempt)"
        found.append(Advice("Time", *((asked, used, following) if asks else (NOTHING, used, NOT_ASKED))))
    asked = str(config.get("resources.mem") or "the cluster's default")
    used, following = unknown = "unknown", "unknown: not measured"
    nodes = added.records("nodes")
    if peaks := numbers(nodes, "job_mem_peak_gib"):
        by = {BY.get(node.text("job_mem_by") or "", "") for node in nodes}
        used = f"{size(max(peaks) * GIB)} (peak sampled{', '.join(sorted(by))})"
        ask_for = max(1, math.ceil(max(peaks) * MEMORY_MARGIN))
        following = f"--set resources.mem={ask_for}G (25 % above the peak sampled)"
    found.append(Advice("Memory a node", *((asked, used, following) if asks else (NOTHING, used, NOT_ASKED))))
    if status.place.device == "cuda":
        used, following = unknown
        if busy := numbers(nodes, "gpu_mean_percent"):
            share = sum(busy) / len(busy)
            used = f"{share:.0f} % busy on average"
            following = "before you request more GPUs, find out why these GPUs are idle"
            if share >= 70:
                following = "the same number, because the GPUs were busy"
        found.append(Advice("GPUs", f"{config.get('resources.gpus_per_node')} a node", used, following))
    return found


def _last_time(history: RunHistory) -> float | None:
    """Return the last time at which a run was known to be alive, for a run whose end was not recorded."""
    times = [timestamp(event.time) for event in list(history.events.recent)[-1:]]
    file = history.run.metrics_file
    if file.exists():
        times.append(file.stat().st_mtime)
    return max((time for time in times if time is not None), default=None)
