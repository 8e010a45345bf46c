"""Where trainkit keeps what it remembers between commands: outside of all runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_STATE_HOME/trainkit``; it may not exist yet."""
    home = environ.get("XDG_STATE_HOME") or str(
        Path(environ.get("HOME") or "~").expanduser() / ".local/state"
    )
    return Path(home) / "trainkit"
