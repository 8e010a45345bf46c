"""Events of a training in the run's `events.jsonl`."""

from __future__ import annotations

from logging import getLogger
from typing import Any

from trainkit.rundir import RunDir, log_event

log = getLogger(__name__)


def note_event(run: RunDir, attempt: int, event: str, **fields: Any) -> None:
    """Append one event; a disk that is full is said in the log and ends no training."""
    try:
        log_event(run, attempt, event, **fields)
    except OSError as error:
        log.error(f"event {event} could not be written to {run.events_file} ({error})")
