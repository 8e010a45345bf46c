"""Makes folders, also where file systems show changes late, and finds those of this user."""

from __future__ import annotations

import errno
import getpass
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


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
    ensure_folder(folder, 0o700)
    found = folder.lstat()
    if (found.st_uid, found.st_mode & 0o40077) != (os.getuid(), 0o40000):
        raise PermissionError(errno.EPERM, "is not a private folder of this user; set HOME", str(folder))
    return folder


def user_name() -> str:
    """The name of this user, or the number of one without a name."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())
