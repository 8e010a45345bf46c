"""Lock files of compile caches that a silent rank may wait for.

torch locks the build of an extension by the existence of a file, which stays when its holder is killed: a
process that needs the extension then waits forever, without output. Triton and filelock use flock.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from trainkit.run.files import as_utc
from trainkit.run.process import PROC

EXTENSIONS = (
    ("TORCH_EXTENSIONS_DIR", ""),
    ("XDG_CACHE_HOME", "torch_extensions"),
    ("HOME", ".cache/torch_extensions"),
)
TRITON = (("TRITON_CACHE_DIR", ""), ("TRITON_HOME", ".triton/cache"), ("HOME", ".triton/cache"))
"""The variables that set the folder of a cache, in their order, and the folder below their value."""


@dataclass(frozen=True)
class LockFile:
    """A lock file that a rank waits for, or may wait for."""

    path: str
    time: str
    """When the file was last changed: torch's is empty, so when it was created."""
    is_certain: bool
    """Whether the stack of the rank shows that it waits for this file."""
    holder: str
    """The process on the host of the rank that has it open, as ``process 7 (python)``; empty if none has.

    It can be the rank itself, if its stack does not show that it waits.
    """


def find_lock_files(pid: int, named: Iterable[str]) -> list[LockFile]:
    """The lock files that a process may wait for; `named` are those in the frames of its stack."""
    certain = [path for path in map(Path, dict.fromkeys(named)) if path.is_file()]
    environ = _environ(pid)
    held = _held_files()
    others = [
        *_files(_folder(EXTENSIONS, environ), "*/lock", "*/*/lock"),
        *(path for path in _files(_folder(TRITON, environ), "*/lock") if _identity(path) in held),
    ]
    return [
        found
        for path, is_certain in [*((path, True) for path in certain), *((path, False) for path in others)]
        if (is_certain or path not in certain) and (found := _lock_file(path, pid, is_certain)) is not None
    ]


def _lock_file(path: Path, pid: int, is_certain: bool) -> LockFile | None:
    try:
        changed = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
    except OSError:
        return None  # released meanwhile
    return LockFile(
        str(path),
        as_utc(changed, "seconds"),
        is_certain,
        _holder(path, other_than=pid if is_certain else None),
    )


def _environ(pid: int) -> dict[str, str]:
    try:
        lines = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return {}  # it has ended
    pairs = (os.fsdecode(line).partition("=") for line in lines)
    return {name: value for name, _, value in pairs if value}


def _folder(variables: Iterable[tuple[str, str]], environ: Mapping[str, str]) -> Path | None:
    return next((Path(environ[name], below) for name, below in variables if name in environ), None)


def _files(folder: Path | None, *patterns: str) -> Iterator[Path]:
    if folder is not None:
        for pattern in patterns:
            yield from sorted(folder.glob(pattern))


def _identity(path: Path) -> str:
    """A file as ``/proc/locks`` names it; empty if it is gone."""
    try:
        found = path.stat()
    except OSError:
        return ""
    return f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"


def _held_files() -> set[str]:
    """The files with a lock that a process on this host holds or waits for."""
    try:
        lines = (PROC / "locks").read_text().splitlines()
    except OSError:
        return set()
    return {word for line in lines for word in line.split() if word.count(":") == 2}


def _holder(path: Path, other_than: int | None) -> str:
    """A process of this host that has a file open; of other users' processes nothing is known."""
    real = os.path.realpath(path)
    for process in PROC.iterdir():
        if not process.name.isdigit() or int(process.name) == other_than:
            continue
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if any(_target(link) == real for link in (process / "fd").iterdir()):
                name = (process / "comm").read_text().strip()
                return f"process {process.name} ({name})"
    return ""


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""  # closed meanwhile
