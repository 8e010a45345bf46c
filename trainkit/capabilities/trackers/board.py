"""Converts metrics.jsonl files of scripts to TensorBoard files, in the process of the TensorBoard server."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread

from trainkit.run.events import StepRecord, steps_of
from trainkit.run.files import Tail
from trainkit.run.history import timestamp
from trainkit.run.rundir import RunDir

POLL_S = 5.0
LAST_STEP = 2**53
"""Exclusive upper limit for step numbers, because TensorBoard cannot store much larger numbers."""
NOT_SCALARS = ("step", "time", "attempt")
"""Keys of a record that are not metrics."""


def follow(folder: str) -> None:
    """Convert each ``*/metrics.jsonl`` in a folder to TensorBoard files, and add new records in a thread.

    A symlink to a file that does not exist yet is followed as soon as the file exists.
    """
    updates = {
        one: _writer(RunDir(one).metrics_file)
        for one in sorted(Path(folder).iterdir())
        if not one.is_symlink()
    }
    said = set[Path]()
    _update(updates, said)
    Thread(target=_keep, args=(updates, said), daemon=True).start()


def _keep(updates: Mapping[Path, Callable[[], None]], said: set[Path]) -> None:
    while True:
        time.sleep(POLL_S)
        _update(updates, said)


def _update(updates: Mapping[Path, Callable[[], None]], said: set[Path]) -> None:
    """Add the new records of each run; if a run cannot be read or written, report this only once."""
    for place, update in updates.items():
        try:
            update()
        except OSError as error:
            if place not in said:
                said.add(place)
                print(f"warning: the curves of {place.name} are incomplete: {error}", file=sys.stderr)


def _writer(file: Path) -> Callable[[], None]:
    """Return a function that converts new records of a metrics.jsonl file once the file exists."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    tail, writers = Tail(file), list[EventFileWriter]()
    last_step, last_attempt = -LAST_STEP, 0

    def update() -> None:
        nonlocal last_step, last_attempt
        if not writers:
            if not file.exists():
                return
            writers.append(EventFileWriter(str(file.parent)))
        for record in steps_of(tail.records()):
            step, attempt, at = record.step, record.attempt or last_attempt, timestamp(record.time) or 0.0
            if abs(step) >= LAST_STEP:
                continue
            if step < last_step or attempt > last_attempt > 0:
                # Tell TensorBoard to discard the values logged from this step on, as `purge_step` of
                # SummaryWriter does, because these steps are computed again.
                again = SessionLog(status=SessionLog.START)
                writers[0].add_event(Event(wall_time=at, step=step, session_log=again))
            last_step, last_attempt = step, attempt
            values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(record).items()]
            writers[0].add_event(Event(wall_time=at, step=step, summary=Summary(value=values)))
        writers[0].flush()

    return update


def scalars(record: StepRecord) -> dict[str, float]:
    """Return the finite numbers in a record, keyed by metric name."""
    found = {name: record.number(name) for name in record.values if name not in NOT_SCALARS}
    return {name: value for name, value in found.items() if value is not None}
