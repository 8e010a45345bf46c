"""Where a run may be, and who else could write there: who starts or resumes it executes its files."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from shlex import quote

from trainkit.errors import UsageError
from trainkit.folders import shown_path
from trainkit.run.rundir import RUNS_FOLDER, RunDir, next_name


def refuse_foreign(folder: Path, hint: str) -> None:
    """Raise UsageError where another user could replace files of a run in this folder, which may be missing.

    A folder that its group may write to is accepted: the members of a project trust each other. `hint` says
    what else can be done.
    """
    place, own = Path(os.path.realpath(folder)), (os.geteuid(), 0)
    found = [(path, path.stat()) for path in (place, *place.parents) if path.is_dir()]
    parent = next(path for path, _ in found if path != place)
    modes = [status.st_mode for _, status in found]
    for (path, status), mode_above in zip(found, [*modes[1:], 0], strict=True):
        is_run, is_foreign = path == place, status.st_uid not in own
        shown, what = shown_path(path), "the run" if is_run else shown_path(folder)
        is_open = bool(status.st_mode & stat.S_IWOTH) and (is_run or not status.st_mode & stat.S_ISVTX)
        # Next to the run, only its project; further up, nobody who could have made a folder there.
        is_project = bool(status.st_mode & stat.S_IWGRP) if path == parent else not is_run
        if is_foreign and (not is_project or mode_above & stat.S_IWOTH):
            raise UsageError(f"{shown} belongs to user {status.st_uid}, who could replace {what}", hint=hint)
        if is_open:
            done = "could change what the run executes" if is_run else f"could replace {what}"
            also = "" if is_run else " or `chmod +t`"
            raise UsageError(
                f"every user can write to {shown}, and {done}",
                hint=f"`chmod o-w {quote(shown)}`{also}, or {hint}",
            )


def cannot_create(place: Path, reason: str, option: str) -> UsageError:
    """The error for a run folder that cannot be created; `option` names another place."""
    return UsageError(
        f"cannot create a run folder at {place}: {reason}",
        hint=f"choose a writable folder with {option}, and check that disk and quota are not full",
    )


def refuse_place(name: str, run_dir: Path | None, option: str = "--run-dir") -> None:
    """Raise UsageError where no folder can be created for a run or a group; writes nothing.

    That is where `run_dir` is not empty, where the folder cannot be written or another user could replace it,
    and where its name or that of the current folder is not UTF-8.
    """
    for path in map(os.fsencode, (Path.cwd(), run_dir or "")):
        shown = path.decode(errors="backslashreplace")
        if shown.encode() != path:
            message = f"the name of {shown} is not UTF-8"
            raise UsageError(message, hint="rename it: the files of a run name it, and are UTF-8")
    place = run_dir or Path(RUNS_FOLDER)
    try:
        if run_dir is not None:
            _refuse_used(run_dir, option)
        whose = f"choose a folder with {option} that only you or your project group can write to"
        refuse_foreign(run_dir or place / next_name(name, None), whose)
        found = next(path for path in (place, *place.absolute().parents) if os.path.lexists(path))
        if not found.is_dir():
            raise cannot_create(place, f"{shown_path(found)} is not a folder", option)
        if not os.access(found, os.W_OK | os.X_OK):
            raise cannot_create(place, f"{shown_path(found)} cannot be written", option)
    except OSError as error:
        raise cannot_create(place, error.strerror or str(error), option) from error


def _refuse_used(folder: Path, option: str) -> None:
    """Raise UsageError where the requested folder is a file or is not empty."""
    from trainkit.run.group import RunGroup  # slow to import, and seldom needed

    shown = shown_path(folder)
    if RunDir(folder).exists():
        raise UsageError(
            f"{shown} already contains a run", hint=f"`trainkit resume {quote(shown)}` resumes it"
        )
    if RunGroup(folder).exists():
        raise UsageError(
            f"{shown} already contains a group of runs",
            hint=f"`trainkit status {quote(shown)}` shows it",
        )
    if folder.exists():
        if not folder.is_dir():
            raise UsageError(f"{shown} is a file", hint=f"choose a folder with {option}")
        if any(folder.iterdir()):
            raise UsageError(f"{shown} is not empty", hint=f"choose a new or empty folder with {option}")
