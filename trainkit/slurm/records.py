"""How we ask squeue and sacct to print: separators that nobody types, the free text last. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone

FIELD = "\x1f"
RECORD = "\x1e"
"""Job names may hold newlines, so that lines are no records."""


def records(text: str, num_fields: int, end: str = RECORD) -> Iterator[list[str]]:
    """The fields of every record; the last one may hold anything. What a crash cut off is left out."""
    for record in text.split(f"{end}\n"):
        fields = record.split(FIELD, num_fields - 1)
        if len(fields) == num_fields:
            # Between clusters squeue prints their names, on lines of their own.
            fields[0] = fields[0].rpartition("\n")[2]
            yield fields


def time_of(text: str) -> datetime | None:
    """A time that Slurm printed as Unix seconds, in UTC; None for `N/A`, `Unknown` and `None`."""
    return datetime.fromtimestamp(int(text), timezone.utc) if text.isdigit() and text != "0" else None


def seconds_of(text: str) -> int | None:
    """A duration (`1-02:03:04`, `02:03:04`, `03:04`) in seconds; None for `UNLIMITED`, `INVALID`, …"""
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in ([days] if dash else []) + parts) or not 2 <= len(parts) <= 3:
        return None
    seconds = 0
    for part in parts:
        seconds = 60 * seconds + int(part)
    return seconds + 86400 * int(days or 0)
