"""The status of a group of runs: reads small files and the ends of large ones, since groups can be large."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from operator import attrgetter
from shlex import quote
from typing import Any

from trainkit.formats import cell, masked_value, short_keys, shown
from trainkit.observe.notebook import MAX_KEYS, MAX_ROWS, Column, paragraph, table
from trainkit.observe.ranking import (
    BEST_METRIC,
    BEST_MODE,
    LOSS,
    NUM_READERS,
    Ranking,
    UnknownMetricError,
    candidates,
    config_ranking,
    measure,
    measure_ended,
)
from trainkit.observe.status import ACTIVE_STATES, STATE_EVENTS, attempt_state
from trainkit.run.end import AttemptEnd, Best, read_newest_end
from trainkit.run.events import (
    BEGINNINGS,
    best_of,
    diverged_in,
    diverged_since,
    first_steps,
    newest_step,
    read_events,
    with_divergence,
)
from trainkit.run.files import LEFT_OUT, OPTIONAL, Record, read_object, seconds_between, to_json
from trainkit.run.group import WAITS_FOR_ROOM, RunGroup, Trial
from trainkit.run.history import Attempt, PlanRecord, attempts_of
from trainkit.run.record import AttemptRecord, attempt_of, is_alive
from trainkit.run.trial import as_numbers
from trainkit.scheduler import JobInfo, JobState, on_cluster

TRIALS_PER_TASK = 100
NOT_CREATED = AttemptRecord()
IN_END = ("val_loss", "loss")
"""The metrics of which end.json has the best result, or the last one."""
FAILED = ("failed", "died", "unknown")
"""States that need attention, worst first."""
ORDER = (
    *FAILED,
    "stopping",
    "paused",
    "running",
    "starting",
    "restarting",
    "requeueing",
    "pending",
    "stopped",
    "cancelled",
    "finished",
)
"""All states, most urgent first."""


def count_states(states: Iterable[str]) -> dict[str, int]:
    """How many are in each state, most urgent first."""
    counts = Counter(states)
    return {state: counts[state] for state in dict.fromkeys((*ORDER, *counts)) if counts[state]}


def state_counts(states: Mapping[str, int]) -> str:
    """``3 running, 97 pending``."""
    return ", ".join(f"{count:,} {state}" for state, count in states.items())


@dataclass(frozen=True)
class TrialFiles:
    """The content of a trial's files."""

    trial: Trial
    job_id: str | None
    """The job of its newest attempt; None when unknown."""
    entry: AttemptRecord = NOT_CREATED
    """Its newest attempt in job.json; of number 0 while the trial has no folder."""
    end: AttemptEnd | None = None
    seen: Attempt | None = None
    """What the `STATE_EVENTS` of that attempt say, unless it is over."""
    results: Mapping[str, Best | None] = field(default_factory=dict)
    """What it has of the metrics that may rank the group, by their names; None if it has diverged."""
    diverged_since: int | None = None
    step: int | None = None
    """The newest step of one that is not over."""
    has_metrics: bool = False

    @property
    def is_over(self) -> bool:
        """Whether its newest attempt has ended and will not restart."""
        return self.end is not None and not self.end.resumes


@dataclass(frozen=True)
class TrialStatus:
    """One trial at one moment."""

    index: int
    values: dict[str, object]
    """The values of its trial, where a text that is a number is one."""
    state: str
    """As in `trainkit.observe.status.RunStatus.state`."""
    reason: str | None
    job_id: str | None
    best: Best | None
    """The result so far, of the metric that ranks the group; None too if it has diverged."""
    run_dir: str
    diverged_since: int | None = None
    """The step from which on its loss, or what ranks the group, is NaN or infinite, if it still is."""
    cluster: str | None = field(default=None, metadata=OPTIONAL)
    """The cluster of its job, if that is another one than here."""
    written: dict[str, object] = field(default_factory=dict, metadata=LEFT_OUT)
    """The values as they were written, for people."""
    step: int | None = None
    """The newest step; of one that has ended, that at which it did."""
    age_s: float | None = None
    """Seconds since its newest attempt was submitted."""

    @property
    def score(self) -> float | None:
        """The value of its result."""
        return None if self.best is None else self.best.value

    @property
    def problem(self) -> str:
        """The reason as one line; empty for a run of which it is of no interest."""
        if self.state in ("running", "finished") and self.diverged_since is None:
            return ""
        return " ".join((self.reason or "").split())

    def texts(self, keys: Sequence[str]) -> list[str]:
        """Its values of some keys."""
        return [masked_value(self.written[key], key) if key in self.written else "-" for key in keys]

    def __str__(self) -> str:
        own = {key: masked_value(value, key) for key, value in self.written.items()}
        return f"trial {self.index}" + (f" ({shown(own)})" if own else "")


@dataclass(frozen=True)
class GroupStatus:
    """A group at one moment."""

    name: str
    run_dir: str
    job_id: str | None
    array: str
    keys: list[str]
    """The config keys in which its trials differ."""
    num_nodes: int | None
    workers_per_node: int | None
    age_s: float | None
    """Seconds since it was submitted."""
    trials: list[TrialStatus]
    ranking: Ranking = field(default=LOSS, metadata=LEFT_OUT)
    """What decides which of them is the best."""

    @property
    def states(self) -> dict[str, int]:
        """The number of trials in each state, most urgent first."""
        return count_states(trial.state for trial in self.trials)

    @property
    def is_active(self) -> bool:
        """Whether any of its runs may still make progress."""
        return any(state in ACTIVE_STATES for state in self.states)

    @property
    def best(self) -> TrialStatus | None:
        """The trial with the best result; None without any."""
        found = [trial for trial in self.trials if trial.best is not None]
        return min(found, key=lambda trial: self.ranking.order(trial.score), default=None)

    @property
    def shown_trials(self) -> list[TrialStatus]:
        """The trials of a table in a notebook, in their order."""
        return sorted(most_relevant(self, MAX_ROWS), key=attrgetter("index"))

    def columns(self) -> list[Column]:
        """What a notebook shows of its `shown_trials`."""
        trials, keys = self.shown_trials, self.keys[:MAX_KEYS]
        texts = [trial.texts(keys) for trial in trials]
        return [
            ("run", [trial.index for trial in trials]),
            *((key, [own[at] for own in texts]) for at, key in enumerate(keys)),
            ("state", [trial.state for trial in trials]),
            (self.ranking.label, [None if one.score is None else f"{one.score:.4g}" for one in trials]),
            ("reason", [trial.problem or None for trial in trials]),
        ]

    def summary(self) -> str:
        """Its name and states in a line, and how much of it `columns` leaves out."""
        parts = [f"{self.name}: {state_counts(self.states) or 'no runs'}"]
        for whole, limit, word in ((self.trials, MAX_ROWS, "runs"), (self.keys, MAX_KEYS, "keys")):
            if len(whole) > limit:
                parts.append(f"{limit} of {len(whole):,} {word} are shown")
        return "; ".join(parts)

    def __repr__(self) -> str:
        return f"<{self.summary()}>"

    def _repr_html_(self) -> str:
        return paragraph(self.summary()) + table(self.columns())

    def to_dict(self) -> dict[str, object]:
        own = to_json(self)
        trials = own.pop("trials")
        ranking, best = to_json(self.ranking), to_json(self.best)
        return {
            **own,
            "num_points": len(trials),
            "states": self.states,
            **ranking,
            "best": best,
            "points": trials,
        }


class GroupFiles:
    """The files of a group's trials, read once; `status` adds what Slurm knows."""

    def __init__(self, group: RunGroup, metric: str | None = None) -> None:
        """`metric` is what ranks the trials, if that is asked for; UsageError if no trial has logged it."""
        self.group = group
        rankings = candidates(metric, _configured(group))
        read = [ranking for ranking in rankings if metric is not None or ranking.metric not in IN_END]
        self.trials = _read_trials(group, read)
        found = [item for files in self.trials for item in files.results.items()]
        known = {name for name, result in found if result is not None or metric is not None}
        self.ranking = next((ranking for ranking in rankings if ranking.metric in known), LOSS)
        if metric is not None and metric not in known:
            raise UnknownMetricError(metric, [group.run(index) for index in group.created()])
        self._elsewhere: dict[str | None, str | None] = {}
        """By cluster name: thousands of trials are on the same one."""
        self.jobs = {
            files.trial.index: on_cluster(files.job_id, self._cluster(files))
            for files in self.trials
            if files.job_id is not None
        }
        """The job of each trial for Slurm's commands, by its index."""

    @property
    def open_ids(self) -> list[str]:
        """The jobs whose state in Slurm is needed."""
        return [
            self.jobs[files.trial.index]
            for files in self.trials
            if files.job_id is not None and not files.is_over and not self._is_here(files)
        ]

    def _is_here(self, files: TrialFiles) -> bool:
        """Whether the newest attempt of a trial has a supervisor without Slurm, or will have."""
        return files.entry.backend is None if files.entry.attempt else self.group.record.process is not None

    def _cluster(self, files: TrialFiles) -> str | None:
        """The cluster of the job of a trial, if Slurm's commands have to name it here."""
        record = files.entry if files.entry.attempt else self.group.record
        if record.cluster not in self._elsewhere:
            self._elsewhere[record.cluster] = record.elsewhere
        return self._elsewhere[record.cluster]

    @property
    def is_over(self) -> bool:
        """Whether all trials have ended and none will restart."""
        return all(files.is_over for files in self.trials)

    def status(self, jobs: Mapping[str, JobInfo] | None, now: datetime) -> GroupStatus:
        """The group's status; `jobs` is None when Slurm cannot be queried."""
        record, plan = self.group.record, PlanRecord(self.group.record.plan)
        return GroupStatus(
            name=self.group.name,
            run_dir=str(self.group.path),
            job_id=self.group.job_id,
            array=record.array,
            keys=record.keys,
            num_nodes=plan.count("num_nodes"),
            workers_per_node=plan.count("workers_per_node"),
            age_s=seconds_between(record.submitted_at, now),
            trials=[
                TrialStatus(
                    files.trial.index,
                    as_numbers(files.trial.values),
                    *self._state(files, jobs),
                    job_id=files.job_id,
                    best=files.results.get(self.ranking.metric),
                    diverged_since=files.diverged_since,
                    run_dir=self.group.folder(files.trial.index),
                    cluster=self._cluster(files),
                    step=files.end.step if files.end is not None and files.is_over else files.step,
                    age_s=seconds_between(files.entry.submitted_at, now),
                    written=files.trial.values,
                )
                for files in self.trials
            ],
            ranking=self.ranking,
        )

    def _state(self, files: TrialFiles, jobs: Mapping[str, JobInfo] | None) -> tuple[str, str | None]:
        state, reason = self._state_of_job(files, jobs)
        return state, with_divergence(reason, files.diverged_since)

    def _state_of_job(self, files: TrialFiles, jobs: Mapping[str, JobInfo] | None) -> tuple[str, str | None]:
        if files.end is not None and files.is_over:
            return files.end.state or "unknown", files.end.reason
        if self._is_here(files):
            return self._state_here(files)
        if files.job_id is None and self.group.part_of(files.trial.index) is None and self.group.job_id:
            return ("cancelled", None) if self.group.record.cancelled_at else ("pending", WAITS_FOR_ROOM)
        if files.job_id is None:
            return "unknown", "unknown whether it was submitted"
        name = self.jobs[files.trial.index]
        job = None if jobs is None else jobs.get(name)
        # Without one, its cluster does not answer.
        alive = None if job is None else job.state is not JobState.UNKNOWN and not job.state.is_terminal
        if not files.entry.attempt:
            # Its task has not created the folder yet.
            if alive is False and self.group.record.cancelled_at is not None:
                return "cancelled", "cancelled before it started"
            return attempt_state(AttemptRecord(attempt=1), None, alive, job, Attempt(1), False)
        return attempt_state(files.entry, files.end, alive, job, files.seen or Attempt(0), files.has_metrics)

    def _state_here(self, files: TrialFiles) -> tuple[str, str | None]:
        record, run = self.group.record, self.group.run(files.trial.index)
        if files.entry.attempt:
            alive, seen = is_alive(run, files.entry), files.seen or Attempt(0)
            return attempt_state(files.entry, files.end, alive, None, seen, files.has_metrics)
        alive = self._process_alive
        if alive is False and record.cancelled_at is not None:
            return "cancelled", "cancelled before it started"
        if alive is False:
            again = f"`trainkit resume {quote(str(self.group.path))}` runs what is left"
            return "died", f"the process that starts the runs has ended; {again}"
        return ("unknown", None) if alive is None else ("pending", "waits for the runs before it")

    @cached_property
    def _process_alive(self) -> bool | None:
        process = self.group.record.process
        return None if process is None else process.alive()


def _configured(group: RunGroup) -> Ranking | None:
    """The ranking that the configs of all trials ask for."""
    own = Record(group.record.config).record("checkpoint")
    common = {BEST_METRIC: own.text("best_metric"), BEST_MODE: own.text("best_mode")}
    others = (trial.config for trial in group.trials.values() if not trial.config.keys().isdisjoint(common))
    return config_ranking([common, *({**common, **config} for config in others)])


def _read_trials(group: RunGroup, rankings: Sequence[Ranking]) -> list[TrialFiles]:
    """Read the files of all trials; `rankings` are those whose results their metrics.jsonl has to give."""
    trials = group.trials
    created = group.created()
    found = {index: TrialFiles(trial, group.task_id(index)) for index, trial in trials.items()}
    shares = [created[first : first + TRIALS_PER_TASK] for first in range(0, len(created), TRIALS_PER_TASK)]
    from concurrent.futures import ThreadPoolExecutor  # slow to load, and most runs are in no group

    with ThreadPoolExecutor(NUM_READERS) as readers:
        for share in readers.map(lambda share: [_read(group, index, rankings) for index in share], shares):
            found |= {files.trial.index: files for files in share}
    return list(found.values())


def _read(group: RunGroup, index: int, rankings: Sequence[Ranking]) -> TrialFiles:
    # By text and with no more than the newest attempt: there may be ten thousand trials.
    folder = group.folder(index)
    attempts = read_object(f"{folder}/job.json").get("attempts")
    entry = attempt_of(attempts[-1]) if isinstance(attempts, list) and attempts else None
    entry, end = entry or NOT_CREATED, read_newest_end(folder)
    job_id = entry.job_id or group.task_id(index)
    best = None if end is None or end.resumes else end.best
    # One file that cannot be read must not hide the other trials.
    since = None
    if best is not None:  # its validations had not diverged when it ended, or there would be none
        with suppress(OSError):
            since = diverged_in(f"{folder}/metrics.jsonl", "loss")
    results = {} if best is None else {best.metric: None if since is not None else best}
    files = TrialFiles(group.trials[index], job_id, entry, end, results=results, diverged_since=since)
    if not entry.attempt or (best is not None and not rankings):
        return files
    run = group.run(index)
    with suppress(OSError):
        events = [] if files.is_over else list(read_events(run, *STATE_EVENTS, *BEGINNINGS, "evaluated"))
        if best is None:
            since = diverged_since(run)
        if since is None and not files.is_over and (best := best_of(run, events)) is not None:
            results = {best.metric: best}
        for ranking in rankings:
            own = (measure_ended if files.is_over else measure)(run, ranking)
            since = own.diverged_since
            if own.is_logged:
                results[ranking.metric] = own.result
        files = replace(files, results=results, diverged_since=since)
        if not files.is_over:
            # Rank 0 of a COMMAND need not write metrics.
            is_command = PlanRecord(group.record.plan).is_command
            is_printing = is_command and run.attempt(entry.attempt).rank_log(0).exists()
            has_metrics = run.metrics_file.exists() or is_printing
            seen = attempts_of(events).get(entry.attempt)
            files = replace(
                files, seen=seen, step=newest_step(run, first_steps(run, events)), has_metrics=has_metrics
            )
    return files


def most_relevant(status: GroupStatus, count: int) -> list[TrialStatus]:
    """The `count` most relevant trials: by state, failures first, then by result."""

    def key(trial: TrialStatus) -> tuple[int, tuple[bool, float], int]:
        state = ORDER.index(trial.state) if trial.state in ORDER else 0
        return state, status.ranking.order(trial.score), trial.index

    return sorted(status.trials, key=key)[:count]


FIGURES = ("trial", "state", "step", "age")
"""What a table of trials can be sorted by, next to the keys and the metric that ranks them."""


def column_of(name: str, keys: Sequence[str], figures: Iterable[str] = FIGURES) -> str | None:
    """The column of a table that is called so: one of its keys, in full or short, or of its figures."""
    columns = {**dict(zip(short_keys(keys), keys, strict=True)), **{one: one for one in (*keys, *figures)}}
    return columns.get(name) or {short.lower(): column for short, column in columns.items()}.get(name.lower())


def sorted_trials(status: GroupStatus, column: str | None) -> list[TrialStatus]:
    """The trials by one of their columns, the smallest first; for None by their results, the best first.

    A key is the column of its name, also where a figure is called so.
    """
    if column is None:
        return sorted(status.trials, key=lambda trial: status.ranking.order(trial.score))

    def value(trial: TrialStatus) -> object:
        state = ORDER.index(trial.state) if trial.state in ORDER else 0
        figures = zip(FIGURES, (trial.index, state, trial.step, trial.age_s), strict=True)
        return {**dict(figures), **trial.values}.get(column)

    return sorted(status.trials, key=lambda trial: value_order(value(trial)))


def value_order(value: Any) -> tuple[bool, bool, float, str]:
    """The key by which values are sorted: numbers, then texts, then what has no value."""
    is_number = isinstance(value, (int, float)) and not math.isnan(value)
    return value is None, not is_number, value if is_number else 0.0, cell(value)
