"""Checks the place of a run folder: whether its locks work across hosts, and who else may write there."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from shlex import quote

from trainkit.errors import UsageError
from trainkit.locks import NEEDS_FLOCK, unsupported

MOUNTINFO = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")
_LOCAL_LOCKS = {
    "lustre": ("localflock",),
    "nfs": ("nolock", "local_lock=flock", "local_lock=all"),
    "nfs4": ("nolock", "local_lock=flock", "local_lock=all"),
}
"""File system -> mount options with which a flock is seen only by its own host."""


def require_locks(folder: Path) -> None:
    """Raise UsageError when the file system of a folder, which may not exist yet, has no file locks."""
    place = Path(os.path.realpath(folder))
    reason = unsupported(next(path for path in (place, *place.parents) if path.is_dir()))
    if reason is not None:
        raise UsageError(
            f"files in {folder} cannot be locked: {reason}",
            hint=f"{NEEDS_FLOCK}; `submit --run-dir` chooses another folder",
        )


def local_locks(folder: Path, mountinfo: Path = MOUNTINFO) -> str | None:
    """Why locks in a folder, which may not exist yet, would be local to each host; None if they are not.

    Says nothing where the mounts cannot be read.
    """
    try:
        lines = mountinfo.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    found = None
    place = Path(os.path.realpath(folder))
    for line in lines:
        mount, _, file_system = line.partition(" - ")
        fields, kind = mount.split(" "), file_system.split(" ")
        if len(fields) < 6 or len(kind) < 3:
            continue
        point = Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4]))
        # The last of several mounts at one place is the visible one.
        if place.is_relative_to(point) and (found is None or len(point.parts) >= len(found[0].parts)):
            found = point, kind[0], {*fields[5].split(","), *kind[2].split(",")}
    if found is None:
        return None
    point, name, options = found
    option = next((option for option in _LOCAL_LOCKS.get(name, ()) if option in options), None)
    if option is None:
        return None
    return (
        f"{point} is mounted with {option} ({name}): locks in the run folder work only within one host, so "
        "commands and jobs on different hosts can disturb each other there; do not control this run from two "
        "hosts at once, or choose another file system with --run-dir"
    )


def refuse_shared(folder: Path, option: str) -> None:
    """Raise UsageError when other users could replace files of a run in this folder, which may not exist yet.

    They are executed as the user who starts the run. A folder that its group may write to is accepted: the
    members of a project trust each other. `option` is the command-line option of the folder.
    """
    place = Path(os.path.realpath(folder))
    hint = f"choose a folder with {option} that only you or your project group can write to"
    if place.is_dir():
        found = place.stat()
        if found.st_uid not in (os.geteuid(), 0):
            raise UsageError(
                f"{folder} belongs to {_user(found.st_uid)}, who could replace the run", hint=hint
            )
        if found.st_mode & stat.S_IWOTH:
            raise UsageError(
                f"every user can write to {folder}, and could change what the run executes",
                hint=f"`chmod o-w {quote(str(folder))}`, or {hint}",
            )
    parent = next(path for path in place.parents if path.is_dir())
    mode = parent.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise UsageError(
            f"every user can write to {parent}, and could replace {folder}",
            hint=f"`chmod o-w {quote(str(parent))}` or `chmod +t`, or {hint}",
        )


def _user(uid: int) -> str:
    # Slow with a directory service, and needed only here.
    from pwd import getpwuid

    try:
        return getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
