"""Makes folders, also where file systems show changes late, finds and names them, and opens files."""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import BinaryIO

from trainkit.errors import UsageError


def ensure_folder(path: Path, mode: int = 0o777, *, parents: bool = False) -> None:
    """Create a folder unless there is one; missing parents too, with the default mode, if `parents`.

    Raises OSError. On a parallel file system `mkdir` can say that a folder exists that another host has just
    made, while this host still remembers that it is missing: `Path.mkdir(exist_ok=True)` fails then.
    """
    try:
        path.mkdir(mode)
    except FileExistsError:
        if path.is_file():
            raise
    except FileNotFoundError:
        if not parents or path.parent == path:
            raise
        ensure_folder(path.parent, parents=True)
        ensure_folder(path, mode)
    except OSError:
        # A folder that exists on a read-only disk.
        if not path.is_dir():
            raise


_typed_in: Path | None = None
"""The folder in which the command was typed, while it works in another one."""
_is_recorded = False
"""Whether what is said is recorded, and read in any folder."""


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Change to a folder; a `shown_path` is still relative to the one in which the command was typed."""
    global _typed_in
    here, outer = Path.cwd(), _typed_in
    os.chdir(folder)
    _typed_in = outer or here
    try:
        yield
    finally:
        _typed_in = outer
        os.chdir(here)


@contextmanager
def whole_paths() -> Iterator[None]:
    """Within the block, as in the processes of a job, a `shown_path` is the whole path."""
    global _is_recorded
    before, _is_recorded = _is_recorded, True
    try:
        yield
    finally:
        _is_recorded = before


def shown_path(path: str | PurePath) -> str:
    """A path in a message: relative if it is below the folder in which the command was typed."""
    if not _is_recorded:
        with suppress(FileNotFoundError):  # this folder was deleted
            return relative_path(str(path), _typed_in or Path.cwd())
    return str(path)


def relative_path(path: str, cwd: Path) -> str:
    """A path relative to `cwd` if it is below `cwd`, else unchanged; both are valid as RUN."""
    if not Path(path).is_relative_to(cwd) or Path(path) == cwd:
        return path
    below = str(Path(path).relative_to(cwd))
    return f"./{below}" if below.startswith("-") else below  # not an option


def is_full(folder: Path) -> bool:
    """Whether the disk of a folder has no space or no inode left for this user; False if that is unknown."""
    with suppress(OSError):
        disk = os.statvfs(folder)
        return disk.f_bavail == 0 or (disk.f_files > 0 and disk.f_favail == 0)
    return False


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_STATE_HOME/trainkit``; it may not exist yet."""
    return Path(environ.get("XDG_STATE_HOME") or home(environ) / ".local/state") / "trainkit"


def config_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CONFIG_HOME/trainkit``; it may not exist."""
    return Path(environ.get("XDG_CONFIG_HOME") or home(environ) / ".config") / "trainkit"


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """The home of this user; for one that has none, as in a container, a private folder for temporary files.

    Raises PermissionError if that folder is another user's.
    """
    try:
        return Path(environ.get("HOME") or "~").expanduser()
    except RuntimeError:  # neither HOME nor an entry in the password database
        folder = Path(tempfile.gettempdir(), f"trainkit-{os.getuid()}")
    if not make_private(folder):
        raise PermissionError(errno.EPERM, "is not a private folder of this user; set HOME", str(folder))
    return folder


def make_private(folder: Path, others: int = 0o077) -> bool:
    """Create a folder for this user alone; return False if others can write to it or replace it.

    Others can replace a folder below one that they may write to, unless that has the sticky bit as /tmp has.
    A folder that exists may have none of the permissions in `others`. Raises OSError.
    """
    ensure_folder(folder, 0o700)
    found, own = folder.lstat(), (os.getuid(), 0)
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == own[0] and not found.st_mode & others
    above = [parent.stat() for parent in folder.absolute().parents]
    return is_own and all(
        parent.st_uid in own and (not parent.st_mode & 0o022 or parent.st_mode & stat.S_ISVTX)
        for parent in above
    )


INTERPOLATION = re.compile(r"\$\{[^{}]+\}")
NOT_EVALUATED = "trainkit does not evaluate ${…}"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


def typed_path(text: str, cwd: Path) -> Path:
    """A path that a user has typed, relative to `cwd` or with `~`; raises UsageError for what can be none."""
    if url := _URL.match(text):
        hint = "name a path on a disk that the nodes of the job mount, and copy there what is elsewhere"
        if url[1] in ("hf", "https", "http"):
            hint += "; `hf download` fetches models and data sets of the hub"
        raise UsageError(f"{text} is a URL, not a path", hint=hint)
    if INTERPOLATION.search(text):
        raise UsageError(f"{text} is not a path: {NOT_EVALUATED}", hint="write the path itself")
    if "\0" in text:
        raise UsageError(f"{text!r} has a NUL character, which no path has", hint="check the path")
    try:
        return cwd / Path(text).expanduser()
    except RuntimeError:
        user = text[1:].partition("/")[0]
        whose = f"there is no user {user} on this machine" if user else "this user has no home here"
        raise UsageError(f"{text}: {whose}", hint="write the whole path instead of ~") from None


def user_name() -> str:
    """The name of this user, or the number of one without a name."""
    import getpass

    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())


def user_groups() -> tuple[str, ...] | None:
    """The names of the groups of this user; None for root, whom no list of groups restricts."""
    import grp

    if os.getuid() == 0:
        return None
    found = []
    for number in dict.fromkeys((os.getgid(), *os.getgroups())):
        with suppress(KeyError):  # a group without a name can be in no list
            found.append(grp.getgrgid(number).gr_name)
    return tuple(found)


PACKAGE = Path(__file__).resolve().parent
PROJECT_CONFIG = "config.yaml"
FIRST_RUN, FIRST_RUN_NAME = "first-run.yaml", "first-run"
"""The run config that `trainkit init` writes, and the name of its run."""
QUICKSTART = "quickstart"
NOT_RUNS = ("clusters", "profiles")
"""Folders of shipped files that are layered over a run config and do not describe a run themselves."""


def shipped_configs() -> Path:
    """The folder of shipped configs: inside the package when installed, next to it in a checkout."""
    return _shipped("configs")


def shipped_templates() -> Path:
    """The folder of shipped templates: inside the package when installed, next to it in a checkout."""
    return _shipped("templates")


def _shipped(name: str) -> Path:
    installed = PACKAGE / "_shipped" / name
    return installed if installed.is_dir() else PACKAGE.parent / name


def default_config(cwd: Path) -> tuple[str, str]:
    """The default config, a file in `cwd` or else the quickstart, and a text that says where it is from."""
    if (cwd / PROJECT_CONFIG).is_file():
        return PROJECT_CONFIG, "in this folder"
    if (cwd / FIRST_RUN).is_file():
        return FIRST_RUN, "written by `trainkit init`"
    return QUICKSTART, "shipped"


def find_shipped_config(name: str) -> Path | None:
    """The file of a shipped config such as ``quickstart``, ``models/8b.yaml`` or ``configs/models/8b.yaml``.

    None if no such config ships.
    """
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts or path.suffix not in ("", ".yaml"):
        return None
    if path.parts[:1] == ("configs",):
        path = path.relative_to("configs")
    found = shipped_configs() / path.with_suffix(".yaml") if path.name else None
    return found if found is not None and found.is_file() else None


def shipped_config_names() -> list[str]:
    """The names of the shipped run configs, such as ``quickstart`` and ``models/8b``."""
    folder = shipped_configs()
    others = [
        file
        for file in sorted(folder.glob("*/*.yaml"))
        if file.parent.name not in NOT_RUNS and "." not in file.stem  # those are profiles of one config
    ]
    files = [folder / f"{QUICKSTART}.yaml", *others]
    return [str(file.relative_to(folder).with_suffix("")) for file in files]


def open_regular(path: str | Path, flags: int = 0) -> BinaryIO:
    """Open a regular file to read it; raises OSError for a pipe or device, which may never end.

    `flags` are added to those of ``os.open``.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    raise OSError(errno.EINVAL, "it is no regular file", str(path))
