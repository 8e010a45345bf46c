"""Creates, finds and names folders, even if a file system shows changes late; opens regular files."""

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
    """Create a folder unless it exists.

    If `parents` is set, also creates missing parents with the default mode. Raises OSError if the folder
    cannot be created. On a parallel file system, if another host has just created the folder, `mkdir` can
    fail with FileExistsError while this host still caches that the folder does not exist. If another host
    creates the folder at the same time, `Path.mkdir(exist_ok=True)` can raise an error.
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
        # On a read-only disk, `mkdir` fails even if the folder exists.
        if not path.is_dir():
            raise


_typed_in: Path | None = None
"""The folder where the user typed the command, set while the working directory is a different folder."""
_is_recorded = False
"""True while messages are recorded, because they may later be read in any working directory."""


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Change the working directory.

    `shown_path` still returns paths relative to the folder where the user typed the command.
    """
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
    """Make `shown_path` return absolute paths within the block, as in the processes of a job."""
    global _is_recorded
    before, _is_recorded = _is_recorded, True
    try:
        yield
    finally:
        _is_recorded = before


def shown_path(path: str | PurePath) -> str:
    """Return a path for a message, relative if it is below the folder where the user typed the command."""
    if not _is_recorded:
        with suppress(FileNotFoundError):  # the working directory may have been deleted
            return relative_path(str(path), _typed_in or Path.cwd())
    return str(path)


def relative_path(path: str, cwd: Path) -> str:
    """Return `path` relative to `cwd` if it is below `cwd`, else unchanged.

    Commands accept both forms as RUN.
    """
    if not Path(path).is_relative_to(cwd) or Path(path) == cwd:
        return path
    below = str(Path(path).relative_to(cwd))
    return (
        f"./{below}" if below.startswith("-") else below
    )  # keep a path with a leading dash from being parsed as an option


def is_full(folder: Path) -> bool:
    """Return whether a folder's disk has no space or inodes left for this user; False if unknown."""
    with suppress(OSError):
        disk = os.statvfs(folder)
        return disk.f_bavail == 0 or (disk.f_files > 0 and disk.f_favail == 0)
    return False


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return ``$XDG_STATE_HOME/trainkit``, which may not exist yet."""
    return _base_folder(environ, "XDG_STATE_HOME", ".local/state") / "trainkit"


def config_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return ``$XDG_CONFIG_HOME/trainkit``, which may not exist."""
    return _base_folder(environ, "XDG_CONFIG_HOME", ".config") / "trainkit"


def user_cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return ``$XDG_CACHE_HOME/trainkit``, which may not exist; its content can be deleted."""
    return _base_folder(environ, "XDG_CACHE_HOME", ".cache") / "trainkit"


def _base_folder(environ: Mapping[str, str], variable: str, default: str) -> Path:
    """Return a base folder. Relative paths are ignored, as the XDG Base Directory Specification requires."""
    folder = Path(environ.get(variable, ""))
    return folder if folder.is_absolute() else home(environ) / default


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return this user's home directory, or a private temporary folder if there is none, as in a container.

    Raises PermissionError if the temporary folder belongs to another user.
    """
    try:
        return Path(environ.get("HOME") or "~").expanduser()
    except RuntimeError:  # neither HOME nor an entry in the password database exists
        folder = Path(tempfile.gettempdir(), f"trainkit-{os.getuid()}")
    if not make_private(folder):
        raise PermissionError(
            errno.EPERM,
            "is not a private folder of this user; set HOME to your home directory",
            str(folder),
        )
    return folder


def make_private(folder: Path, others: int = 0o077) -> bool:
    """Create a private folder for this user; return False if other users can write to it or replace it.

    Other users can replace a folder if they can write to its parent, unless the parent has the sticky bit,
    like /tmp. `others` is the mask of permissions that an existing folder must not grant. Raises OSError if
    the folder cannot be created.
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


def typed_path(text: str, cwd: Path, *, is_literal: bool = False) -> Path:
    """Resolve a typed path that is relative to `cwd` or begins with `~`; raise UsageError if it is invalid.

    A path that contains ``${…}`` is invalid, because trainkit does not interpolate paths. With `is_literal`,
    as for a path expanded by a shell, a folder may be named ``${HOME}``, and only resolvers such as
    ``${hydra:runtime.cwd}`` are invalid.
    """
    if url := _URL.match(text):
        hint = "copy the files to a disk that the job's nodes mount, and give the path there"
        if url[1] in ("hf", "https", "http"):
            hint += "; `hf download` fetches models and data sets from the Hub"
        raise UsageError(f"{text} is a URL, not a path", hint=hint)
    if (found := INTERPOLATION.search(text)) and (not is_literal or ":" in found[0]):
        raise UsageError(f"{text} is not a path: {NOT_EVALUATED}", hint="write out the path")
    if "\0" in text:
        raise UsageError(f"{text!r} has a NUL character, which a path cannot contain", hint="check the path")
    try:
        return cwd / Path(text).expanduser()
    except RuntimeError:
        user = text[1:].partition("/")[0]
        whose = (
            f"there is no user {user} on this machine"
            if user
            else "this user has no home directory on this machine"
        )
        raise UsageError(f"{text}: {whose}", hint="write the absolute path instead of ~") from None


def user_name() -> str:
    """Return this user's name, or the uid if the user has no name."""
    import getpass

    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())


def user_groups() -> tuple[str, ...] | None:
    """Return the names of this user's groups, or None for root, who is not restricted by lists of groups."""
    import grp

    if os.getuid() == 0:
        return None
    found = []
    for number in dict.fromkeys((os.getgid(), *os.getgroups())):
        with suppress(KeyError):  # A group without a name cannot appear in a list of allowed groups.
            found.append(grp.getgrgid(number).gr_name)
    return tuple(found)


PACKAGE = Path(__file__).resolve().parent
PROJECT_CONFIG = "config.yaml"
FIRST_RUN, FIRST_RUN_NAME = "first-run.yaml", "first-run"
"""The config file that `trainkit init` writes, and the name of a run that uses this config."""
QUICKSTART = "quickstart"
NOT_RUNS = ("clusters", "profiles")
"""Folders of built-in YAML files that are merged into run configs and are not run configs themselves."""


def shipped_configs() -> Path:
    """Return the folder of built-in configs: inside an installed package, or next to it in a checkout."""
    return _shipped("configs")


def shipped_templates() -> Path:
    """Return the folder of built-in templates: inside an installed package, or next to it in a checkout."""
    return _shipped("templates")


def _shipped(name: str) -> Path:
    installed = PACKAGE / "_shipped" / name
    return installed if installed.is_dir() else PACKAGE.parent / name


def default_config(cwd: Path) -> tuple[str, str]:
    """Return the default config (a file in `cwd`, else the quickstart) and where it comes from."""
    if (cwd / PROJECT_CONFIG).is_file():
        return PROJECT_CONFIG, "in this folder"
    if (cwd / FIRST_RUN).is_file():
        return FIRST_RUN, "written by `trainkit init`"
    return QUICKSTART, "shipped"


def find_shipped_config(name: str) -> Path | None:
    """Return the file of a built-in config, or None if there is no such config.

    `name` has a form such as ``quickstart``, ``models/8b.yaml`` or ``configs/models/8b.yaml``.
    """
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts or path.suffix not in ("", ".yaml"):
        return None
    if path.parts[:1] == ("configs",):
        path = path.relative_to("configs")
    found = shipped_configs() / path.with_suffix(".yaml") if path.name else None
    return found if found is not None and found.is_file() else None


def shipped_config_names() -> list[str]:
    """Return the names of the built-in run configs, such as ``quickstart`` and ``models/8b``."""
    folder = shipped_configs()
    others = [
        file
        for file in sorted(folder.glob("*/*.yaml"))
        # A file name that contains a dot is a profile for another config.
        if file.parent.name not in NOT_RUNS and "." not in file.stem
    ]
    files = [folder / f"{QUICKSTART}.yaml", *others]
    return [str(file.relative_to(folder).with_suffix("")) for file in files]


def open_regular(path: str | Path, flags: int = 0) -> BinaryIO:
    """Open a regular file for reading; raise OSError for a pipe or device, where reading could block forever.

    `flags` are added to the flags passed to ``os.open``.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))
