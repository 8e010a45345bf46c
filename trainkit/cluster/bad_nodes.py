"""Records hosts that failed, per cluster, so that this user's jobs exclude them for 24 hours.

The records are in ``$XDG_STATE_HOME/trainkit/bad_nodes/CLUSTER.json``; delete that file to clear them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Literal

from trainkit.folders import ensure_folder, state_folder
from trainkit.locks import file_lock
from trainkit.run.files import read_json, write_json

KEEP = timedelta(hours=24)
LOCK_TIMEOUT_S = 10.0
"""The note is not worth more: a dead host may hold the lock."""
FAILURES_OF_A_CULPRIT = 2
"""A host is excluded when this many failures of one run began on it."""

Kind = Literal["died", "preflight", "culprit", "start"]
"""`died`: Slurm lost the node. `preflight`: it failed preflight. `culprit`: a run's failure began on it.
`start`: a job ended there before its supervisor began."""


def memory_file(cluster: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The path of the file that records the bad hosts of a cluster."""
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
    """Record that a host failed an attempt of a run; `reason` is a short text for messages.

    Raises OSError if the file cannot be written or stays locked.
    """
    now = now or datetime.now(timezone.utc)
    file = memory_file(cluster, environ)
    ensure_folder(file.parent, 0o700, parents=True)
    # Two jobs must not overwrite each other's notes.
    with file_lock(file.with_suffix(".lock"), LOCK_TIMEOUT_S):
        notes = _notes(file, now)
        notes.append(
            {
                "host": host,
                "kind": kind,
                "reason": reason,
                "run": run,
                "attempt": attempt,
                "time": now.isoformat(timespec="seconds"),
            }
        )
        write_json(file, {"notes": notes})


def excluded(
    cluster: str,
    now: datetime | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    run: str | None = None,
) -> dict[str, str]:
    """The hosts of a cluster to exclude from jobs, each with the reason; the most recent first.

    A host is excluded if it died, failed preflight, or was the culprit of `FAILURES_OF_A_CULPRIT` failures
    of one run, within the last 24 hours; from the jobs of the folder `run` also after one start that failed.
    """
    notes = _notes(memory_file(cluster, environ), now or datetime.now(timezone.utc))
    found: dict[str, str] = {}
    blamed: dict[tuple[str, str], set[int]] = {}
    for note in notes:
        attempts = blamed.setdefault((note["host"], note["run"]), set())
        if is_counted := note["kind"] in ("culprit", "start"):
            attempts.add(note["attempt"])
        is_own_start = note["kind"] == "start" and note["run"] == run
        if not is_counted or is_own_start or len(attempts) >= FAILURES_OF_A_CULPRIT:
            found.pop(note["host"], None)
            found[note["host"]] = _reason_text(note, len(attempts) if is_counted else 1)
    return dict(reversed(found.items()))


def _reason_text(note: Mapping[str, Any], failures: int) -> str:
    often = f", one of {failures} failures that began there" if failures > 1 else ""
    when = datetime.fromisoformat(note["time"]).astimezone()
    run = f"{Path(note['run']).name}, attempt {note['attempt']}, {when:%Y-%m-%d %H:%M}"
    return f"{note['reason']}{often} ({run})"


def _notes(file: Path, now: datetime) -> list[dict[str, Any]]:
    """The notes that have not expired, the oldest first; none if the file is damaged."""
    try:
        found = read_json(file)
    except (OSError, ValueError):
        return []
    notes = found.get("notes") if isinstance(found, dict) else None
    if not isinstance(notes, list):
        return []
    return [note for note in notes if _is_note(note) and now - datetime.fromisoformat(note["time"]) < KEEP]


def _is_note(value: object) -> bool:
    """Whether this is a note that `note_failure` wrote: the file may have been edited or damaged."""
    if not isinstance(value, dict) or not isinstance(value.get("attempt"), int):
        return False
    if not all(isinstance(value.get(key), str) for key in ("host", "kind", "reason", "run", "time")):
        return False
    try:
        return datetime.fromisoformat(value["time"]).tzinfo is not None
    except ValueError:
        return False
