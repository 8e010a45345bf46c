"""Finds runs: RUN on a command line is a job id, a run name, a run folder or `last`.

Every start of a run appends a line to ``$XDG_STATE_HOME/trainkit/runs.jsonl``, so a run is found from
any directory; runs below ./runs are found without it.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from trainkit.errors import UsageError
from trainkit.job.record import read_job
from trainkit.rundir import RunDir, append_jsonl, read_jsonl, utc_now
from trainkit.submit.create import RUNS_FOLDER


@dataclass(frozen=True)
class KnownRun:
    """A run that was started by this user and whose folder is still there."""

    run: RunDir
    name: str
    time: str
    """Its newest start, ISO-8601 UTC."""


def index_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Where started runs are written down."""
    state = environ.get("XDG_STATE_HOME") or str(
        Path(environ.get("HOME") or "~").expanduser() / ".local/state"
    )
    return Path(state) / "trainkit" / "runs.jsonl"


def register(run: RunDir, name: str) -> None:
    """Write down that a run was started; a home that cannot be written is said, and is no reason to stop."""
    path = index_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        append_jsonl(path, {"time": utc_now(), "name": name, "path": str(run.path)})
    except OSError as error:
        print(
            f"note: {path} cannot be written ({error.strerror}): name the run by its folder", file=sys.stderr
        )


def known_runs(cwd: Path | None = None) -> list[KnownRun]:
    """Every run that is known and exists, the one started last first."""
    found: dict[str, KnownRun] = {}
    for folder in sorted(((cwd or Path.cwd()) / RUNS_FOLDER).glob("*/")):
        run = RunDir(folder)
        if run.exists():
            started = datetime.fromtimestamp(run.config_file.stat().st_mtime, timezone.utc)
            found[os.path.realpath(folder)] = KnownRun(run, str(read_job(run)["name"]), started.isoformat())
    for record in read_jsonl(index_file()):
        path, name, time = record.get("path"), record.get("name"), record.get("time")
        if isinstance(path, str) and isinstance(name, str) and isinstance(time, str):
            run = RunDir(path)
            if run.exists():
                found[os.path.realpath(path)] = KnownRun(run, name, time)
    return sorted(found.values(), key=lambda known: known.time, reverse=True)


def find_run(text: str) -> RunDir:
    """The run that RUN means.

    Raises UsageError when there is none, with the closest name.
    """
    folder = RunDir(text)
    if folder.exists():
        return folder
    if os.sep in text:
        raise UsageError(f"{text} does not hold a run", hint="`trainkit status` lists the runs")
    known = known_runs()
    if text == "last":
        matches = known[:1]
    elif text.startswith("local-"):
        matches = [item for item in known if _has_job(item.run, text)]
    else:
        matches = [item for item in known if item.run.name == text] or [i for i in known if i.name == text]
    if not matches:
        raise UsageError(f"there is no run {text!r}", hint=_closest(text, known))
    if len(matches) > 1:
        others = ", ".join(str(item.run.path) for item in matches[1:])
        print(f"note: {text} is {matches[0].run.path}, the newest; also so called: {others}", file=sys.stderr)
    return matches[0].run


def _has_job(run: RunDir, job_id: str) -> bool:
    return any(entry.get("job_id") == job_id for entry in read_job(run)["attempts"])


def _closest(text: str, known: Sequence[KnownRun]) -> str:
    if not known:
        return "no run has been started yet: `trainkit submit configs/quickstart.yaml`"
    names = ["last", *(item.name for item in known), *(item.run.name for item in known)]
    close = difflib.get_close_matches(text, names, n=1)
    return f"did you mean {close[0]!r}?" if close else "`trainkit status` lists the runs"
