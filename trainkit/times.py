"""Times as the run's files hold them: ISO-8601 in UTC with milliseconds, ``2026-01-31T12:00:00.123Z``."""

from __future__ import annotations

from datetime import datetime, timezone


def utc_now() -> str:
    """Now, as files hold it."""
    return as_utc(datetime.now(timezone.utc))


def as_utc(time: datetime, timespec: str = "milliseconds") -> str:
    """A time that knows its zone, as files hold it."""
    return time.astimezone(timezone.utc).isoformat(timespec=timespec).replace("+00:00", "Z")


def parse_time(text: object) -> datetime | None:
    """A time that a file holds; None for what is none."""
    if not isinstance(text, str):
        return None
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None


def seconds_between(start: object, end: datetime | None) -> float | None:
    """Seconds from a time that a file holds until another; None when one of them is not known."""
    begun = parse_time(start)
    return None if begun is None or end is None else (end - begun).total_seconds()
