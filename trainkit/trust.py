"""Decides which files may be executed: only files of this user, of root, or of the user's project."""

from __future__ import annotations

import errno
import json
import os
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path
from shlex import quote
from typing import BinaryIO

from trainkit.errors import UsageError
from trainkit.folders import open_regular, shown_path

TRUSTED_VARIABLE = "TRAINKIT_JOB_TRUSTED"
"""Environment variable that passes folders accepted with ``--trust`` to child processes, but not to jobs."""


def trust(folder: Path) -> None:
    """Trust a folder and its content, regardless of the owner, in this process and its child processes."""
    os.environ[TRUSTED_VARIABLE] = json.dumps([*_trusted(), os.path.realpath(folder)])


def _trusted() -> list[str]:
    found: list[str] = json.loads(os.environ.get(TRUSTED_VARIABLE, "[]"))
    return found


def is_trusted(path: Path) -> bool:
    """Return whether a path, or a folder above it, was accepted with `trust`."""
    # A symlink in a trusted folder is trusted, regardless of its target.
    places = (Path(os.path.realpath(path)), Path(os.path.realpath(path.parent), path.name))
    return any(place.is_relative_to(folder) for folder in _trusted() for place in places)


def is_own(found: os.stat_result) -> bool:
    """Return whether this user or root owns a file or folder."""
    return found.st_uid in (os.geteuid(), 0)


def is_shared(found: os.stat_result) -> bool:
    """Return whether a foreign group can write to a file or folder, unless root owns it.

    A group is foreign if this user is not a member. Members of a project trust each other, so project folders
    may be writable by their group. A folder owned by root is not considered shared, because an administrator
    created it for a group.
    """
    groups = (os.getegid(), *os.getgroups())
    return bool(found.st_mode & stat.S_IWGRP) and found.st_uid != 0 and found.st_gid not in groups


def is_project(found: os.stat_result) -> bool:
    """Return whether one of this user's groups can write to a folder that another user owns."""
    return bool(found.st_mode & stat.S_IWGRP) and found.st_gid in (os.getegid(), *os.getgroups())


@cache
def unknown_owner() -> int | None:
    """Return the uid that represents all users outside this user namespace, or None if all users are known.

    In a rootless container, even ``/`` belongs to this uid.
    """
    with suppress(OSError, ValueError):
        lines = Path("/proc/self/uid_map").read_text().splitlines()
        if sum(int(line.split()[2]) for line in lines) < 2**32 - 1:
            return int(Path("/proc/sys/kernel/overflowuid").read_text())
    return None


def open_trusted(path: str | Path) -> BinaryIO:
    """Open a file whose content determines which code is executed.

    The opened file is checked, not its name, because the name could refer to another file later.
    Raises UsageError if another user could have written the file, and OSError if it is not a regular file.
    """
    accepted = is_trusted(Path(path))
    try:
        stream = open_regular(path, 0 if accepted else os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        hint = "if you trust its content, replace the link with a copy of the file"
        raise UsageError(f"{shown_path(path)} is a symlink, which can point to any file", hint=hint) from None
    if not accepted:
        try:
            require_own(path, os.fstat(stream.fileno()))
        except UsageError:
            stream.close()
            raise
    return stream


def read_trusted(path: str | Path) -> str:
    """Return the text of a file; raises the same errors as `open_trusted`."""
    with open_trusted(path) as stream:
        return stream.read().decode()


def require_own(path: str | Path, found: os.stat_result) -> None:
    """Raise UsageError if another user could have written a file or folder that affects executed code."""
    who = "every user" if found.st_mode & stat.S_IWOTH else None
    who = who or (f"group {found.st_gid}, which is none of yours," if is_shared(found) else None)
    # Only the owner of a symlink can change it, regardless of its mode.
    if is_own(found) and (who is None or stat.S_ISLNK(found.st_mode)):
        return
    shown = shown_path(path)
    word = quote(shown)
    if not is_own(found):
        raise UsageError(
            f"{shown} belongs to user {found.st_uid}, who could change what the run executes",
            hint=f"if you trust its content, replace it with your own copy of it: `cp -r {word} COPY`",
        )
    raise UsageError(
        f"{who} can write to {shown} and could change what the run executes",
        hint=f"if you trust its content, run `chmod go-w {word}`",
    )
