"""Determines a run's status from its files, its job record and Slurm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.backends.slurm.failed_starts import FailedStart, batch_log, failed_starts
from trainkit.capability import Notice, Reading
from trainkit.errors import EXIT_STOPPED, TrainkitError
from trainkit.formats import cell, mask_secrets, time_text, worker_time
from trainkit.observe.logs import clean, last_lines, printed_metrics
from trainkit.observe.notebook import details
from trainkit.run.end import (
    SIGNALLED,
    UNFINISHED_STATES,
    AttemptEnd,
    RankFailure,
    first_of,
    rank_failures,
    read_end,
    signal_name,
)
from trainkit.run.events import FAILED_SAVES, Event, StepRecord, diverged_since, with_divergence
from trainkit.run.files import INLINE, LEFT_OUT, OPTIONAL, open_file, parse_time, seconds_between, to_json
from trainkit.run.history import (
    Attempt,
    PlanRecord,
    Restart,
    RunHistory,
    ended_attempts,
    find_restarts,
    read_plan,
    worker_hours,
)
from trainkit.run.manifest import newest_checkpoint
from trainkit.run.record import AttemptRecord, JobRecord
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.scheduler import JobInfo, JobState
from trainkit.shipped import ask_each, attended_in, load, placed

if TYPE_CHECKING:
    from trainkit.config import RunConfig

FlatConfig = dict[str, Any]
"""Maps dotted config keys to their JSON values."""
STALE_S = 60.0
"""Age of the newest metrics, in seconds, above which a warning is shown, provided that `STALE_INTERVALS`
typical logging intervals have also passed."""
STALE_INTERVALS = 10
STATE_EVENTS = ("waiting", "started", "signal", "first_step", "paused", "continued")
"""The events that `attempt_state` needs to determine an attempt's state."""
ACTIVE_STATES = (*UNFINISHED_STATES, "unknown")
"""The states of a run that can still make progress."""
BATCH_LOG_LINES = 10
MAX_SIZES = 8
"""Maximum number of attempts whose node counts are shown."""
FAILURE_LOG_LINES = 8
CLOCKS_S = 2.0
"""Seconds by which the clocks of two hosts in a cluster may disagree."""


LAST_KEYS = (
    "diverged_since",
    "batch_log",
    "num_starts",
    "attempt_nodes",
    "partition",
    "gpu_type",
    "worker_hours",
    "slices_s",
    "total_s",
)
"""The keys that ``status --json`` prints last."""


def failure_lines(failure: RankFailure, run: str, *, num_log_lines: int = FAILURE_LOG_LINES) -> list[str]:
    """Return lines about a run's first failure: rank, cause, line of code, end of the log, and next command.

    `run` is the path of the run, quoted for a shell.
    """
    lines, code = [clean(" ".join(failure.line.split()))], failure.code
    if code is not None:
        lines.append(clean(f"  {code.shown}"))
    if failure.hint:
        lines.append(clean(f"hint: {failure.hint}"))
    tail = failure.log_tail[-num_log_lines:] if num_log_lines else []
    if tail:
        whose = "that rank" if failure.rank is None else f"rank {failure.rank}"
        lines += [f"last lines of {whose}:", *(f"  {clean(line)}" for line in tail)]
    return [*lines, f"next: `trainkit diagnose {run}` says what to do"]


@dataclass(frozen=True)
class Place:
    """The cluster, nodes and workers of the newest attempt."""

    cluster: str | None = field(metadata=OPTIONAL)
    """The job's cluster; None for this host's own cluster."""
    host: str | None
    num_nodes: int | None
    workers_per_node: int | None
    device: str | None
    partition: str | None = None
    """The partition that Slurm chose; None if the plan allows only one partition and one GPU type."""
    gpu_type: str | None = None


@dataclass(frozen=True)
class Progress:
    """The progress of a run's training."""

    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    val_loss: float | None = None
    """The newest validation loss."""
    first_val_loss: float | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = field(default=None, metadata=OPTIONAL)
    """Samples per second if the run's loss counts samples; None if the loss counts tokens."""
    metrics_age_s: float | None = None
    """Seconds since the last record in metrics.jsonl."""
    diverged_since: int | None = None
    """The step at which the loss or the validation loss became NaN or infinite and stayed so; None if
    the run has not diverged. The `reason` for the run's state also mentions the divergence."""


@dataclass(frozen=True)
class Used:
    """The total resources used by all attempts of a run."""

    num_starts: int = 0
    """The number of attempts that have started."""
    attempt_nodes: list[int] = field(default_factory=list)
    """The number of nodes of each attempt, oldest first."""
    worker_hours: float | None = None
    """Hours for which ranks were allocated, summed over all ranks; for a run on GPUs, these are GPU-hours."""
    slices_s: float | None = None
    """Seconds of training in slices (see `resources.slice`) since a command last started the run; None
    without slices."""
    total_s: float | None = None
    """Maximum total seconds of all slices; None without slices."""

    def text(self, device: str | None) -> str:
        """Return the used resources as text, or an empty string if there was only one attempt.

        `device` is the plan's device; for ``cuda``, hours are shown as GPU-hours.
        """
        parts, sizes = [], self.attempt_nodes
        if self.num_starts > 1 and self.worker_hours is not None:
            time = worker_time(self.worker_hours, "GPU" if device == "cuda" else "worker")
            parts.append(f"{time} in {self.num_starts} attempts")
        if len(set(sizes)) > 1:
            shown = [*(["…"] if len(sizes) > MAX_SIZES else []), *map(str, sizes[-MAX_SIZES:])]
            parts.append(f"nodes: {', '.join(shown)}")
        if self.slices_s is not None and self.total_s is not None:
            parts.append(f"slices {time_text(int(self.slices_s))} of {time_text(int(self.total_s))}")
        return "; ".join(parts)


@dataclass(frozen=True)
class RunStatus:
    """A snapshot of a run's state. Values that are missing or unknown are None."""

    name: str
    run_dir: str
    state: str
    """One of ``pending starting running paused stopping restarting requeueing finished stopped cancelled
    failed``; ``died`` if the supervisor exited without recording the outcome; ``unknown`` if this host cannot
    determine the state; ``incomplete`` if the run was never started."""
    reason: str | None
    attempt: int | None
    job_id: str | None
    place: Place = field(metadata=INLINE)
    command: list[str] | None
    """The COMMAND that the run executes; None for the built-in trainer."""
    progress: Progress = field(metadata=INLINE)
    age_s: float | None
    """Seconds since the newest attempt was submitted; None if unknown."""
    last_event: Event | None
    verdict: RankFailure | None
    restarts: list[Restart]
    checkpoint: str | None
    """The folder of the newest published checkpoint; None if there is none."""
    warnings: list[str]
    used: Used = field(metadata=INLINE)
    batch_log: list[str] = field(default_factory=list)
    """The last lines of the batch script's log, if the script ended before the supervisor started."""
    lasting: list[Event] = field(default_factory=list, metadata=LEFT_OUT)
    """Capabilities' events that still apply while the newest attempt runs."""
    added: dict[str, object] = field(default_factory=dict, metadata=LEFT_OUT)
    """Keys that capabilities add to ``status --json``."""

    @property
    def is_command(self) -> bool:
        """Return whether the run executes a COMMAND, whose steps and checkpoints may be unknown."""
        return self.command is not None

    @property
    def is_active(self) -> bool:
        """Return whether the run can still make progress."""
        return self.state in ACTIVE_STATES

    @property
    def failure(self) -> RankFailure | None:
        """Return the run's first failure; None if there is none or the run has not ended."""
        return None if self.is_active else self.verdict

    def shown(self) -> dict[str, object]:
        """Return the values that a notebook shows, keyed by label. A missing value is None."""
        step, progress = self.progress.step, self.progress
        of = "" if progress.total_steps is None else f" of {progress.total_steps:,}"
        return {
            "run": self.name,
            "state": self.state,
            "step": None if step is None else f"{step:,}{of}",
            "loss": None if step is None else loss_text(self, cell(progress.loss, ".4g")),
            "val_loss": progress.val_loss and cell(progress.val_loss, ".4g"),
            "failure": None if self.failure is None else self.failure.line,
            "reason": self.reason,
            "folder": self.run_dir,
        }

    def __repr__(self) -> str:
        said = [f"{name} {value}" for name, value in self.shown().items() if value is not None]
        return mask_secrets(f"<{', '.join(said)}>")

    def _repr_html_(self) -> str:
        return details(self.shown())

    def to_dict(self) -> dict[str, object]:
        """Return the values as a JSON object.

        The keys of `place`, `progress` and `used` are at the top level of the object.
        """
        own = dict[str, object]()
        for part in fields(self):
            if part.metadata == LEFT_OUT:
                continue
            value = to_json(getattr(self, part.name))
            own |= value if part.metadata == INLINE else {part.name: value}
        return placed("status", own | {key: own.pop(key) for key in LAST_KEYS}, to_json(self.added))


def read_status(
    history: RunHistory, job: JobRecord, alive: bool | None, now: datetime, slurm_job: JobInfo | None = None
) -> RunStatus:
    """Return a run's status from its job record, after adding new events to its history.

    `alive` is True if the newest job is alive, False if not, and None if unknown. `slurm_job` is Slurm's
    information about the newest job; None for a local run.
    """
    run, events = history.run, history.events
    metrics = list[StepRecord]()
    with suppress(OSError):  # `_unreadable` warns about unreadable files.
        events.update()
        metrics = history.newest_steps()
    entry = job.newest or AttemptRecord()
    attempt = entry.attempt or None
    plan = read_plan(run)
    end = None if attempt is None else read_end(run.attempt(attempt))
    last = metrics[-1] if metrics else StepRecord({})
    step, loss, has_log = last.count("step"), last.number("loss"), False
    if plan.is_command and attempt is not None and not metrics:
        printed = run.attempt(attempt).rank_log(0)
        has_log = printed.exists()
        # Earlier trainkit versions did not store the pattern in the plan, and their agents recorded no
        # metrics from the log.
        if has_log and "log_pattern" not in plan.values:
            config = read_config(run.config_file)
            with suppress(OSError):  # `_unreadable` warns about unreadable files.
                step, loss = printed_metrics(printed, None if config is None else config.logging.pattern)
    own_metrics = [record for record in metrics if record.attempt == attempt]
    starts = [one for one in failed_starts(run, job, slurm_job) if one.job_id == entry.job_id]
    seen, has_metrics = events.attempt(attempt), bool(own_metrics) or has_log
    state, reason = attempt_state(entry, end, alive, slurm_job, seen, has_metrics, starts)
    attended = attended_in(plan.parts)
    if attended is None and reason is None and state == "running":
        attended = run.attempt(entry.attempt).waits_in
    if attended is not None:
        reason = "; ".join(filter(None, (reason, load(attended).waits(plan))))
    since = None
    with suppress(OSError):  # `_unreadable` warns about unreadable files.
        if (metrics and loss is None) or events.has_lost_val_loss:
            since = diverged_since(run, attempt)
    # Ignore a failed start if the job has since started on another node.
    dead = starts[-1] if starts and state not in ("starting", "running") else None
    file = None if dead is None else batch_log(run, job, dead.job_id)
    log = [] if file is None else last_lines(file)[0]
    is_known = attempt is not None and state in ("starting", "running", "paused", "stopping")
    lasting = events.owned.lasting(attempt) if is_known else []
    reading = Reading(history, plan, attempt, state, lasting)
    added = ask_each(plan.parts, lambda one: one.status(reading), _failed)
    metrics_age_s = seconds_between(last.text("time"), now)
    attempts = ended_attempts(events.attempts, now.timestamp() if state in ACTIVE_STATES else None)
    total_s = plan.record("requeue").number("total_s")
    own = attempts[-1 - job.num_auto_restarts :]
    return RunStatus(
        name=job.name,
        run_dir=str(run.path),
        state=state,
        reason=with_divergence(reason, since),
        attempt=attempt,
        job_id=entry.job_id or None,
        place=Place(
            cluster=entry.other_cluster,
            host=entry.host if dead is None else dead.host,
            num_nodes=plan.count("num_nodes"),
            workers_per_node=plan.count("workers_per_node"),
            device=plan.text("device"),
            partition=seen.partition,
            gpu_type=seen.gpu_type,
        ),
        command=plan.command,
        progress=Progress(
            step=_last_step(step, end),
            total_steps=_total_steps(run, events.total_steps, plan),
            loss=loss,
            val_loss=events.val_loss,
            first_val_loss=events.first_val_loss,
            tokens_per_s=last.number("tokens_per_s"),
            samples_per_s=last.samples_per_s,
            metrics_age_s=metrics_age_s,
            diverged_since=since,
        ),
        age_s=seconds_between(entry.submitted_at, now),
        last_event=events.recent[-1] if events.recent else None,
        verdict=_verdict(run.attempt(attempt), job, end, state) if attempt else None,
        restarts=find_restarts(events.attempts),
        checkpoint=newest_checkpoint(run.checkpoints_dir),
        warnings=[
            *_unreadable(run, attempt),
            *_warnings(run, state, own_metrics, metrics_age_s, entry),
            *(start.sentence for start in (starts[:-1] if state == "died" else starts)),
            *(notice.text for notice in notices_of(reading)),
            *(_save_warnings(seen) if is_known else ()),
        ],
        used=Used(
            num_starts=sum(one.started is not None for one in attempts),
            attempt_nodes=[one.num_nodes for one in attempts if one.num_nodes is not None],
            worker_hours=worker_hours(attempts, plan.count("world_size")),
            slices_s=None if total_s is None else sum(one.allocated_s for one in own),
            total_s=total_s,
        ),
        batch_log=log[-BATCH_LOG_LINES:],
        lasting=lasting,
        added={key: value for own in added.values() for key, value in own.items()},
    )


def reading_of(history: RunHistory, status: RunStatus) -> Reading:
    """Return a run's data and status in the form that capabilities read."""
    return Reading(history, read_plan(history.run), status.attempt, status.state, status.lasting)


def _failed(name: str, text: str) -> dict[str, object]:
    return {name: text}


def notices_of(reading: Reading) -> list[Notice]:
    """Return capabilities' warnings about events that still apply while an attempt runs."""
    if not reading.lasting:
        return []
    found = ask_each(reading.plan.parts, lambda one: one.notices(reading), _failed_notice)
    return [notice for own in found.values() for notice in own]


def _failed_notice(name: str, text: str) -> list[Notice]:
    return [Notice(None, f"{name} is {text}")]


def capability_rows(reading: Reading) -> dict[str, Mapping[str, str]]:
    """Return the lines that capabilities add to a run's details.

    The result maps each capability to a mapping from label to text.
    """
    return ask_each(reading.plan.parts, lambda one: one.rows(reading), lambda name, text: {name: text})


def loss_text(status: RunStatus, loss: str) -> str:
    """Return `loss` or, if the run has diverged, a text with the step at which the run diverged."""
    return with_divergence(None, status.progress.diverged_since) or loss


def _verdict(attempt: AttemptDir, job: JobRecord, end: AttemptEnd | None, state: str) -> RankFailure | None:
    """Return the failure that caused an attempt to end, or None.

    If the attempt died without recording the cause, return the first failure that its ranks recorded.
    """
    if end is not None or state != "died":
        return None if end is None else end.verdict
    first = first_of(rank_failures(attempt, job))
    return None if first is None else replace(first[1], more={})


def attempt_state(
    entry: AttemptRecord,
    end: AttemptEnd | None,
    alive: bool | None,
    slurm_job: JobInfo | None,
    seen: Attempt,
    has_metrics: bool,
    starts: Sequence[FailedStart] = (),
) -> tuple[str, str | None]:
    """Return an attempt's state and reason, based on its job record, end.json and Slurm job.

    `seen` is the attempt as described by its events; only `STATE_EVENTS` are needed. `starts` contains the
    known failed starts of the attempt's job.
    """
    state = _state(entry.attempt, end, alive, seen, has_metrics)
    reason = seen.waits_for if end is None else end.reason
    if slurm_job is not None and (end is None or end.resumes):
        return _slurm_state(state, end, slurm_job, entry, starts)
    return state, reason


def _state(
    attempt: object, end: AttemptEnd | None, alive: bool | None, seen: Attempt, has_metrics: bool
) -> str:
    if not attempt:
        return "incomplete"
    if end is not None:
        if end.resumes:
            waits = "restarting" if end.action == "restart" else "requeueing"
            return {True: waits, False: "died", None: "unknown"}[alive]
        return end.state or "unknown"
    if alive is None:
        return "unknown"
    if not alive:
        return "died"
    if seen.is_paused:
        return "paused"
    if seen.signals:
        return "stopping"
    if seen.waits_for is not None:
        return "pending"
    return "running" if has_metrics or seen.first_step is not None else "starting"


def _slurm_state(
    state: str, end: AttemptEnd | None, job: JobInfo, entry: AttemptRecord, starts: Sequence[FailedStart]
) -> tuple[str, str | None]:
    """Return the state and reason of an attempt whose job is known to Slurm.

    The attempt either has not ended, or has ended and the run will resume.
    """
    reason = None if end is None else end.reason
    has_started = entry.started_at is not None
    if job.state.is_waiting:
        if has_started and end is None and job.restarts == 0 and job.state is not JobState.REQUEUED:
            return state, reason  # Slurm answered before the job started, and never requeued the job.
        was_requeued = has_started or job.state is JobState.REQUEUED
        return ("requeueing" if was_requeued else "pending"), job.sentence or None
    if job.state.is_terminal and job.state is JobState.CANCELLED:
        return "cancelled", _slurm_end(job)
    hosts = [starts[-1].host] if starts else [] if has_started else job.hosts
    host = next(iter(hosts), None)
    before = f"ended on {host} before the supervisor began"
    if job.state.is_terminal:
        if host is not None and not job.log_not_opened:
            return "died", f"{_slurm_end(job)}; it {before}"
        return "died", _slurm_end(job) + _failed_requeue(end, job, entry)
    if job.state is JobState.UNKNOWN:
        if starts:
            return state, f"{before}: {starts[-1].how}; {job.sentence}"
        return state, job.sentence or reason
    return state, reason


def _failed_requeue(end: AttemptEnd | None, job: JobInfo, entry: AttemptRecord) -> str:
    """Return text to append to the reason if Slurm should have requeued the job but has not restarted it."""
    if end is not None and end.action == "requeue":
        return (
            f"; Slurm did not restart the job after it was requeued because of: {end.summary or end.reason}"
        )
    began = parse_time(entry.started_at)
    if began is None or job.start_time is None or job.start_time - began < timedelta(seconds=CLOCKS_S):
        return ""
    return "; Slurm requeued the job, for example after a node failure, but did not restart it"


def _slurm_end(job: JobInfo) -> str:
    """Return Slurm's description of how a job ended, as text."""
    words = [f"Slurm reports {job.slurm_state}"]
    if job.log_not_opened:
        return f"{words[0]}; Slurm could not open the log of the job and did not start the job"
    killed_by = job.exit_signal or max(0, (job.exit_code or 0) - SIGNALLED)
    if job.state is JobState.FAILED and killed_by:
        # If a signal killed the job, Slurm's reason adds nothing: it is RaisedSignal:9(Killed) or, in Slurm
        # 22.05, JobLaunchFailure.
        return f"{words[0]}; the job was killed by {signal_name(killed_by)}"
    if job.exit_code:
        meaning = " (state saved)" if job.exit_code == EXIT_STOPPED else ""
        words.append(f"exit code {job.exit_code}{meaning}")
    if job.reason and job.reason != "NonZeroExitCode":
        words.append(f"the job {job.explanation}")
    return "; ".join(words)


def _last_step(logged: int | None, end: AttemptEnd | None) -> int | None:
    """Return the last step of a run.

    A run that finished or stopped may not have logged its last step, so end.json is also read.
    """
    if end is None or end.step is None or end.state not in ("finished", "stopped"):
        return logged
    return max(end.step, logged or 0)


def _total_steps(run: RunDir, logged: int | None, plan: PlanRecord) -> int | None:
    """Return the total number of steps that the trainer has `logged`, or else the config's `train.steps`.

    Returns None for a COMMAND, because it ignores the config's `train.steps`.
    """
    if logged is not None:
        return logged
    config = None if plan.is_command else read_config(run.config_file)
    return None if config is None else config.train.steps


def read_config(file: Path) -> RunConfig | None:
    """Return the effective config of a run or attempt, or None if it cannot be read."""
    from trainkit.config import read_effective  # imported here because trainkit.config is slow to import

    try:
        return read_effective(file, executes=False)
    except (OSError, TrainkitError):
        return None


def flat_config(run: RunDir) -> FlatConfig:
    """Return a run's effective config with dotted keys, or an empty dictionary if it cannot be read."""
    from trainkit.config.schema import flatten

    config = read_config(run.config_file)
    return {} if config is None else dict(flatten(config.model_dump(mode="json", by_alias=True)))


def _unreadable(run: RunDir, attempt: int | None) -> Iterator[str]:
    """Yield a warning for each file of a run that exists but cannot be read.

    The rest of the run's status is still shown.
    """
    logs = () if attempt is None else (run.attempt(attempt).rank_log(0),)
    for file in (run.job_file, run.plan_file, run.config_file, run.events_file, run.metrics_file, *logs):
        try:
            open_file(file).close()
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            yield f"{file.name} cannot be read: {error.strerror}"


def _warnings(
    run: RunDir, state: str, own_metrics: list[StepRecord], metrics_age_s: float | None, entry: AttemptRecord
) -> list[str]:
    warnings = []
    if state == "running" and metrics_age_s is not None:
        usual_s = _usual_interval_s(own_metrics)
        if metrics_age_s > max(STALE_S, STALE_INTERVALS * usual_s):
            warnings.append(f"no new metrics for {metrics_age_s:.0f} s (usually every {usual_s:.1f} s)")
    if state == "unknown":
        where = "Slurm does not answer" if entry.host is None else f"it was started on {entry.host}"
        if entry.cluster:
            where = f"its job is on the cluster {entry.cluster}"
        warnings.append(f"unknown whether the run is still running: {where}")
    if state == "died" and entry.has_started:
        what = "program" if run.was_started_by_hand else "supervisor"
        warnings.append(f"the {what} exited without recording how the attempt ended")
    return warnings


def _save_warnings(attempt: Attempt) -> Iterator[str]:
    """Yield a warning if the events of a running attempt show that it fails to save checkpoints."""
    if len(failed := attempt.failed_saves) >= FAILED_SAVES:
        since, error = f"since step {failed[0].step}", failed[-1].text("error")
        yield f"no checkpoint could be saved {since} ({len(failed)} consecutive saves failed): {error}"


def _usual_interval_s(metrics: list[StepRecord]) -> float:
    """Return the median interval between metrics records in seconds; 0 for fewer than two records."""
    times = [time for time in (parse_time(record.time) for record in metrics) if time is not None]
    intervals = sorted((b - a).total_seconds() for a, b in pairwise(times))
    return intervals[len(intervals) // 2] if intervals else 0.0
