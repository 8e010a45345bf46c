"""The curves of scripts as files of TensorBoard, which the process of its page writes from metrics.jsonl."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

from trainkit.run.events import StepRecord, steps_of
from trainkit.run.files import Tail
from trainkit.run.history import timestamp

POLL_S = 5.0
NOT_SCALARS = ("step", "time", "attempt")
"""Keys of every record."""


def follow(folder: str) -> None:
    """Write the files next to each ``*/metrics.jsonl`` of a folder; a thread adds what is new."""
    updates = [_writer(file) for file in sorted(Path(folder).glob("*/metrics.jsonl"))]
    for update in updates:
        update()
    Thread(target=_keep, args=(updates,), daemon=True).start()


def _keep(updates: list[Callable[[], None]]) -> None:
    while True:
        time.sleep(POLL_S)
        for update in updates:
            update()


def _writer(file: Path) -> Callable[[], None]:
    """What writes the records of a metrics.jsonl that are new."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer, tail = EventFileWriter(str(file.parent)), Tail(file)

    def update() -> None:
        for record in steps_of(tail.records()):
            values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(record).items()]
            summary = Summary(value=values)
            writer.add_event(
                Event(wall_time=timestamp(record.time) or 0.0, step=record.step, summary=summary)
            )
        writer.flush()

    return update


def scalars(record: StepRecord) -> dict[str, float]:
    """The finite numbers of a record by name."""
    found = {name: record.number(name) for name in record.values if name not in NOT_SCALARS}
    return {name: value for name, value in found.items() if value is not None}
