"""Whose files and folders decide what this user executes: the user's own, root's, and those of a project."""

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
"""The folders that ``--trust`` accepts, for the processes that a command starts; no job inherits it."""


def trust(folder: Path) -> None:
    """Accept a folder and all that is in it, whoever could have written it, here and in child processes."""
    os.environ[TRUSTED_VARIABLE] = json.dumps([*_trusted(), os.path.realpath(folder)])


def _trusted() -> list[str]:
    found: list[str] = json.loads(os.environ.get(TRUSTED_VARIABLE, "[]"))
    return found


def is_trusted(path: Path) -> bool:
    """Whether `trust` has accepted a path, or a folder around it."""
    # A link in the folder is in it, wherever it leads.
    places = (Path(os.path.realpath(path)), Path(os.path.realpath(path.parent), path.name))
    return any(place.is_relative_to(folder) for folder in _trusted() for place in places)


def is_own(found: os.stat_result) -> bool:
    """Whether this user or root owns a file or folder."""
    return found.st_uid in (os.geteuid(), 0)


def is_shared(found: os.stat_result) -> bool:
    """Whether a group can write there to which this user does not belong, and which root has not chosen.

    The members of a project trust each other: its folders are writable to their group, and a folder of root's
    is so because an administrator has made it for one.
    """
    groups = (os.getegid(), *os.getgroups())
    return bool(found.st_mode & stat.S_IWGRP) and found.st_uid != 0 and found.st_gid not in groups


def is_project(found: os.stat_result) -> bool:
    """Whether another user's folder is that of a project: a group of this user's can write there."""
    return bool(found.st_mode & stat.S_IWGRP) and found.st_gid in (os.getegid(), *os.getgroups())


@cache
def unknown_owner() -> int | None:
    """The number that stands for every user whom this namespace does not know; None where it knows all.

    In a container without root's rights that is the owner of ``/`` too.
    """
    with suppress(OSError, ValueError):
        lines = Path("/proc/self/uid_map").read_text().splitlines()
        if sum(int(line.split()[2]) for line in lines) < 2**32 - 1:
            return int(Path("/proc/sys/kernel/overflowuid").read_text())
    return None


def open_trusted(path: str | Path) -> BinaryIO:
    """Open a file whose content decides what is executed; the opened file is judged, not its name.

    Raises UsageError if another user could have written it, and OSError if it is no regular file.
    """
    accepted = is_trusted(Path(path))
    try:
        stream = open_regular(path, 0 if accepted else os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        hint = "put the file itself there, if you know what is in it"
        raise UsageError(f"{shown_path(path)} is a link, which can lead to any file", hint=hint) from None
    if not accepted:
        try:
            require_own(path, os.fstat(stream.fileno()))
        except UsageError:
            stream.close()
            raise
    return stream


def read_trusted(path: str | Path) -> str:
    """The text of a file that `open_trusted` opens; raises likewise."""
    with open_trusted(path) as stream:
        return stream.read().decode()


def require_own(path: str | Path, found: os.stat_result) -> None:
    """Raise UsageError if another user could have written a file, or a folder that says what is executed."""
    who = "every user" if found.st_mode & stat.S_IWOTH else None
    who = who or (f"group {found.st_gid}, which is none of yours," if is_shared(found) else None)
    # Only its owner can change a link.
    if is_own(found) and (who is None or stat.S_ISLNK(found.st_mode)):
        return
    shown = shown_path(path)
    word = quote(shown)
    if not is_own(found):
        raise UsageError(
            f"{shown} belongs to user {found.st_uid}, who could change what the run executes",
            hint=f"if you know what is in it, put a copy of your own in its place: `cp -r {word} COPY`",
        )
    raise UsageError(
        f"{who} can write to {shown}, and could change what the run executes",
        hint=f"if you know what is in it, `chmod go-w {word}`",
    )
