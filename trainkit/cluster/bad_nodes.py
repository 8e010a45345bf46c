"""Records failed hosts for each cluster, so that this user's jobs exclude them for 24 hours.

The records are in ``$XDG_STATE_HOME/trainkit/bad_nodes/CLUSTER.json``; delete this file to use the hosts
again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Literal

from trainkit.folders import ensure_folder, state_folder
from trainkit.locks import file_lock
from trainkit.run.files import parse_time, read_object, read_record, write_json

KEEP = timedelta(hours=24)
LONG_AGO = datetime.min.replace(tzinfo=timezone.utc)
LOCK_TIMEOUT_S = 10.0
"""Timeout in seconds for the lock, which a dead host may still hold; losing a record is better than waiting
longer."""
FAILURES_OF_A_CULPRIT = 2
"""How many failures of a single run must originate on a host before the host is excluded."""

_BLAMED = ("culprit", "start")

Kind = Literal["died", "preflight", "culprit", "start"]
"""`died`: the host went down, according to Slurm. `preflight`: the host failed the preflight checks.
`culprit`: a run's failure originated on the host. `start`: a job ended on the host before its supervisor
began."""


def memory_file(cluster: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the file that contains a cluster's bad hosts."""
    return state_folder(environ) / "bad_nodes" / f"{cluster.lower().replace('/', '_')}.json"


def note_failure(
    cluster: str,
    host: str,
    kind: Kind,
    reason: str,
    *,
    run: str,
    attempt: int,
    now: datetime | None = None,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Record that a host caused a run's attempt to fail. `reason` is a short text for messages.

    Raises OSError if the file cannot be written or its lock cannot be acquired.
    """
    now = now or datetime.now(timezone.utc)
    file = memory_file(cluster, environ)
    ensure_folder(file.parent, 0o700, parents=True)
    # Hold the lock so that two jobs do not overwrite each other's records.
    with file_lock(file.with_suffix(".lock"), LOCK_TIMEOUT_S):
        notes = [
            *_notes(file, now),
            Note(host, kind, reason, run, attempt, now.isoformat(timespec="seconds")),
        ]
        write_json(file, {"notes": list(map(asdict, notes))})


@dataclass(frozen=True)
class Note:
    """One recorded failure. A value that is damaged or incorrectly edited is considered missing."""

    host: str = ""
    kind: str = ""
    reason: str = ""
    run: str = ""
    attempt: int = 0
    time: str = ""

    @property
    def at(self) -> datetime:
        """The time of the failure, or `LONG_AGO` if unknown."""
        found = parse_time(self.time)
        return LONG_AGO if found is None or found.tzinfo is None else found


def excluded(
    cluster: str,
    now: datetime | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    run: str | None = None,
) -> dict[str, str]:
    """Return the hosts that jobs on a cluster should exclude, each with the reason; most recent first.

    A host is excluded if, within the last 24 hours, it died, failed the preflight checks, or was the culprit
    in `FAILURES_OF_A_CULPRIT` failures of a single run. If `run` is a run folder, hosts where a start of this
    run failed are also excluded.
    """
    notes = _notes(memory_file(cluster, environ), now or datetime.now(timezone.utc))
    found: dict[str, str] = {}
    blamed: dict[tuple[str, str], set[int]] = {}
    for note in notes:
        attempts = blamed.setdefault((note.host, note.run), set())
        if is_counted := note.kind in _BLAMED:
            attempts.add(note.attempt)
        is_own_start = note.kind == "start" and note.run == run
        if not is_counted or is_own_start or len(attempts) >= FAILURES_OF_A_CULPRIT:
            found.pop(note.host, None)
            found[note.host] = _reason_text(note, len(attempts) if is_counted else 1)
    return dict(reversed(found.items()))


def _reason_text(note: Note, failures: int) -> str:
    often = f", one of {failures} failures that began on this host" if failures > 1 else ""
    run = f"{Path(note.run).name}, attempt {note.attempt}, {note.at.astimezone():%Y-%m-%d %H:%M}"
    return f"{note.reason}{often} ({run})"


def _notes(file: Path, now: datetime) -> list[Note]:
    """Return the recorded failures from the last 24 hours, oldest first."""
    values = read_object(file).get("notes")
    listed = values if isinstance(values, list) else []
    found = (read_record(Note, value) for value in listed if isinstance(value, dict))
    return [note for note in found if note.host and now - note.at < KEEP]
