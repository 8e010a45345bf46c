"""Determines the status of a group of runs.

A group can have many runs, so only small files and the ends of large files are read.
"""

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
from typing import Any, TypedDict

from trainkit.formats import cell, masked_value, short_keys, shown
from trainkit.observe.notebook import MAX_KEYS, MAX_ROWS, Column, paragraph, table
from trainkit.observe.ranking import (
    BEST_METRIC,
    BEST_MODE,
    LOSS,
    NUM_READERS,
    Mode,
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
"""The metrics whose results end.json records: the best value of ``val_loss``, and the last value of
``loss``."""
FAILED = ("failed", "died", "unknown")
"""The states that need the user's attention, worst first."""
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
"""All states of a run, most urgent first."""


def count_states(states: Iterable[str]) -> dict[str, int]:
    """Return the number of runs in each state, ordered from most to least urgent."""
    counts = Counter(states)
    return {state: counts[state] for state in dict.fromkeys((*ORDER, *counts)) if counts[state]}


def state_counts(states: Mapping[str, int]) -> str:
    """Return state counts as text, such as ``3 running, 97 pending``."""
    return ", ".join(f"{count:,} {state}" for state, count in states.items())


@dataclass(frozen=True)
class TrialFiles:
    """The contents of a trial's files."""

    trial: Trial
    job_id: str | None
    """The job ID of the newest attempt; None if unknown."""
    entry: AttemptRecord = NOT_CREATED
    """The newest attempt's record in job.json. The record's attempt number is 0 if the trial has no folder
    yet."""
    end: AttemptEnd | None = None
    seen: Attempt | None = None
    """The newest attempt, as described by its `STATE_EVENTS`; None if the attempt has ended."""
    results: Mapping[str, Best | None] = field(default_factory=dict)
    """Maps each metric that may rank the group to the trial's result, or to None if the trial has
    diverged."""
    diverged_since: int | None = None
    step: int | None = None
    """The last logged step; None if the trial has ended."""
    has_metrics: bool = False

    @property
    def is_over(self) -> bool:
        """Return whether the newest attempt has ended and the trial will not be restarted."""
        return self.end is not None and not self.end.resumes


@dataclass(frozen=True)
class TrialStatus:
    """A snapshot of a trial's state."""

    index: int
    values: dict[str, object]
    """The trial's swept values, keyed by config key. Strings that represent numbers are converted to
    numbers."""
    state: str
    """The trial's state, one of the values of `trainkit.observe.status.RunStatus.state`."""
    reason: str | None
    job_id: str | None
    best: Best | None
    """The trial's current result for the metric that ranks the group; None without a result or if the trial
    has diverged."""
    run_dir: str
    diverged_since: int | None = None
    """The step at which the loss, or the metric that ranks the group, became NaN or infinite and stayed so;
    None if the trial has not diverged."""
    cluster: str | None = field(default=None, metadata=OPTIONAL)
    """The job's cluster; None for this host's own cluster."""
    written: dict[str, object] = field(default_factory=dict, metadata=LEFT_OUT)
    """The swept values as the user wrote them."""
    step: int | None = None
    """The last logged step, or the last step of a trial that has ended."""
    age_s: float | None = None
    """Seconds since the newest attempt was submitted; None if unknown."""

    @property
    def score(self) -> float | None:
        """Return the trial's result for the metric that ranks the group, or None if there is no result."""
        return None if self.best is None else self.best.value

    @property
    def problem(self) -> str:
        """Return the reason for the trial's state on one line, or an empty string if there is no problem."""
        if self.state in ("running", "finished") and self.diverged_since is None:
            return ""
        return " ".join((self.reason or "").split())

    def texts(self, keys: Sequence[str]) -> list[str]:
        """Return the trial's values for the given keys as text, with ``-`` for missing keys."""
        return [masked_value(self.written[key], key) if key in self.written else "-" for key in keys]

    def __str__(self) -> str:
        own = {key: masked_value(value, key) for key, value in self.written.items()}
        return f"trial {self.index}" + (f" ({shown(own)})" if own else "")


class _GroupJson(TypedDict):
    name: str
    run_dir: str
    job_id: str | None
    array: str
    """The indices of the trials."""
    keys: list[str]
    """The config keys whose values differ between the trials."""
    num_nodes: int | None
    workers_per_node: int | None
    age_s: float | None
    """Seconds since the group was submitted."""
    num_points: int
    """The number of trials."""
    states: dict[str, int]
    """Maps each state to the number of trials in that state, from the most to the least urgent state."""
    metric: str
    """The metric that ranks the trials."""
    mode: Mode
    best: TrialStatus | None
    """The trial with the best result; None if no trial has a result."""


class GroupJson(_GroupJson, total=False):
    """The state of a group of runs."""

    points: list[TrialStatus]
    """The trials; absent in a list of runs and groups."""


@dataclass(frozen=True)
class GroupStatus:
    """A snapshot of a group's state."""

    name: str
    run_dir: str
    job_id: str | None
    array: str
    keys: list[str]
    """The config keys whose values differ between the trials."""
    num_nodes: int | None
    workers_per_node: int | None
    age_s: float | None
    """Seconds since the group was submitted."""
    trials: list[TrialStatus]
    ranking: Ranking = field(default=LOSS, metadata=LEFT_OUT)
    """The metric by which the trials are ranked."""

    @property
    def states(self) -> dict[str, int]:
        """Return the number of trials in each state, ordered from most to least urgent."""
        return count_states(trial.state for trial in self.trials)

    @property
    def is_active(self) -> bool:
        """Return whether any trial can still make progress."""
        return any(state in ACTIVE_STATES for state in self.states)

    @property
    def best(self) -> TrialStatus | None:
        """Return the trial with the best result; None if no trial has a result."""
        found = [trial for trial in self.trials if trial.best is not None]
        return min(found, key=lambda trial: self.ranking.order(trial.score), default=None)

    @property
    def shown_trials(self) -> list[TrialStatus]:
        """Return the trials that a notebook shows, ordered by index."""
        return sorted(most_relevant(self, MAX_ROWS), key=attrgetter("index"))

    def columns(self) -> list[Column]:
        """Return the table columns that a notebook shows for `shown_trials`."""
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
        """Return the group's name and state counts on one line, with a note if rows or keys are omitted."""
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
        """Return the values as a JSON object with the keys of `GroupJson`."""
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
    """Contains the data from the files of all trials in a group; each file is read once.

    The method `status` combines the data with the state of the Slurm jobs.
    """

    def __init__(self, group: RunGroup, metric: str | None = None) -> None:
        """Read a group's files and rank its trials by `metric`, or by the config's metric if it is None.

        Raises UsageError if no trial has logged `metric`.
        """
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
        """Caches the result of `_cluster` by cluster name, because there may be thousands of trials on one
        cluster."""
        self.jobs = {
            files.trial.index: on_cluster(files.job_id, self._cluster(files))
            for files in self.trials
            if files.job_id is not None
        }
        """Maps each trial's index to its job, in the form that Slurm commands accept."""

    @property
    def open_ids(self) -> list[str]:
        """Return the jobs whose state must be queried from Slurm."""
        return [
            self.jobs[files.trial.index]
            for files in self.trials
            if files.job_id is not None and not files.is_over and not self._is_here(files)
        ]

    def _is_here(self, files: TrialFiles) -> bool:
        """Return whether the trial's newest or next attempt runs without Slurm."""
        return files.entry.backend is None if files.entry.attempt else self.group.record.process is not None

    def _cluster(self, files: TrialFiles) -> str | None:
        """Return the cluster's name if Slurm commands on this host need it to find the job, else None."""
        record = files.entry if files.entry.attempt else self.group.record
        if record.cluster not in self._elsewhere:
            self._elsewhere[record.cluster] = record.other_cluster
        return self._elsewhere[record.cluster]

    @property
    def is_over(self) -> bool:
        """Return whether all trials have ended and none of them will be restarted."""
        return all(files.is_over for files in self.trials)

    def status(self, jobs: Mapping[str, JobInfo] | None, now: datetime) -> GroupStatus:
        """Return the group's status. `jobs` is None if Slurm could not be queried."""
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
            return "unknown", "it is unknown whether the job was submitted"
        name = self.jobs[files.trial.index]
        job = None if jobs is None else jobs.get(name)
        # A job is missing from `jobs` if the job's cluster did not respond to the query.
        alive = None if job is None else job.state is not JobState.UNKNOWN and not job.state.is_terminal
        if not files.entry.attempt:
            # The array task for this trial has not created the run folder yet.
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
            again = f"`trainkit resume {quote(str(self.group.path))}` starts the remaining runs"
            return "died", f"the process that starts the runs has exited; {again}"
        return ("unknown", None) if alive is None else ("pending", "waiting for earlier runs of the group")

    @cached_property
    def _process_alive(self) -> bool | None:
        process = self.group.record.process
        return None if process is None else process.alive()


def _configured(group: RunGroup) -> Ranking | None:
    """Return the ranking selected by the configs of all trials, or None if the configs differ."""
    own = Record(group.record.config).record("checkpoint")
    common = {BEST_METRIC: own.text("best_metric"), BEST_MODE: own.text("best_mode")}
    others = (trial.config for trial in group.trials.values() if not trial.config.keys().isdisjoint(common))
    return config_ranking([common, *({**common, **config} for config in others)])


def _read_trials(group: RunGroup, rankings: Sequence[Ranking]) -> list[TrialFiles]:
    """Read the files of all trials.

    `rankings` lists the metrics whose results must be read from metrics.jsonl.
    """
    trials = group.trials
    created = group.created()
    found = {index: TrialFiles(trial, group.task_id(index)) for index, trial in trials.items()}
    shares = [created[first : first + TRIALS_PER_TASK] for first in range(0, len(created), TRIALS_PER_TASK)]
    from concurrent.futures import ThreadPoolExecutor  # slow to import, so imported only here

    with ThreadPoolExecutor(NUM_READERS) as readers:
        for share in readers.map(lambda share: [_read(group, index, rankings) for index in share], shares):
            found |= {files.trial.index: files for files in share}
    return list(found.values())


def _read(group: RunGroup, index: int, rankings: Sequence[Ranking]) -> TrialFiles:
    # Join the path as a string and parse only the newest attempt's record, because a group may have ten
    # thousand trials.
    folder = group.folder(index)
    attempts = read_object(f"{folder}/job.json").get("attempts")
    entry = attempt_of(attempts[-1]) if isinstance(attempts, list) and attempts else None
    entry, end = entry or NOT_CREATED, read_newest_end(folder)
    job_id = entry.job_id or group.task_id(index)
    best = None if end is None or end.resumes else end.best
    # An unreadable file of one trial must not hide the other trials.
    since = None
    # Check only the training loss: if the validation loss had diverged, end.json would not contain a best
    # result.
    if best is not None:
        with suppress(OSError):
            since = diverged_in(f"{folder}/metrics.jsonl", "loss")
            # Check the whole run, because the newest attempt may have recomputed the diverged steps.
            if since is not None:
                since = diverged_since(group.run(index))
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
            # A COMMAND might not write metrics, but an existing rank 0 log shows that the attempt has begun.
            is_command = PlanRecord(group.record.plan).is_command
            is_printing = is_command and run.attempt(entry.attempt).rank_log(0).exists()
            has_metrics = run.metrics_file.exists() or is_printing
            seen = attempts_of(events).get(entry.attempt)
            files = replace(
                files, seen=seen, step=newest_step(run, first_steps(run, events)), has_metrics=has_metrics
            )
    return files


def most_relevant(status: GroupStatus, count: int) -> list[TrialStatus]:
    """Return the `count` most relevant trials, ordered by state (failures first) and then by result."""

    def key(trial: TrialStatus) -> tuple[int, tuple[bool, float], int]:
        state = ORDER.index(trial.state) if trial.state in ORDER else 0
        return state, status.ranking.order(trial.score), trial.index

    return sorted(status.trials, key=key)[:count]


FIGURES = ("trial", "state", "step", "age")
"""The columns by which a table of trials can be sorted, in addition to the config keys and the metric."""


def column_of(name: str, keys: Sequence[str], figures: Iterable[str] = FIGURES) -> str | None:
    """Return the column called `name`: a key (in full or short form) or one of `figures`; else None."""
    columns = {**dict(zip(short_keys(keys), keys, strict=True)), **{one: one for one in (*keys, *figures)}}
    return columns.get(name) or {short.lower(): column for short, column in columns.items()}.get(name.lower())


def sorted_trials(status: GroupStatus, column: str | None) -> list[TrialStatus]:
    """Return the trials in ascending order of a column or, if it is None, by result, best first.

    If a config key and one of `FIGURES` have the same name, the key is used.
    """
    if column is None:
        return sorted(status.trials, key=lambda trial: status.ranking.order(trial.score))

    def value(trial: TrialStatus) -> object:
        state = ORDER.index(trial.state) if trial.state in ORDER else 0
        figures = zip(FIGURES, (trial.index, state, trial.step, trial.age_s), strict=True)
        return {**dict(figures), **trial.values}.get(column)

    return sorted(status.trials, key=lambda trial: value_order(value(trial)))


def value_order(value: Any) -> tuple[bool, bool, float, str]:
    """Return a sort key for a value: numbers come first, then strings, then None."""
    is_number = isinstance(value, (int, float)) and not math.isnan(value)
    return value is None, not is_number, value if is_number else 0.0, cell(value)
