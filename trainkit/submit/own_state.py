"""Keeps the runs that a command makes for itself out of the user's list of runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainkit.state import state_folder

STATE_VARIABLE = "XDG_STATE_HOME"


@contextmanager
def own_state(folder: Path) -> Iterator[None]:
    """Let runs that are started now be written down in a folder of theirs, not in the user's list of runs.

    `last` still means the run that the user started last, and a node that a drill killed is not taken for a
    bad one later. Nodes that are known to be bad stay known.
    """
    before, own = os.environ.get(STATE_VARIABLE), folder / ".state"
    known = state_folder() / "bad_nodes"
    own.mkdir()
    if known.is_dir():
        shutil.copytree(known, own / "trainkit" / "bad_nodes")
    os.environ[STATE_VARIABLE] = str(own)
    try:
        yield
    finally:
        if before is None:
            del os.environ[STATE_VARIABLE]
        else:
            os.environ[STATE_VARIABLE] = before
