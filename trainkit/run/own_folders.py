"""Choose folders for temporary and compiled files where no other user can plant a file.

torch and other libraries execute or unpickle files below ``$TMPDIR`` whose names anybody can guess:
``torchinductor_USER``, ``USER/torch_vendor_quack_cache``, ``quack_generated_epilogues``. TensorBoard
(``.tensorboard-info``) and MLflow (``db_init_lock-*``) would write through links that another user has
planted there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from trainkit.errors import print_note
from trainkit.folders import ensure_folder, make_private, state_folder, user_name
from trainkit.run.process import own_host

CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Variables that name the folders for compiled files, which are worth more than temporary files."""
_TORCH_REPLACES = re.compile(r'[\\/:*?"<>|]')
"""The characters of a user name that torch replaces in the name of a folder."""


class OwnFolders(NamedTuple):
    """The folders of this user on this host."""

    temporary: str
    caches: Mapping[str, str]
    """Maps the variables in `CACHES` to their folders."""
    note: str
    """Explains where the folders are and what another user has made in the usual place; empty if there is no
    problem."""

    def added_to(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return an environment with these folders, except for caches that the user has set."""
        own = _without_outer(environ)
        return {**self.caches, **own, "TMPDIR": self.temporary}


def own_folders(environ: Mapping[str, str], fallback: Path, *, keeps: bool = False) -> OwnFolders:
    """Create the folders below ``$TMPDIR`` or ``/tmp``, or in `fallback`, which must be private.

    TMPDIR stays unchanged if only this user can create files in it. With `keeps`, TMPDIR stays unchanged even
    if other users can create files in it. In both cases TMPDIR is replaced if another user has made the
    folder that torch uses by default. Raises OSError.
    """
    temporary = _without_outer(environ).get("TMPDIR") or "/tmp"
    private = Path(temporary, _name())
    if (problem := _problem_of(private)) is not None:
        private = fallback
        ensure_folder(private, parents=True)
    elif (keeps or not _problem_of(Path(temporary), 0o022)) and (
        problem := _problem_of(_torch_default(temporary), 0o022)
    ) is None:
        return OwnFolders(temporary, _caches_in(private), "")
    ensure_folder(private / "tmp", 0o700)
    note = (
        f"temporary files are in {private}/tmp instead of {temporary}, where others can plant code: {problem}"
    )
    return OwnFolders(f"{private}/tmp", _caches_in(private), note if problem else "")


def own_environ(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment with private folders for a process that a command starts. Raises OSError."""
    folders = own_folders(environ, state_folder(environ) / "caches" / own_host())
    if folders.note:
        print_note(folders.note)
    return folders.added_to(environ)


def _without_outer(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the folders that a rank or torch has set instead of the user."""
    own = f"/{_name()}/"
    # torch writes its default folder into the environment of its process.
    defaults = [f"{_torch_default(folder)}/" for folder in (environ.get("TMPDIR") or "/tmp", "/tmp")]
    found = {
        name: value
        for name, value in environ.items()
        if name not in CACHES or (own not in value and not f"{value}/".startswith(tuple(defaults)))
    }
    if own in (temporary := found.get("TMPDIR", "")):
        found["TMPDIR"] = temporary.partition(own)[0]
    return found


def _torch_default(temporary: str) -> Path:
    return Path(temporary, f"torchinductor_{_TORCH_REPLACES.sub('_', user_name())}")


def _name() -> str:
    return f"trainkit-{os.getuid()}"


def _caches_in(folder: Path) -> Mapping[str, str]:
    return {variable: f"{folder}/{name}" for variable, name in CACHES.items()}


def _problem_of(folder: Path, others: int = 0o077) -> str | None:
    """Create a private folder; return why it cannot be trusted, or None if it can be."""
    try:
        return None if make_private(folder, others) else f"{folder} can be written or replaced by others"
    except OSError as error:
        return str(error)
