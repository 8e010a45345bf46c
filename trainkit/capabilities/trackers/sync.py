"""Sends the metrics of a run to its trackers, sending each step once.

The metrics come from `metrics.jsonl`. A step is sent after a checkpoint covers it or the run has finished,
because a later attempt may recompute steps that no checkpoint covers. The newest step sent to a tracker is
recorded in `trackers/NAME.json` in the run folder.

During training, the agent on the node of rank 0 runs ``python -m trainkit.capabilities.trackers.sync
RUN_DIR``. The process started by the agent exits when its stdin is closed. If this process reads the line
``finished`` from stdin, it sends the remaining steps before it exits.
"""

from __future__ import annotations

import math
import os
import re
import select
import sys
import time
import uuid
from dataclasses import asdict, dataclass, replace

from trainkit.capabilities.media.items import Item, image_file, read_items
from trainkit.capabilities.trackers import trackers_dir
from trainkit.capabilities.trackers.clients import Facts, Media, MlflowRun, Sample, WandbRun, read_facts
from trainkit.config import read_effective
from trainkit.config.running import MlflowConfig, WandbConfig
from trainkit.errors import TrainkitError, UsageError
from trainkit.extras import install_line
from trainkit.folders import ensure_folder
from trainkit.locks import LockBusy, acquire_lock, release_lock
from trainkit.run.end import read_newest_end
from trainkit.run.events import StepRecord, later_records, training_curve
from trainkit.run.files import parse_time, read_json, refresh_listing, utc_now, write_json
from trainkit.run.manifest import published
from trainkit.run.rundir import RunDir

_NOT_ALLOWED = re.compile(r"[^\w\-./ :]")
"""Matches characters that MLflow does not allow in names."""


@dataclass(frozen=True)
class Position:
    """The progress of sending steps to one tracker, stored in ``trackers/NAME.json``."""

    key: str
    """The key that identifies the run in the tracker, and is the same for all attempts."""
    place: str = ""
    """The URL or folder of the run in the tracker. If `place` changes, all steps are sent again."""
    step: int = -1
    """The newest step sent to the tracker; -1 if there is none. Items logged before the first step are sent
    with step 0."""
    time: str = ""
    problem: str = ""
    """The error message of the last transfer; empty if the transfer succeeded."""
    num_later: int = 0
    """Number of `later_records` sent to the tracker."""


def trackers_of(run: RunDir) -> dict[str, MlflowConfig | WandbConfig]:
    """Return the settings for each tracker of a run; raise UsageError if the run has no tracker."""
    found = read_effective(run.config_file).logging.trackers
    if not found:
        hint = (
            "`trainkit resume RUN --set logging.mlflow=true` adds a tracker; for a finished run, "
            "also increase"
        )
        hint += " train.steps"
        raise UsageError(f"{run.shown} has no tracker: logging.mlflow and logging.wandb are null", hint=hint)
    return found


def state_of(run: RunDir) -> str:
    """Return ``finished``, ``failed`` or ``stopped``, or ``running`` if the run may continue."""
    end = read_newest_end(run.path)
    return end.action if end is not None and end.action in ("finished", "failed", "stopped") else "running"


def settled_step(run: RunDir, is_finished: bool) -> float:
    """Return the newest step that later attempts will not recompute.

    For an unfinished run, return the step of the newest checkpoint; for a finished run, return infinity.
    """
    if is_finished:
        return math.inf
    refresh_listing(run.checkpoints_dir)
    checkpoints = published(run.checkpoints_dir)
    return checkpoints[-1].step if checkpoints else -1


def read_position(run: RunDir, name: str) -> Position:
    """Read the recorded progress for a tracker; if there is none, return a new position with a new key."""
    try:
        return Position(**read_json(trackers_dir(run) / f"{name}.json"))
    except FileNotFoundError:
        return Position(uuid.uuid4().hex[:16])


def samples(run: RunDir, after: int, up_to: float) -> list[Sample]:
    """Return metrics and media for each step in the range `after` < step <= `up_to`, in order."""
    records = {record.step: record for record in training_curve(run)}
    media: dict[int, list[Item]] = {}
    for item in read_items(run):
        media.setdefault(item.step, []).append(item)
        records.setdefault(item.step, StepRecord({"step": item.step, "time": item.time}))
    return [
        _sample(records[step], tuple(filter(None, (_media(run, item) for item in media.get(step, [])))))
        for step in sorted(records)
        if after < step <= up_to
    ]


def _media(run: RunDir, item: Item) -> Media | None:
    """Convert an item for a tracker, or return None if its image is missing or its histogram is empty."""
    name = _NOT_ALLOWED.sub("_", item.name)
    if item.kind == "image":
        file = image_file(run, item)
        return None if file is None else Media(name, item.kind, file, item.text("caption") or "")
    if item.kind == "text":
        return Media(name, item.kind, text=item.text("text") or "")
    low, high = item.number("low"), item.number("high")
    return (
        None if low is None or high is None else Media(name, item.kind, counts=item.counts, ends=(low, high))
    )


def _sample(record: StepRecord, media: tuple[Media, ...]) -> Sample:
    time = parse_time(record.time)
    values = {
        _NOT_ALLOWED.sub("_", name): float(value)
        for name, value in record.values.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }
    return Sample(record.step, 0 if time is None else round(time.timestamp() * 1000), values, media)


@dataclass(frozen=True)
class Sent:
    """The result of sending steps to a tracker."""

    name: str
    num_sent: int
    num_pending: int
    """Number of steps that should have been sent but were not."""
    num_held: int
    """Number of steps that are not sent yet because no checkpoint covers them."""
    place: str
    problem: str

    def describe(self) -> str:
        """Describe the result, for example ``mlflow: 40 steps sent, 3 pending: sqlite:///…``."""
        text = f"{self.name}: {self.num_sent} step{'' if self.num_sent == 1 else 's'} sent"
        text += f", {self.num_pending} pending" if self.num_pending else ""
        text += f", {self.num_held} held until the next checkpoint" if self.num_held else ""
        return ": ".join(filter(None, (text, self.problem or self.place)))


SyncedJson = list[Sent]


class RunTracker:
    """Sends the metrics of a run to one tracker; opens the tracker when there is a step to send."""

    def __init__(self, run: RunDir, name: str, settings: MlflowConfig | WandbConfig) -> None:
        self.run, self.name, self.settings = run, name, settings
        self._position: Position | None = None
        """The newest progress, kept in memory in case its file cannot be written."""
        self._tracker: MlflowRun | WandbRun | None = None
        self._lock: int | None = None

    @property
    def writes_once(self) -> bool:
        """Return whether all steps are sent together, at the end of the run or by `trainkit sync`."""
        return isinstance(self.settings, WandbConfig) and self.settings.mode == "offline"

    def update(self, state: str, *, closes: bool = False) -> Sent:
        """Send all steps that later attempts will not recompute; close the tracker if `closes` is true.

        Errors of the tracker are included in the result, and a later call retries. Raises LockBusy if another
        process is sending to the tracker, ModuleNotFoundError if the client library is not installed, and
        OSError or TrainkitError if the run folder cannot be read.
        """
        limit = settled_step(self.run, state == "finished")
        if self._lock is None:
            ensure_folder(trackers_dir(self.run), 0o700)
            self._lock = acquire_lock(trackers_dir(self.run) / f".{self.name}.lock", 0.0)
        num_sent, problem = 0, ""
        unsent: list[Sample] | None = None
        try:
            num_sent, unsent = self._send(limit, is_last=state == "finished")
            if closes and self._tracker is not None:
                self._tracker.close(state)
                self.release()
        except (ModuleNotFoundError, TrainkitError):
            self.release()
            raise
        except Exception as error:  # client libraries raise exceptions of many types
            problem = one_line(error)
            self._tracker = None
        position = self._known_position()
        if unsent is None:
            unsent = samples(self.run, position.step, math.inf)
        try:
            if num_sent or problem != position.problem:
                self._record(replace(position, time=utc_now(), problem=problem))
        finally:
            if self._tracker is None:
                self.release()  # release the lock, so that `trainkit sync` can send the steps
        num_pending = sum(item.step <= limit for item in unsent)
        return Sent(self.name, num_sent, num_pending, len(unsent) - num_pending, position.place, problem)

    def _send(self, limit: float, *, is_last: bool) -> tuple[int, list[Sample]]:
        """Send the steps up to `limit`; return the number of sent steps, and the samples of later steps.

        Metrics that were measured after their steps are sent too; `is_last` is True if no step will follow.
        """
        position = self._known_position()
        if self._tracker is None:
            found = samples(self.run, -1, math.inf)
            if not any(item.step <= limit for item in found):
                return 0, found  # create the run in the tracker only once there is a step to send
            # The key must be on disk before the run is created, to find the run after a crash.
            self._record(position)
            self._tracker = open_tracker(self.settings, read_facts(self.run), position.key)
            step = self._tracker.newest_step(position.place, position.step)
            num_later = 0 if step < 0 else position.num_later
            position = replace(position, place=self._tracker.place, step=step, num_later=num_later)
            self._record(position)
        found = samples(self.run, position.step, math.inf)
        batch = [item for item in found if item.step <= limit]
        if batch:
            self._tracker.send(batch)
            position = replace(position, step=batch[-1].step, time=utc_now(), problem="")
            self._record(position)
        if later := [_sample(record, ()) for record in later_records(self.run)[position.num_later :]]:
            num_sent = self._tracker.send_later(later, is_last=is_last, has_steps=bool(batch))
            self._record(replace(position, num_later=position.num_later + num_sent))
        return len(batch), found[len(batch) :]

    def _known_position(self) -> Position:
        return self._position or read_position(self.run, self.name)

    def _record(self, position: Position) -> None:
        self._position = position
        write_json(trackers_dir(self.run) / f"{self.name}.json", asdict(position))

    def release(self) -> None:
        """Discard the tracker without closing it, and release its lock so that another process can send."""
        self._tracker = self._position = None
        if self._lock is not None:
            release_lock(self._lock)
            self._lock = None


def open_tracker(settings: MlflowConfig | WandbConfig, facts: Facts, key: str) -> MlflowRun | WandbRun:
    """Open the run in a tracker, creating the run in the tracker if necessary."""
    if isinstance(settings, MlflowConfig):
        return MlflowRun(settings, facts, key)
    return WandbRun(settings, facts, key)


def sync_run(run: RunDir) -> list[Sent]:
    """Send every tracker of a run all steps that later attempts will not recompute.

    Raises UsageError if the run has no tracker, and the same errors as `RunTracker.update`.
    """
    state = state_of(run)
    found = []
    for name, settings in trackers_of(run).items():
        tracker = RunTracker(run, name, settings)
        try:
            found.append(tracker.update(state, closes=True))
        finally:
            tracker.release()
    return found


def one_line(error: BaseException) -> str:
    """Format an error of a third-party library as one line of limited length."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


POLL_S = 5.0
MAX_POLL_S = 300.0
"""Maximum number of seconds between two transfers; the interval doubles after each failure."""


def main() -> int:
    """Send metrics until stdin is closed, and return the exit code."""
    os.nice(19)  # Run with the lowest priority, because the ranks need the cores.
    run = RunDir(sys.argv[1])
    trackers = [RunTracker(run, name, settings) for name, settings in trackers_of(run).items()]
    live = [tracker for tracker in trackers if not tracker.writes_once]
    poll_s, line = POLL_S, None
    while line is None:
        problems = [tracker.name for tracker in live if not update(tracker)]
        poll_s = min(MAX_POLL_S, 2 * poll_s) if problems else POLL_S
        if select.select([sys.stdin], [], [], poll_s)[0]:
            line = sys.stdin.readline().strip()  # An empty line means that stdin was closed.
    if line == "finished":
        for tracker in trackers:
            update(tracker, "finished")
    return 0


def update(tracker: RunTracker, state: str = "running") -> bool:
    """Send new steps to a tracker and print the result; return False if the transfer failed."""
    try:
        sent = tracker.update(state, closes=state != "running")
    except LockBusy:
        return True  # `trainkit sync` is already sending the steps
    except ModuleNotFoundError as error:
        line = install_line(tracker.name)
        show(f"warning: {tracker.name}: {error}; run `{line}`, then `trainkit sync` to send the metrics")
        return False
    except Exception as error:  # the error may be temporary, so the next call retries
        show(f"{tracker.name}: {one_line(error)}")
        return False
    if sent.num_sent or sent.problem:
        show(sent.describe())
    return not sent.problem


def show(text: str) -> None:
    """Print a line with the current time to the attempt's trackers.log."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
