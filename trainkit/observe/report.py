"""The report of a run: what it did, where its time went, and a page that shows it without a network."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from trainkit.config.names import flatten
from trainkit.observe.charts import Chart, Line, line_chart
from trainkit.observe.checkpoints import ListedCheckpoint, list_checkpoints
from trainkit.observe.goodput import (
    CATEGORIES,
    SERIES,
    Attempt,
    Curves,
    Point,
    idle_gaps,
    read_attempts,
    read_curves,
    seconds,
)
from trainkit.observe.page import duration, read_config, render_page
from trainkit.observe.run_files import gpus_of
from trainkit.observe.status import RunStatus
from trainkit.run.files import read_jsonl, read_object
from trainkit.run.rundir import RunDir

TEMPLATE = "report.html.j2"
HEALTH_BYTES = 16 * 1024 * 1024
"""How much of the samples of all nodes is parsed: the file of a node has at most 4 MiB."""
TIME_MARGIN, MEMORY_MARGIN = 1.2, 1.25
TITLES = {
    "loss": "Loss",
    "grad_norm": "Gradient norm",
    "lr": "Learning rate",
    "tokens_per_s": "Tokens per second",
}


@dataclass(frozen=True)
class NodeUse:
    """What the samples of one node say; None where nothing was measured."""

    host: str
    num_samples: int
    cpu_mean_percent: float | None
    job_mem_peak_gib: float | None
    mem_total_gib: float | None
    gpu_mean_percent: float | None
    gpu_mem_peak_gib: float | None
    gpu_mem_total_gib: float | None


@dataclass(frozen=True)
class Advice:
    """One resource: what was asked, what was used, and what to ask for next time."""

    resource: str
    asked: str
    used: str
    next_time: str


@dataclass(frozen=True)
class Slowdown:
    """A rank, or with `rank` None the whole run, that was slow for a while."""

    attempt: int | None
    rank: int | None
    host: str | None
    phase: str | None
    """``data``, ``compute`` or ``network``: where most of the difference was."""
    noticed: str | None
    since_step: int | None
    until_step: int | None
    """When it was seen to be as fast as usual; None if it was slow until the attempt ended, or still is."""
    own_s: float | None
    """Its seconds of a step; of a rank, before it first waits for others."""
    usual_s: float | None
    """Seconds of a step of the other ranks, or of the run before."""


@dataclass(frozen=True)
class Report:
    """What a run did; None where a value is unknown."""

    status: RunStatus
    verdict: str
    attempts: list[Attempt]
    allocated_s: float
    queued_s: float | None
    spent: dict[str, float]
    """Category of `CATEGORIES` -> seconds; they add up to `allocated_s`."""
    percent: dict[str, float]
    """Category -> percent of `allocated_s`; they add up to 100.0. Empty when nothing was allocated."""
    goodput: float | None
    """Productive and kept step time over allocated time; None when it was not measured."""
    world_size: int | None
    worker_hours: float | None
    num_records: int
    num_steps_lost: int
    curves: dict[str, dict[int, list[Point]]]
    val_loss: list[Point]
    slowdowns: list[Slowdown]
    nodes: list[NodeUse]
    advice: list[Advice]
    checkpoints: list[ListedCheckpoint]
    config: dict[str, Any]
    layout: dict[str, int]
    provenance: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON, without the points of its curves."""
        value = {**asdict(self), "status": self.status.to_dict()}
        value.pop("curves"), value.pop("val_loss")
        for attempt in value["attempts"]:
            if math.isinf(attempt["kept_step"]):
                attempt["kept_step"] = None
        return value


def read_report(run: RunDir, status: RunStatus, now: float) -> Report:
    """Read the report of a run; `now` is in seconds since the epoch."""
    events = list(read_jsonl(run.events_file))
    attempts = read_attempts(events, now if status.is_active else _last_time(run, events))
    checkpoints = list_checkpoints(run)
    if attempts and not status.is_active and status.state != "finished" and not status.command:
        # Nothing is left of the steps after the newest checkpoint.
        saved = [item.step or 0 for item in checkpoints if item.state == "published"]
        attempts[-1].kept_step = max(saved, default=0)
    curves = read_curves(run.metrics_file, attempts)
    idle_s = idle_gaps(attempts)
    spent = {name: sum(own[name] for own in curves.spent.values()) for name in CATEGORIES}
    spent["idle"] += idle_s
    allocated_s = sum(attempt.allocated_s for attempt in attempts) + idle_s
    spent["unmeasured"] += max(0.0, allocated_s - sum(spent.values()))
    plan = read_object(run.plan_file)
    world_size = plan.get("world_size")
    nodes = read_nodes(run)
    config = dict(flatten(read_config(run)))
    is_measured = allocated_s > 0 and curves.num_records > 0
    goodput = spent["productive"] / allocated_s if is_measured else None
    return Report(
        status=status,
        verdict=_verdict(status, goodput, attempts),
        attempts=attempts,
        allocated_s=allocated_s,
        queued_s=_queued_s(attempts),
        spent=spent,
        percent=percentages(spent),
        goodput=goodput,
        world_size=world_size,
        worker_hours=allocated_s * world_size / 3600 if isinstance(world_size, int) else None,
        num_records=curves.num_records,
        num_steps_lost=curves.num_steps_lost,
        curves=curves.series,
        val_loss=_val_losses(events),
        slowdowns=find_slowdowns(events),
        nodes=nodes,
        advice=_advice(config, attempts, nodes, status, curves),
        checkpoints=checkpoints,
        config=config,
        layout=plan.get("layout") or {},
        provenance=read_object(run.provenance_file),
    )


def find_slowdowns(events: Sequence[Mapping[str, Any]]) -> list[Slowdown]:
    """The slow ranks in a run's events, in the order in which they were noticed."""
    found: list[dict[str, Any]] = []
    for event in events:
        if event.get("event") in ("slow_rank", "slow_run"):
            found.append({**event, "noticed": event.get("time"), "until_step": None})
        elif event.get("event") in ("slow_rank_over", "slow_run_over"):
            same = [
                item for item in found if all(item.get(key) == event.get(key) for key in ("attempt", "rank"))
            ]
            if same:
                same[-1]["until_step"] = event.get("step")
    return [Slowdown(**{item.name: record.get(item.name) for item in fields(Slowdown)}) for record in found]


def percentages(spent: Mapping[str, float]) -> dict[str, float]:
    """Shares in percent that add up to exactly 100.0, rounded by largest remainder; empty for 0 s."""
    total = sum(spent.values())
    if total <= 0:
        return {}
    exact = {name: value / total * 1000 for name, value in spent.items()}
    shares = {name: math.floor(value) for name, value in exact.items()}
    missing = 1000 - sum(shares.values())
    for name in sorted(exact, key=lambda name: shares[name] - exact[name])[:missing]:
        shares[name] += 1
    return {name: share / 10 for name, share in shares.items()}


def read_nodes(run: RunDir) -> list[NodeUse]:
    """The utilisation of each node, from its samples; empty without samples.

    Of many nodes with many samples, some samples are left out, the same share of each node.
    """
    files = sorted((run.path / "health").glob("*.jsonl"))
    every = max(1, sum(file.stat().st_size for file in files) // HEALTH_BYTES)
    found = []
    for file in files:
        samples = list(read_jsonl(file, every=every))
        gpus = [gpu for sample in samples for gpu in gpus_of(sample)]
        found.append(
            NodeUse(
                host=file.stem,
                num_samples=len(samples),
                cpu_mean_percent=_mean(samples, "cpu_percent"),
                job_mem_peak_gib=_peak(samples, "job_mem_gib"),
                mem_total_gib=_peak(samples, "mem_total_gib"),
                gpu_mean_percent=_mean(gpus, "util_percent"),
                gpu_mem_peak_gib=_peak(gpus, "mem_used_gib"),
                gpu_mem_total_gib=_peak(gpus, "mem_total_gib"),
            )
        )
    return found


def render_report(report: Report, other: Report | None = None) -> str:
    """The page of a report; with `other`, of both side by side."""
    argv = report.provenance.get("argv") or []
    return render_page(
        TEMPLATE,
        title=report.status.name,
        report=report,
        status=report.status,
        other=other,
        labels=CATEGORIES,
        names=_names(report, other),
        charts=_charts(report, other),
        timeline=_timeline(report),
        command=shlex.join(map(str, argv)),
        changed=[] if other is None else _changed(report.config, other.config),
    )


def _names(report: Report, other: Report | None) -> tuple[str, str]:
    """What the runs are called; by their folders when they have the same name, as points of a sweep do."""
    if other is None or other.status.name != report.status.name:
        return report.status.name, "" if other is None else other.status.name
    first, second = ("/".join(Path(item.status.run_dir).parts[-2:]) for item in (report, other))
    return first, second


def _charts(report: Report, other: Report | None) -> list[Chart]:
    own_name, other_name = _names(report, other)
    marks = [
        (float(attempt.start_step), str(attempt.number))
        for attempt in report.attempts
        if attempt.training is not None
    ]
    charts = []
    for name in SERIES:
        lines = [
            Line(points, "c0", own_name if index == 0 else "")
            for index, points in enumerate(report.curves[name].values())
        ]
        if other is not None:
            lines += [
                Line(points, "c2", f"{other_name} (compared)" if index == 0 else "")
                for index, points in enumerate(other.curves[name].values())
            ]
        if name == "loss":
            lines.append(Line(report.val_loss, "c1", "validation"))
            if other is not None:
                lines.append(Line(other.val_loss, "c3", "validation (compared)"))
        chart = line_chart(TITLES[name], lines, marks)
        if chart is not None:
            charts.append(chart)
    return charts


def _timeline(report: Report) -> list[dict[str, Any]]:
    """A row per attempt: spans and marks, in percent of the run's time."""
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


def _changed(own: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    keys = sorted(own.keys() | other.keys())
    return [
        (key, json.dumps(own.get(key)), json.dumps(other.get(key)))
        for key in keys
        if own.get(key) != other.get(key)
    ]


ENDED = {name: name for name in ("finished", "failed", "died", "stopped")} | {"cancelled": "was cancelled"}
"""State of a run that has ended -> the verb of the verdict."""


def _verdict(status: RunStatus, goodput: float | None, attempts: list[Attempt]) -> str:
    step = "at an unknown step" if status.step is None else f"at step {status.step:,}"
    total = "" if status.total_steps is None or status.step is None else f" of {status.total_steps:,}"
    tries = f" after {len(attempts)} attempts" if len(attempts) > 1 else ""
    why = f": {status.reason}" if status.reason and status.state != "finished" else ""
    useful = (
        "how much of the allocated time was productive is unknown"
        if goodput is None
        else f"{goodput:.0%} of the allocated time went into steps that count"
    )
    state = ENDED.get(status.state, f"is {status.state}")
    return f"{status.name} {state} {step}{total}{tries}{why}; {useful}."


def _advice(
    config: Mapping[str, Any],
    attempts: list[Attempt],
    nodes: list[NodeUse],
    status: RunStatus,
    curves: Curves,
) -> list[Advice]:
    found = []
    longest_s = max((attempt.allocated_s for attempt in attempts), default=0.0)
    if longest_s:
        following = "unknown: the run did not finish"
        if status.state == "finished":
            needed_s = sum(attempt.allocated_s for attempt in attempts) - sum(
                own["lost"] for own in curves.spent.values()
            )
            minutes = 5 * math.ceil(needed_s * TIME_MARGIN / 300)
            what = "the measured time" if len(attempts) == 1 else "all attempts without repeated steps"
            following = f"--time {minutes // 60:02d}:{minutes % 60:02d}:00 (20 % above {what})"
        found.append(
            Advice(
                "Time",
                str(config.get("resources.time")),
                f"{duration(longest_s)} (longest attempt)",
                following,
            )
        )
    memory = max((node.job_mem_peak_gib for node in nodes if node.job_mem_peak_gib is not None), default=None)
    asked = config.get("resources.mem")
    next_memory = "unknown: not measured"
    if memory is not None:
        next_memory = (
            f"--set resources.mem={max(1, math.ceil(memory * MEMORY_MARGIN))}G (25 % above the peak sampled)"
        )
    found.append(
        Advice(
            "Memory a node",
            "the cluster's default" if asked is None else str(asked),
            "unknown" if memory is None else f"{memory:.1f} GiB (peak sampled)",
            next_memory,
        )
    )
    gpu = [node.gpu_mean_percent for node in nodes if node.gpu_mean_percent is not None]
    mean = None if not gpu else sum(gpu) / len(gpu)
    asked_gpus = f"{config.get('resources.gpus_per_node')} a node"
    if status.device == "cuda":
        waits = "the same: they were busy" if mean is not None and mean >= 70 else ""
        waits = waits or (
            "unknown: not measured" if mean is None else "find what they wait for before asking for more"
        )
        used = "unknown" if mean is None else f"{mean:.0f} % busy on average"
        found.append(Advice("GPUs", asked_gpus, used, waits))
    return found


def _queued_s(attempts: list[Attempt]) -> float | None:
    waits = [
        max(0.0, item.started - item.submitted)
        for item in attempts
        if item.started is not None and item.submitted is not None
    ]
    return sum(waits) if waits else None


def _val_losses(events: list[dict[str, Any]]) -> list[Point]:
    by_step = {
        event["step"]: event["val_loss"]
        for event in events
        if event.get("event") == "evaluated"
        and isinstance(event.get("step"), int)
        and isinstance(event.get("val_loss"), (int, float))
        and math.isfinite(event["val_loss"])
    }
    return sorted(by_step.items())


def _last_time(run: RunDir, events: list[dict[str, Any]]) -> float | None:
    """When a run that left no end was last seen."""
    times = [seconds(event.get("time")) for event in events[-1:]]
    if run.metrics_file.exists():
        times.append(run.metrics_file.stat().st_mtime)
    return max((time for time in times if time is not None), default=None)


def _mean(samples: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [sample[key] for sample in samples if isinstance(sample.get(key), (int, float))]
    return sum(values) / len(values) if values else None


def _peak(samples: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return max((s[key] for s in samples if isinstance(s.get(key), (int, float))), default=None)
