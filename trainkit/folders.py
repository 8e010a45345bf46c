"""Makes folders, also on file systems whose clients see each other's changes late."""

from __future__ import annotations

import os
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
    default = Path(environ.get("HOME") or "~").expanduser() / ".local/state"
    return Path(environ.get("XDG_STATE_HOME") or default) / "trainkit"
