"""Read the growing files of a run incrementally: each refresh reads only newly appended lines."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise, zip_longest
from pathlib import Path
from typing import TypeVar

from trainkit.capability import Reader
from trainkit.run.end import RESUME_ACTIONS
from trainkit.run.events import (
    WHOLE_BYTES,
    Event,
    StepRecord,
    event_lines,
    events_of,
    steps_of,
)
from trainkit.run.files import (
    LEFT_OUT,
    MAX_RECORD_BYTES,
    UNLIMITED,
    Record,
    Tail,
    open_file,
    parse_records,
    parse_time,
    read_jsonl_reversed,
    read_object,
    sampled_lines,
    seconds_between,
)
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.shipped import OVER, is_notable, owner_of, take_parts

RECENT_RECORDS = 200
NOTABLE_EVENTS = (
    "signal",
    "rank_failed",
    "hang",
    "checkpoint_rejected",
    "checkpoint_failed",
    "stopped",
)
"""Names of events that `run_view.event_text` shows as warnings; capabilities define additional ones."""
MAX_NOTABLE = 100
MAX_POINTS = 600
"""Number of records kept for a curve: when there are twice as many, every second record is dropped."""
SAMPLED_BYTES = 2 * 2**20
"""Maximum number of new bytes in metrics.jsonl that are read completely in one refresh. If there are more new
bytes, only `MAX_POINTS` evenly spaced lines and the newest lines are read."""
CURVES = ("loss", "grad_norm", "lr", "tokens_per_s")
MAX_CURVES = 40
"""Maximum number of metrics that have a curve; the metrics that occur first in the file are used. Any further
metrics are ignored, except for the metrics in `CURVES`."""
NOT_CURVES = frozenset(
    {
        "step",
        "attempt",
        "tokens",
        "samples_seen",
        "epoch",
        "step_s",
        "data_wait_s",
        "mfu",
        "mem_gib_peak",
        "tokens_per_s_per_gpu",
        "slowest_rank",
        "slowest_rank_s",
        "other_ranks_s",
    }
)
"""Numbers that are not shown as curves, because they identify a record or are shown elsewhere by `trainkit
watch`."""


@dataclass
class Attempt:
    """An attempt as described by its events; times are in seconds since the epoch, or None if unknown."""

    number: int
    submitted: float | None = None
    started: float | None = None
    training: float | None = None
    """The time when the training loop started."""
    first_step: float | None = None
    ended: float | None = None
    """The time when the attempt ended; for a running attempt, the current time."""
    state: str | None = None
    reason: str | None = None
    action: str | None = None
    """The last action that the supervisor chose; the supervisor may choose again if an action turns out to be
    impossible."""
    start_step: int = 0
    """The step of the checkpoint that the attempt resumed from; 0 if it started from scratch."""
    kept_step: float = field(default=math.inf, metadata=UNLIMITED)
    """The last step of this attempt that is part of the run's result; a later attempt recomputed all later
    steps."""
    num_nodes: int | None = None
    world_size: int | None = None
    partition: str | None = None
    """The partition that Slurm chose. The partition is recorded only if the job requested several partitions;
    the same applies to `gpu_type`."""
    gpu_type: str | None = None
    evaluations: list[float] = field(default_factory=list)
    saves: list[float] = field(default_factory=list)
    signals: list[float] = field(default_factory=list)
    cause: str | None = field(default=None, metadata=LEFT_OUT)
    """The cause of the restart after this attempt."""
    is_paused: bool = field(default=False, metadata=LEFT_OUT)
    """True if the ranks are suspended by Ctrl-Z."""
    waits_for: str | None = field(default=None, metadata=LEFT_OUT)
    """What an attempt on this machine waits for before it starts; None if it does not wait."""
    saved: float | None = field(default=None, metadata=LEFT_OUT)
    """The time when the newest checkpoint was published."""
    failure: Event | None = field(default=None, metadata=LEFT_OUT)
    """The first ``rank_failed`` event."""
    open_save: Event | None = field(default=None, metadata=LEFT_OUT)
    """The ``checkpoint_begin`` event of a save that has not finished yet."""
    failed_saves: list[Event] = field(default_factory=list, metadata=LEFT_OUT)
    """The ``checkpoint_failed`` events since the last successful save."""

    @property
    def allocated_s(self) -> float:
        """Return the seconds from the start to the end of the attempt; 0 if either time is unknown."""
        if self.started is None or self.ended is None:
            return 0.0
        return max(0.0, self.ended - self.started)

    def add(self, event: Event) -> None:
        """Update the attempt with one of its events; see `_OF_ATTEMPT`."""
        if (take := _OF_ATTEMPT.get(event.name)) is not None:
            take(self, event)

    def _submitted(self, event: Event) -> None:
        self.submitted = _first(self.submitted, event)

    def _started(self, event: Event) -> None:
        self.started, self.waits_for = _first(self.started, event), None
        self.num_nodes, self.world_size = event.count("nodes"), event.count("world_size")
        self.partition, self.gpu_type = event.text("partition"), event.text("gpu_type")

    def _training(self, event: Event) -> None:
        self.training, self.start_step = _first(self.training, event), event.step or 0

    def _first_step(self, event: Event) -> None:
        self.first_step = _first(self.first_step, event)

    def _waiting(self, event: Event) -> None:
        self.waits_for = event.reason

    def _paused(self, event: Event) -> None:
        self.is_paused = True

    def _continued(self, event: Event) -> None:
        self.is_paused = False

    def _evaluated(self, event: Event) -> None:
        self.evaluations += _times(event)

    def _checkpoint_begin(self, event: Event) -> None:
        self.saves += _times(event)
        self.open_save = event

    def _checkpoint_commit(self, event: Event) -> None:
        self.saved, self.open_save, self.failed_saves = timestamp(event.time), None, []

    def _checkpoint_failed(self, event: Event) -> None:
        self.open_save, self.failed_saves = None, [*self.failed_saves, event]

    def _signal(self, event: Event) -> None:
        self.signals += _times(event)

    def _rank_failed(self, event: Event) -> None:
        self.failure = self.failure or event

    def _requeue_decision(self, event: Event) -> None:
        self.action, self.cause = str(event.values.get("action")), str(event.values.get("cause"))

    def _ended(self, event: Event) -> None:
        self.ended, self.reason = timestamp(event.time), event.reason
        self.state = str(event.values.get("state"))


_OF_ATTEMPT: Mapping[str, Callable[[Attempt, Event], None]] = {
    "submitted": Attempt._submitted,
    "started": Attempt._started,
    "training": Attempt._training,
    "first_step": Attempt._first_step,
    "waiting": Attempt._waiting,
    "paused": Attempt._paused,
    "continued": Attempt._continued,
    "evaluated": Attempt._evaluated,
    "checkpoint_begin": Attempt._checkpoint_begin,
    "checkpoint_commit": Attempt._checkpoint_commit,
    "checkpoint_failed": Attempt._checkpoint_failed,
    "signal": Attempt._signal,
    "rank_failed": Attempt._rank_failed,
    "requeue_decision": Attempt._requeue_decision,
    "stopped": Attempt._ended,
    "finished": Attempt._ended,
}
"""Maps the name of an event to the method that updates the attempt."""


def _first(known: float | None, event: Event) -> float | None:
    return timestamp(event.time) if known is None else known


def _times(event: Event) -> list[float]:
    """Return a list that contains the time of an event; an empty list if the time is unknown."""
    time = timestamp(event.time)
    return [] if time is None else [time]


def attempts_of(events: Iterable[Event]) -> dict[int, Attempt]:
    """Return the attempts described by a run's events, by attempt number."""
    found: dict[int, Attempt] = {}
    for event in events:
        _add_to_attempt(found, event)
    return found


def _add_to_attempt(found: dict[int, Attempt], event: Event) -> None:
    if event.attempt is not None:
        found.setdefault(event.attempt, Attempt(event.attempt)).add(event)


def ended_attempts(attempts: Mapping[int, Attempt], now: float | None) -> list[Attempt]:
    """Return the attempts with `kept_step` set, oldest first.

    `now` is used as the end time of the newest attempt if it is still running.
    """
    kept, found = math.inf, list[Attempt]()
    for number in sorted(attempts, reverse=True):
        attempt = attempts[number]
        ended = now if attempt.ended is None and not found else attempt.ended
        found.append(replace(attempt, kept_step=kept, ended=ended))
        if attempt.training is not None:
            kept = min(kept, attempt.start_step)
    return found[::-1]


def idle_gaps(attempts: Sequence[Attempt]) -> float:
    """Return the total number of seconds between consecutive attempts in the same allocation.

    Only restarts are considered, because a requeue releases the allocation.
    """
    return sum(_idle_s(attempt, following) for attempt, following in pairwise(attempts))


def _idle_s(attempt: Attempt, following: Attempt) -> float:
    if attempt.action != "restart" or attempt.ended is None or following.started is None:
        return 0.0
    return max(0.0, following.started - attempt.ended)


def worker_hours(attempts: Sequence[Attempt], world_size: int | None) -> float | None:
    """Return the hours that the ranks' resources were allocated, summed across all ranks; None if unknown.

    `world_size` is used for attempts that did not record their number of ranks; the number may differ between
    attempts.
    """
    total_s = 0.0
    for attempt, following in zip_longest(attempts, attempts[1:]):
        ranks = attempt.world_size or world_size
        if ranks is None:
            return None
        total_s += ranks * (attempt.allocated_s + (0.0 if following is None else _idle_s(attempt, following)))
    return total_s / 3600


@dataclass(frozen=True)
class Restart:
    """A restart, from the failure or stop of one attempt to the next attempt; unknown durations are None."""

    attempt: int
    """The number of the attempt that ended."""
    action: str
    """The `AttemptEnd.action` that led to the next attempt: ``restart`` in the same allocation, ``requeue``
    of the same job, or ``resubmit`` or ``follow_up`` in another job."""
    cause: str
    """A `trainkit.run.end.Cause`, or a cause defined by a capability."""
    verdict: Event | None
    """The root cause: the first failure of the attempt; None if nothing failed."""
    save_s: float | None
    """Seconds from the stop signal to the completed checkpoint."""
    end_s: float | None
    """Seconds from the completed checkpoint to the end of the attempt. If there was no checkpoint, seconds
    from the signal or failure to the end of the attempt."""
    queue_s: float | None
    """Seconds from the end of the attempt to the start of the next attempt."""
    start_s: float | None
    """Seconds from the start of the next attempt to its first step."""
    total_s: float | None
    """Seconds from the stop signal or failure to the first step of the next attempt."""


def find_restarts(attempts: Mapping[int, Attempt]) -> list[Restart]:
    """Return the restarts of a run, oldest first."""
    found = sorted(attempts.items())
    return [
        _restart(attempt, attempts.get(number + 1, Attempt(number + 1)))
        for number, attempt in found
        if attempt.action in RESUME_ACTIONS
    ]


def _restart(attempt: Attempt, following: Attempt) -> Restart:
    failure, failed = attempt.failure, attempt.cause in ("crash", "hang", "node_fail")
    began = attempt.signals[0] if attempt.signals else None
    if failed and failure is not None:
        began = timestamp(failure.text("failed_at"))
    saved = None if failed else attempt.saved
    if saved is not None and began is not None and saved < began:
        saved = None  # No checkpoint was saved after the signal, because there was no new step to save.
    return Restart(
        attempt=attempt.number,
        action=str(attempt.action),
        cause=str(attempt.cause),
        verdict=failure,
        save_s=_between(began, saved),
        end_s=_between(saved or began, attempt.ended),
        queue_s=_between(attempt.ended, following.started),
        start_s=_between(following.started, following.first_step),
        total_s=_between(began, following.first_step),
    )


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else round(end - begin, 3)


def timestamp(text: object) -> float | None:
    """Convert a time from a run's file to seconds since the epoch; return None if the text is not a time."""
    time = parse_time(text)
    return None if time is None else time.timestamp()


class OwnedEvents:
    """Collects events that belong to capabilities, and tracks which of them are in effect; see `owner_of`."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.all: list[Event] = []
        self._lasting: dict[int | None, dict[tuple[str, int | None], Event]] = {}
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """Add an event if it belongs to a capability; ignore any other event."""
        if owner_of(event.name) is None:
            return
        self.all.append(event)
        own, name = self._lasting.setdefault(event.attempt, {}), event.name.removesuffix(OVER)
        for key in [key for key in own if key[0] == name and (event.rank in (None, key[1]))]:
            del own[key]
        if name == event.name:
            own[name, event.rank] = event

    def lasting(self, attempt: int | None) -> list[Event]:
        """Return an attempt's events that are still in effect, in chronological order."""
        return list(self._lasting.get(attempt, {}).values())


class EventHistory:
    """Summarizes the events of a run, and reads new events incrementally.

    If events.jsonl is large, reads only the lines that `event_lines` yields.
    """

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._clear()

    def _clear(self) -> None:
        self._tail.position = 0
        self.recent: deque[Event] = deque(maxlen=RECENT_RECORDS)
        self.notable: deque[Event] = deque(maxlen=MAX_NOTABLE)
        self.attempts: dict[int, Attempt] = {}
        self.val_losses: dict[int, float] = {}
        """Maps a step to its validation loss; excludes steps that a later attempt recomputes."""
        self._evaluated_in: int | None = None
        self.first_val_loss: float | None = None
        self.val_loss: float | None = None
        self.has_lost_val_loss = False
        """True if the newest validation loss is not finite."""
        self.total_steps: int | None = None
        """The total number of steps in the run, as last logged by the trainer."""
        self.saved: Event | None = None
        """The newest ``checkpoint_commit`` event."""
        self.save_began: str | None = None
        """Time of the ``checkpoint_begin`` event for the save in `saved`. The checkpoint contains the
        training state at this time."""
        self.owned = OwnedEvents()
        self._begun: dict[int | None, str | None] = {}

    def attempt(self, number: int | None) -> Attempt:
        """Return the attempt with a number; an empty `Attempt` if it has no events."""
        return self.attempts.get(number or 0) or Attempt(number or 0)

    def update(self) -> None:
        """Read the events appended since the last call."""
        size = self._tail.size()
        if size < self._tail.position:
            self._clear()  # If the file is shorter than when it was last read, another file has replaced it.
        if size - self._tail.position > WHOLE_BYTES:
            with open_file(self._tail.path) as stream:
                for event in events_of(parse_records(event_lines(stream, self._tail.position, size))):
                    self._add(event)
                self._tail.position = stream.tell()
        for event in events_of(self._tail.records()):
            self._add(event)

    def _add(self, event: Event) -> None:
        name = event.name
        self.recent.append(event)
        _add_to_attempt(self.attempts, event)
        if "total_steps" in event.values:
            self.total_steps = event.count("total_steps")
        is_owned = owner_of(name) is not None
        if is_owned:
            self.owned.add(event)
        if name in NOTABLE_EVENTS or (is_owned and is_notable(name)):
            self.notable.append(event)
        if (take := _OF_RUN.get(name)) is not None:
            take(self, event)

    def _training(self, event: Event) -> None:
        if event.step is not None:
            self._drop_val_losses(event.step + 1)

    def _drop_val_losses(self, first: int) -> None:
        for step in [one for one in self.val_losses if one >= first]:
            del self.val_losses[step]

    def _evaluated(self, event: Event) -> None:
        # The attempt number may also change at this event, because a COMMAND need not log the start of an
        # attempt.
        if event.attempt != self._evaluated_in and event.step is not None:
            self._evaluated_in = event.attempt
            self._drop_val_losses(event.step)
        self.val_loss = event.number("val_loss")
        self.has_lost_val_loss = self.val_loss is None and "val_loss" in event.values
        if self.first_val_loss is None:
            self.first_val_loss = self.val_loss
        if event.step is not None and self.val_loss is not None:
            self.val_losses[event.step] = self.val_loss

    def _checkpoint_begin(self, event: Event) -> None:
        self._begun[event.step] = event.time

    def _checkpoint_commit(self, event: Event) -> None:
        self.saved, self.save_began = event, self._begun.pop(event.step, event.time)


_OF_RUN: Mapping[str, Callable[[EventHistory, Event], None]] = {
    "training": EventHistory._training,
    "evaluated": EventHistory._evaluated,
    "checkpoint_begin": EventHistory._checkpoint_begin,
    "checkpoint_commit": EventHistory._checkpoint_commit,
}
"""Maps the name of an event to the method that updates the run's history."""


class MetricsHistory:
    """Keeps the newest records in metrics.jsonl, and evenly spaced records from the whole run."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._clear()

    def _clear(self) -> None:
        self._tail.position = 0
        self.recent: deque[StepRecord] = deque(maxlen=RECENT_RECORDS)
        self.points: list[StepRecord] = []
        """Evenly spaced records ordered by step, each reduced to its numbers."""
        self._names = dict.fromkeys(CURVES)
        self._every = 1
        """One in every `_every` new records is added to `points`."""
        self._count = 0

    def update(self) -> None:
        """Read the records appended since the last call; read only a sample if there are too many."""
        size = self._tail.size()
        if size < self._tail.position:
            self._clear()
        if size - self._tail.position > SAMPLED_BYTES:
            self._sample(size)
        for record in steps_of(self._tail.records()):
            self._count += 1
            self._add(record, self._count % self._every == 0)

    def _sample(self, size: int) -> None:
        begin, end = self._tail.position, size - SAMPLED_BYTES // 8
        with open_file(self._tail.path) as stream:
            lines = sampled_lines(stream, begin, end, MAX_POINTS)
            stream.seek(end)
            stream.readline(MAX_RECORD_BYTES)
            self._tail.position = stream.tell()
        for record in steps_of(parse_records(lines)):
            self._add(record, True)
        self._every = max(self._every, round((end - begin) / max(1, sum(map(len, lines)))))

    def _add(self, record: StepRecord, is_point: bool) -> None:
        step = record.step
        self.recent.append(record)
        while self.points and self.points[-1].step >= step:
            self.points.pop()  # A later attempt has recomputed this step.
        if is_point:
            self.points.append(StepRecord({"step": step, **self._numbers(record)}))
        if len(self.points) >= 2 * MAX_POINTS:
            self.points = self.points[1::2]
            self._every *= 2

    def _numbers(self, record: StepRecord) -> dict[str, object]:
        """Return the numbers in a record by name; once there are `MAX_CURVES` names, omit new names."""
        found = {}
        for name, value in record.values.items():
            if type(value) not in (int, float) or name in NOT_CURVES:
                continue
            if name not in self._names:
                if len(self._names) >= MAX_CURVES:
                    continue
                self._names[name] = None
            found[name] = value
        return found

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Return the curves of all metrics by name; the metrics in `CURVES` come first."""
        return {name: self.curve(name) for name in self._names}

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Return the (step, value) pairs of a curve that have finite values, including the newest record."""
        points = [*self.points, *list(self.recent)[-1:]]
        found = {point.step: point.number(name) for point in points}
        return [(step, float(value)) for step, value in found.items() if value is not None]

    def median(self, name: str) -> float | None:
        """Return the median of a curve over the whole run; None if the curve is empty."""
        from statistics import median  # Imported here because the supervisor never needs this module.

        values = [value for _, value in self.curve(name)]
        return median(values) if values else None


class PlanRecord(Record):
    """Wraps a plan.json that may be incomplete; use `LaunchPlan` where the complete plan is needed."""

    __slots__ = ()

    @property
    def command(self) -> list[str] | None:
        """Return the COMMAND that the run executes; None if the run uses the built-in trainer."""
        command = self.values.get("command")
        return [str(word) for word in command] if isinstance(command, list) else None

    @property
    def is_command(self) -> bool:
        return bool(self.command)

    @property
    def is_job(self) -> bool:
        """Return whether the run is, or may become, a scheduler job.

        A run that is not a job executes on the machine where it was started.
        """
        return self.values.get("slurm", {}) is not None

    @property
    def parts(self) -> dict[str, Record]:
        """Return the plan sections of the capabilities that the run uses, keyed by capability name."""
        found = take_parts(self.values) if isinstance(self.values.get("capabilities", {}), dict) else {}
        return {name: Record(part) for name, part in found.items() if isinstance(part, dict)}

    @property
    def step_shape(self) -> tuple[Mapping[str, object], Mapping[str, object], str | None]:
        """Return the layout, batch settings and device, which together determine the duration of a step."""
        return self.record("layout").values, self.record("batch").values, self.text("device")


def read_plan(folder: RunDir | AttemptDir) -> PlanRecord:
    """Read the plan.json of a run or an attempt; return an empty plan if the file cannot be read."""
    return PlanRecord(read_object(folder.plan_file))


def seconds_left(records: Sequence[StepRecord], total_steps: int | None) -> float | None:
    """Estimate the seconds until the last step from the mean speed in `records`; None if unknown."""
    if total_steps is None or len(records) < 2:
        return None
    first, last = records[0], records[-1]
    elapsed_s, num_steps = seconds_between(first.time, parse_time(last.time)), last.step - first.step
    if elapsed_s is None or num_steps <= 0:
        return None
    return max(0.0, (total_steps - last.step) * elapsed_s / float(num_steps))


R = TypeVar("R", bound=Reader)


class RunHistory:
    """Reads the files that a run writes; used by all commands that display runs."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.events = EventHistory(run.events_file)
        self.metrics = MetricsHistory(run.metrics_file)
        self._readers: dict[type[Reader], Reader] = {}

    def update(self) -> None:
        """Read new data in the run's files since the last call; raise OSError if a file cannot be read."""
        self.events.update()
        self.metrics.update()

    def reader(self, kind: type[R]) -> R:
        """Return a capability's reader after updating it; raise OSError if its file cannot be read.

        Repeated calls with the same `kind` return the same reader.
        """
        reader = self._readers.setdefault(kind, kind(self.run))
        assert isinstance(reader, kind)
        reader.update()
        return reader

    def newest_steps(self) -> list[StepRecord]:
        """Return the last `RECENT_RECORDS` logged steps, oldest first, read from the end of metrics.jsonl."""
        records = read_jsonl_reversed(self.run.metrics_file)
        return list(islice(steps_of(records), RECENT_RECORDS))[::-1]
