"""Whose folder a run is in: its files are executed as the user who starts, resumes, repeats or exports it."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from shlex import quote

from trainkit.errors import UsageError
from trainkit.folders import shown_path


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
