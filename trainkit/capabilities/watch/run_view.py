"""Computes what `trainkit watch` shows for a run, from the run's files, its job and the current time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from shlex import join, quote

from trainkit.capability import HostView, Notice, Reading
from trainkit.folders import relative_path
from trainkit.formats import duration
from trainkit.observe.group import GroupJson
from trainkit.observe.logs import last_texts, log_of
from trainkit.observe.status import RunStatus, notices_of, reading_of
from trainkit.run.end import read_end
from trainkit.run.events import Event, StepRecord, later_metrics
from trainkit.run.files import INLINE, LEFT_OUT, numbers, parse_time, read_record, seconds_between, to_json
from trainkit.run.history import CURVES, RunHistory, seconds_left, timestamp
from trainkit.run.rundir import RunDir
from trainkit.scheduler import JobInfo
from trainkit.shipped import ask_each, ask_one, owner_of, shown_by

MAX_NOTICES = 50
TAIL_LINES = 20
ALLOCATED = ("starting", "running", "paused", "stopping", "unknown")
"""States of a run whose job has an allocation."""
WORST = 5
"""The highest severity of a node's problems."""


@dataclass(frozen=True)
class NodeRow:
    """The newest sample of resource usage on one node. Unknown values are None."""

    host: str
    age_s: float | None = None
    """Seconds since the sample was taken."""
    cpu_percent: float | None = None
    mem_used_gib: float | None = None
    mem_total_gib: float | None = None
    job_mem_gib: float | None = None
    num_gpus: int = 0
    gpu_percent: float | None = None
    """Mean utilisation of the node's GPUs, in percent."""
    gpu_mem_used_gib: float | None = None
    """Used memory of the GPU with the highest memory usage, in GiB."""
    gpu_mem_total_gib: float | None = None
    temperature_c: float | None = None
    """Temperature of the hottest GPU, in degrees Celsius."""
    power_w: float | None = None
    """Total power draw of the node's GPUs, in watts."""
    net_mib_s: float | None = None
    """Network traffic, received plus sent, in MiB/s."""
    disk_mib_s: float | None = None
    """Disk traffic, read plus written, in MiB/s."""
    severity: int = 0
    problems: list[str] = field(default_factory=list)
    slowest_rank: int | None = None
    """The slowest rank on this node among the ranks reported as slow; None if no rank is reported as slow."""


@dataclass(frozen=True)
class SlowestRank:
    """The rank that delays the other ranks most, even if the delay is small."""

    rank: int
    host: str
    own_s: float
    """Seconds per step that this rank computes before the first collective."""
    usual_s: float
    """Seconds per step that other ranks compute before the first collective."""


@dataclass(frozen=True)
class RunView:
    """Everything shown on the screen of one run. Values that are unknown or do not exist are None."""

    status: RunStatus = field(metadata=INLINE)
    sentence: str
    """A sentence that describes the state of the run and the reason for this state."""
    failure: str | None
    """The rank that failed first, with its host and error."""
    world_size: int | None
    elapsed_s: float | None
    """Seconds from the start of the newest attempt to its end or, while it is running, to now."""
    eta_s: float | None
    """Estimated seconds until the last step, based on the speed in the newest records."""
    limit_s: float | None
    """Seconds until the job's time limit; None for a local run, or if Slurm does not respond."""
    grad_norm: float | None
    lr: float | None
    mfu: float | None
    median_tokens_per_s: float | None
    """Median tokens per second over evenly spaced records of the whole run."""
    step_p50_s: float | None
    """Median step time over the newest records; `step_p95_s` and `data_wait_share` are based on the same
    records."""
    step_p95_s: float | None
    data_wait_share: float | None
    slowest_rank: SlowestRank | None
    mem_gib_peak: float | None
    """Highest peak memory of any rank in GiB: GPU memory or, without GPUs, memory of the rank's process."""
    mem_gib_total: float | None
    """Total memory of a single GPU, in GiB."""
    checkpoint_step: int | None
    checkpoint_age_s: float | None
    """Seconds since the newest checkpoint was completed."""
    steps_at_risk: int | None
    hours_at_risk: float | None
    """Hours since the newest checkpoint was saved, multiplied by the number of ranks."""
    nodes: list[NodeRow]
    """The nodes, sorted by severity of their problems, most severe first."""
    notices: list[Notice]
    """Current warnings followed by past warnings, both sorted from newest to oldest."""
    hint: str | None
    log: str | None
    """The log file of the failed rank, or of rank 0 if no rank has failed."""
    log_tail: list[str]
    """The last lines of the `log` file."""
    curves: dict[str, list[tuple[int, float]]] = field(repr=False, metadata=LEFT_OUT)

    @property
    def progress(self) -> float | None:
        """Return the fraction of steps that have been computed."""
        step, total = self.status.progress.step, self.status.progress.total_steps
        return None if step is None or not total else min(1.0, step / total)

    @property
    def num_hosts(self) -> int | None:
        """Return the number of hosts used by the run. For a local run, all nodes are on a single host."""
        is_local = (self.status.job_id or "").startswith("local-")
        return 1 if is_local else self.status.place.num_nodes

    @property
    def has_gpus(self) -> bool:
        return self.status.place.device == "cuda"

    def to_dict(self) -> dict[str, object]:
        """Return a JSON object with the fields of `status --json` and of this view, excluding the curves."""
        return {**self.status.to_dict(), **to_json(self)}


ViewJson = RunView | GroupJson | list[RunStatus | GroupJson]
"""The output of `trainkit watch --json` for a run, for a group, or without RUN."""


def read_view(
    history: RunHistory, status: RunStatus, now: datetime, job: JobInfo | None = None, cwd: Path | None = None
) -> RunView:
    """Return the view of a run; the caller must have updated `history`.

    In hints with commands, the path of the run folder is relative to `cwd` if the folder is below `cwd`.
    """
    run, metrics = history.run, history.metrics
    reading = reading_of(history, status)
    plan = reading.plan
    own = [record for record in metrics.recent if record.attempt == status.attempt]
    last = metrics.recent[-1] if metrics.recent else StepRecord({})
    end = None if status.attempt is None else read_end(run.attempt(status.attempt))
    ended = parse_time(end and end.time)
    until = now if ended is None else ended
    nodes = node_rows(reading, now)
    world_size = plan.count("world_size")
    saved = history.events.saved
    steps, hours_at_risk = _at_risk(history, status, until, world_size)
    steps_s = sorted(map(float, numbers(own, "step_s")))
    gpu_total = [node.gpu_mem_total_gib for node in nodes if node.gpu_mem_total_gib is not None]
    started = history.events.attempt(status.attempt).started
    rank = None if status.verdict is None else status.verdict.rank
    log = None if status.attempt is None else log_of(run.attempt(status.attempt), plan, rank or 0)
    failure = None if status.failure is None else status.failure.line
    is_allocated = status.state in ALLOCATED
    limit = job.end_time if job is not None and job.state.is_active else None
    return RunView(
        status=status,
        sentence=sentence(status),
        failure=failure,
        world_size=world_size,
        elapsed_s=round(until.timestamp() - started, 3) if started and (ended or is_allocated) else None,
        eta_s=seconds_left(own, status.progress.total_steps) if is_allocated and status.is_active else None,
        limit_s=None if limit is None or not is_allocated else (limit - now).total_seconds(),
        grad_norm=last.number("grad_norm"),
        lr=last.number("lr"),
        mfu=last.number("mfu"),
        median_tokens_per_s=metrics.median("tokens_per_s"),
        step_p50_s=steps_s[len(steps_s) // 2] if steps_s else None,
        step_p95_s=steps_s[95 * len(steps_s) // 100] if steps_s else None,
        data_wait_share=_data_wait_share(own),
        slowest_rank=_slowest_rank(own[-1]) if own and is_allocated else None,
        mem_gib_peak=last.number("mem_gib_peak"),
        mem_gib_total=max(gpu_total, default=None),
        checkpoint_step=None if saved is None else saved.step,
        checkpoint_age_s=seconds_between(None if saved is None else saved.time, now),
        steps_at_risk=steps,
        hours_at_risk=hours_at_risk,
        nodes=nodes,
        notices=[notice for notice in _notices(reading, status) if notice.text != failure],
        hint=_hint(status, cwd),
        log=None if log is None else str(log),
        log_tail=[] if log is None else last_texts(log, TAIL_LINES),
        curves=_curves(history),
    )


def _curves(history: RunHistory) -> dict[str, list[tuple[int, float]]]:
    """Return the curves of all metrics.

    Validation losses are added, because the built-in trainer logs them as events. Metrics that were measured
    after their steps are in other files.
    """
    curves = history.metrics.curves()
    if val_losses := sorted(history.events.val_losses.items()):
        curves["val_loss"] = [(step, float(value)) for step, value in val_losses]
    curves |= {name: list(values.items()) for name, values in later_metrics(history.run).items()}
    first = (*CURVES, "val_loss")
    return {name: curves[name] for name in dict.fromkeys((*first, *curves)) if name in curves}


def sentence(status: RunStatus) -> str:
    """Return a sentence that describes the state of the run and the reason for this state."""
    reason, progress = f": {status.reason}" if status.reason else "", status.progress
    if status.state == "unknown" and progress.metrics_age_s is not None:
        reason += f"; the newest metrics are {duration(progress.metrics_age_s)} old"
    if status.state == "running":
        step, total = progress.step, progress.total_steps
        if status.is_command and step is None:
            return "Running; the steps are unknown: set `logging.pattern` to find them in the output."
        reason = "" if step is None else f" step {step + 1:,}"
        if total is not None and step is not None and step >= total:
            reason = ", all steps are done"
        if progress.diverged_since is not None:
            reason += f", diverged since step {progress.diverged_since:,}"
        return f"Running{reason}."
    texts = {
        "pending": "Waiting in the queue",
        "starting": "Starting: no step is done yet",
        "paused": "Paused by Ctrl-Z: `fg` in the terminal of the run continues it",
        "stopping": "Saving before the run stops",
        "restarting": "Restarting in the same allocation",
        "requeueing": "Waiting for its next attempt",
        "died": "Died without recording how it ended",
        "unknown": "It is unknown whether the run is alive",
        "incomplete": "No start is recorded in job.json",
    }
    text = texts.get(status.state, status.state.capitalize())
    return f"{text}{reason}."


def _slowest_rank(record: StepRecord) -> SlowestRank | None:
    rank, host = record.count("slowest_rank"), record.text("slowest_host")
    own_s, usual_s = record.number("slowest_rank_s"), record.number("other_ranks_s")
    if rank is None or own_s is None or usual_s is None:
        return None
    return SlowestRank(rank, str(host), own_s, usual_s)


def _data_wait_share(records: Sequence[StepRecord]) -> float | None:
    timed = [record for record in records if record.number("step_s") is not None]
    total_s = sum(map(float, numbers(timed, "step_s")))
    waited_s = sum(map(float, numbers(timed, "data_wait_s")))
    return waited_s / total_s if total_s > 0 else None


def _at_risk(
    history: RunHistory, status: RunStatus, until: datetime, world_size: int | None
) -> tuple[int | None, float | None]:
    """Return the steps, and the hours summed over all ranks, that are lost without another checkpoint."""
    if status.is_command or status.progress.step is None or world_size is None:
        return None, None
    events = history.events
    steps = max(0, status.progress.step - ((events.saved and events.saved.step) or 0))
    if steps == 0:
        return 0, 0.0
    times = (events.attempt(status.attempt).training, timestamp(events.save_began))
    known = [time for time in times if time is not None]
    if not known or status.state not in ("running", "paused", "stopping", "failed", "died", "cancelled"):
        return steps, None
    return steps, max(0.0, until.timestamp() - max(known)) * world_size / 3600


def _failed(name: str, text: str) -> str:
    return f"{name} is {text}"


def node_rows(reading: Reading, now: datetime) -> list[NodeRow]:
    """Return a row per node in the newest attempt, sorted by severity of the nodes' problems."""
    views: dict[str, list[HostView]] = {}
    found = ask_each(reading.plan.parts, lambda one: one.hosts(reading, now), _failed_host)
    for host, view in (item for own in found.values() for item in own.items()):
        views.setdefault(host, []).append(view)
    return sorted((_node_row(host, own) for host, own in views.items()), key=_badness)


def _failed_host(name: str, text: str) -> dict[str, HostView]:
    return {name: HostView(problems=[(WORST, text)])}


def _badness(row: NodeRow) -> tuple[float, float, str]:
    busy = row.gpu_percent if row.gpu_percent is not None else 100.0 - (row.cpu_percent or 0.0)
    return -row.severity, busy if row.num_gpus else 0.0, row.host


def _node_row(host: str, views: Sequence[HostView]) -> NodeRow:
    problems = sorted((item for view in views for item in view.problems), key=lambda item: -item[0])
    values = {name: value for view in views for name, value in view.values.items()}
    worst = {"severity": problems[0][0] if problems else 0, "problems": [text for _, text in problems]}
    return read_record(NodeRow, {**values, **worst, "host": host})


def _notices(reading: Reading, status: RunStatus) -> list[Notice]:
    dated = [notice for notice in notices_of(reading) if notice.time is not None]
    texts, known = {notice.text for notice in dated}, shown_by(reading.plan.parts)
    current = [*(Notice(None, text) for text in status.warnings if text not in texts), *dated]
    past = (event for event in reversed(reading.history.events.notable) if event not in reading.lasting)
    current += [Notice(event.time, event_text(event, known), event.host, event.rank) for event in past]
    return current[:MAX_NOTICES]


def event_text(event: Event, known: Collection[str] = ()) -> str:
    """Describe a past event in a sentence for the list of warnings.

    `known` contains the names of capabilities that describe their own events.
    """
    name, reason = event.name, event.reason
    if name == "rank_failed":
        return event.failure.line
    if (owner := owner_of(name)) is not None:
        return event.content if owner not in known else ask_one(owner, lambda one: one.past(event), _failed)
    if name == "hang":
        return f"hang: {event.text('message') or 'no rank made progress'}"
    if name == "signal":
        return f"received {event.text('signal')}"
    if name == "checkpoint_rejected":
        return f"rejected {str(event.text('set_aside')).removesuffix('.rejected')}: {reason}"
    if name == "checkpoint_failed":
        return f"checkpoint of step {event.step} failed: {event.text('error')}"
    return f"attempt {event.attempt} {event.text('state')}: {reason}"


def _hint(status: RunStatus, cwd: Path | None) -> str | None:
    run = quote(status.run_dir if cwd is None else relative_path(status.run_dir, cwd))
    if status.state in ("failed", "died"):
        return f"`trainkit diagnose {run}` names the cause, `trainkit report {run}` shows where the time went"
    if status.state == "finished":
        return f"`trainkit report {run}` shows where the time went"
    if status.state in ("stopped", "cancelled"):
        is_by_hand = RunDir(status.run_dir).was_started_by_hand
        again = join(status.command) if is_by_hand and status.command else f"trainkit resume {run}"
        return f"`{again}` continues it"
    if status.state == "incomplete":
        return f"`trainkit resume {run}` starts the run again"
    return None
