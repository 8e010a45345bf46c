"""events.jsonl and metrics.jsonl: what happened in a run, and what they say of its course."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trainkit.run.files import append_jsonl, read_jsonl, read_jsonl_reversed, utc_now
from trainkit.run.rundir import RunDir

SLOWDOWN_EVENTS = ("slow_rank", "slow_rank_over", "slow_run", "slow_run_over")


SILENCE_EVENTS = ("silent", "silent_over")
"""What the supervisor logs of a COMMAND that prints nothing, and of its next output."""


SAVE_EVENTS = ("checkpoint_commit", "checkpoint_failed")


FAILED_SAVES = 2
"""So many saves that fail in a row are reported: one may fail for a moment."""


def log_event(run: RunDir, attempt: int, event: str, **fields: Any) -> None:
    """Append one event to the run's `events.jsonl`."""
    append_jsonl(run.events_file, {"time": utc_now(), "attempt": attempt, "event": event, **fields})


def read_metrics(run: RunDir) -> list[dict[str, Any]]:
    """The training curve: one record per step, the last one written if a step was computed twice."""
    by_step: dict[int, dict[str, Any]] = {}
    for record in read_jsonl(run.metrics_file):
        if isinstance(record.get("step"), int):
            by_step[record["step"]] = record
    return [by_step[step] for step in sorted(by_step)]


def best_result(run: RunDir, events: Iterable[dict[str, Any]] | None = None) -> dict[str, Any] | None:
    """The lowest validation loss of a run, else its newest loss, as ``metric, value, step``; None without.

    `events` are all ``evaluated`` events of the run, for callers that have already read them.
    """
    evaluated = [
        record
        for record in (read_jsonl(run.events_file, ["evaluated"]) if events is None else events)
        if record.get("event") == "evaluated" and isinstance(record.get("val_loss"), (int, float))
    ]
    if evaluated:
        best = min(evaluated, key=lambda record: record["val_loss"])
        return {"metric": "val_loss", "value": best["val_loss"], "step": best.get("step")}
    for record in read_jsonl_reversed(run.metrics_file, ["loss"]):
        if isinstance(record.get("loss"), (int, float)):
            return {"metric": "loss", "value": record["loss"], "step": record.get("step")}
    return None


def open_slowdowns(run: RunDir, attempt: int) -> list[dict[str, Any]]:
    """The events of ranks of an attempt, or of the whole run, that became slow and still are."""
    return still_slow(read_jsonl(run.events_file, SLOWDOWN_EVENTS), attempt)


def still_slow(events: Iterable[dict[str, Any]], attempt: int) -> list[dict[str, Any]]:
    """As `open_slowdowns`, from the `SLOWDOWN_EVENTS` of a run."""
    found: dict[object, dict[str, Any]] = {}
    for event in events:
        if event.get("attempt") == attempt and event.get("event") in SLOWDOWN_EVENTS:
            found.pop(event.get("rank"), None)
            if event.get("event") in ("slow_rank", "slow_run"):
                found[event.get("rank")] = event
    return list(found.values())


def failed_in_a_row(failed: list[dict[str, Any]], event: dict[str, Any]) -> list[dict[str, Any]]:
    """The newest saves of one attempt, as far as all of them failed, after one more of `SAVE_EVENTS`."""
    if event.get("event") != "checkpoint_failed":
        return []
    return [*(one for one in failed if one.get("attempt") == event.get("attempt")), event]
