"""Hosts that failed: remembered by cluster for a day, so that the next jobs of this user leave them out.

``$XDG_STATE_HOME/trainkit/bad_nodes/CLUSTER.json`` holds what was noted of them; who removes it forgets them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Literal

from trainkit.rundir import file_lock, read_json, state_folder, write_json

KEEP = timedelta(hours=24)
FAILURES_OF_A_CULPRIT = 2
"""So many failures of one run that began on a host are no bad luck."""

Kind = Literal["died", "preflight", "culprit"]
"""`died`: Slurm lost it. `preflight`: it failed a check. `culprit`: a run's failure began there."""


def memory_file(cluster: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Where the bad hosts of a cluster are remembered."""
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
    """Write down that a host failed an attempt of a run; `reason` is a few words for a person.

    Raises OSError when the home folder cannot be written.
    """
    now = now or datetime.now(timezone.utc)
    file = memory_file(cluster, environ)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Locked, so that two jobs do not overwrite each other's notes.
    with file_lock(file.with_suffix(".lock")):
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
    cluster: str, now: datetime | None = None, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The hosts of a cluster that jobs should leave out now, with the reason, the newest first.

    One is left out when it died, failed preflight, or was the culprit of two failures of a run.
    """
    notes = _notes(memory_file(cluster, environ), now or datetime.now(timezone.utc))
    found: dict[str, str] = {}
    blamed: dict[tuple[str, str], set[int]] = {}
    for note in notes:
        attempts = blamed.setdefault((note["host"], note["run"]), set())
        if note["kind"] == "culprit":
            attempts.add(note["attempt"])
        if note["kind"] != "culprit" or len(attempts) >= FAILURES_OF_A_CULPRIT:
            found.pop(note["host"], None)
            found[note["host"]] = _in_words(note, len(attempts))
    return dict(reversed(found.items()))


def _in_words(note: Mapping[str, Any], failures: int) -> str:
    often = f", one of {failures} failures that began there" if note["kind"] == "culprit" else ""
    when = datetime.fromisoformat(note["time"]).astimezone()
    run = f"{Path(note['run']).name}, attempt {note['attempt']}, {when:%Y-%m-%d %H:%M}"
    return f"{note['reason']}{often} ({run})"


def _notes(file: Path, now: datetime) -> list[dict[str, Any]]:
    """What was noted and is not over yet, oldest first; a file that was damaged says nothing."""
    try:
        found = read_json(file)
    except (OSError, ValueError):
        return []
    notes = found.get("notes") if isinstance(found, dict) else None
    if not isinstance(notes, list):
        return []
    return [note for note in notes if _is_note(note) and now - datetime.fromisoformat(note["time"]) < KEEP]


def _is_note(value: object) -> bool:
    """Whether this is a note as `note_failure` writes it; by hand or by a bad disk it can be anything."""
    if not isinstance(value, dict) or not isinstance(value.get("attempt"), int):
        return False
    if not all(isinstance(value.get(key), str) for key in ("host", "kind", "reason", "run", "time")):
        return False
    try:
        return datetime.fromisoformat(value["time"]).tzinfo is not None
    except ValueError:
        return False
