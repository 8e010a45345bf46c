"""Reject run folders where another user could plant files that a start or resume would execute."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from trainkit.errors import UsageError
from trainkit.folders import shown_path
from trainkit.run.rundir import RUNS_FOLDER, RunDir, next_name
from trainkit.trust import is_own, is_project, is_shared, is_trusted, require_own, unknown_owner

DECIDING = (
    "job.json",
    "sweep.json",
    "step.json",
    "submit.sbatch",
    "stdin",
    "attempts",
    "code",
    "work",
    "submitit",
    "calls",
)
"""Files and folders that determine what a run or group executes; they are checked before the run starts. All
other files are checked when they are opened."""
MAX_LINKS = 40
"""Maximum number of symlinks that Linux follows when it resolves a path."""


def refuse_foreign(folder: Path, hint: str) -> None:
    """Raise UsageError if another user could replace files in a run folder.

    The check covers every folder on the path, including symlink targets, and the files in `DECIDING`, which
    another user could have planted while the folder was writable for everybody. The folder need not exist.
    `hint` is a suggestion for the user, shown in the error. A folder accepted by `trust` is not checked.
    """
    if is_trusted(folder):
        return
    for path in _on_the_way(folder.absolute()):
        found = path.lstat()
        above = Path(path, os.pardir) if path.name == os.pardir else path.parent
        is_run = folder.is_dir() and os.path.samestat(found, folder.stat())
        what = "the run" if is_run else shown_path(folder)
        _refuse_writers(path, found, above.stat(), hint, what, is_run=is_run)
    for name in DECIDING:
        if os.path.lexists(folder / name):
            require_own(folder / name, (folder / name).lstat())


def _on_the_way(folder: Path) -> Iterator[Path]:
    """Yield the existing folders and symlinks that a path passes through, from the path up to the root.

    Raises OSError if the symlinks form a cycle.
    """
    waiting, seen = [folder], set[Path]()
    for path in waiting:
        if len(waiting) > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
        for place in (path, *path.parents):
            if place not in seen and os.path.lexists(place):
                seen.add(place)
                yield place
                if place.is_symlink():
                    waiting.append(place.parent / place.readlink())


def _refuse_writers(
    path: Path, found: os.stat_result, above: os.stat_result, hint: str, what: str, *, is_run: bool
) -> None:
    """Raise UsageError if another user could replace `what` by changing the folder or symlink `path`."""
    shown, is_link = shown_path(path), stat.S_ISLNK(found.st_mode)
    done = "could change what the run executes" if is_run else f"could replace {what}"
    if not is_own(found) and (is_run or found.st_uid != unknown_owner()):
        # A symlink cannot be modified in place, and a project folder belongs to its group. Another user's
        # symlink or project folder is harmless unless its parent folder is writable by everybody, as /tmp is.
        is_harmless = (is_link or is_project(found)) and not above.st_mode & stat.S_IWOTH
        if is_run or not is_harmless:
            raise UsageError(f"{shown} belongs to user {found.st_uid}, who could replace {what}", hint=hint)
    # In a folder with the sticky bit, users can rename or delete only their own files.
    if is_link or (found.st_mode & stat.S_ISVTX and not is_run):
        return
    if found.st_mode & stat.S_IWOTH:
        also = "" if is_run else " or `chmod +t`"
        raise UsageError(
            f"every user can write to {shown}, and {done}",
            hint=f"`chmod o-w {quote(shown)}`{also}, or {hint}",
        )
    if is_own(found) and is_shared(found):
        raise UsageError(
            f"group {found.st_gid}, which is none of yours, can write to {shown}, and {done}",
            hint=f"`chmod g-w {quote(shown)}`, or {hint}",
        )


def cannot_create(place: Path, reason: str, option: str) -> UsageError:
    """Return the error for a run folder that cannot be created; `option` is the option that sets the path."""
    return UsageError(
        f"cannot create a run folder at {place}: {reason}",
        hint=f"choose a writable folder with {option}, and check that neither disk nor quota is full",
    )


def refuse_place(name: str, run_dir: Path | None, option: str = "--run-dir") -> None:
    """Raise UsageError if the folder of a new run or group cannot be created; writes nothing.

    Creation is refused if `run_dir` is not empty, the folder is not writable, another user could replace the
    folder, or the name of the run folder or the current folder is not UTF-8.
    """
    for path in map(os.fsencode, (Path.cwd(), run_dir or "")):
        shown = path.decode(errors="backslashreplace")
        if shown.encode() != path:
            message = f"the name of {shown} is not UTF-8"
            raise UsageError(
                message, hint="rename it, because the files of a run contain its name and must be UTF-8"
            )
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
    """Raise UsageError if the requested run folder is a file, or a folder that is not empty."""
    from trainkit.run.group import RunGroup  # imported here because the import is slow and rarely needed

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
