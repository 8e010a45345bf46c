"""Choose folders for temporary and compiled files that no other user can write to.

torch and other libraries execute or unpickle files with predictable names below ``$TMPDIR``:
``torchinductor_USER``, ``USER/torch_vendor_quack_cache``, ``quack_generated_epilogues``. TensorBoard and
MLflow write to files with predictable names in ``$TMPDIR`` (``.tensorboard-info``, ``db_init_lock-*``). If
another user has created a symlink with such a name, these programs would overwrite the symlink's target.
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
"""Maps environment variables to the names of folders for compiled files. Compiled files should be kept longer
than temporary files."""
_TORCH_REPLACES = re.compile(r'[\\/:*?"<>|]')
"""The characters in a user name that torch replaces to form a folder name."""


class OwnFolders(NamedTuple):
    """The private folders of the current user on this host."""

    temporary: str
    caches: Mapping[str, str]
    """Maps each environment variable in `CACHES` to a private folder."""
    note: str
    """A note for the user if the default folders cannot be trusted; otherwise empty."""

    def added_to(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return `environ` with TMPDIR and the cache folders set; cache folders set by the user are kept."""
        own = _without_outer(environ)
        return {**self.caches, **own, "TMPDIR": self.temporary}


def own_folders(environ: Mapping[str, str], fallback: Path, *, keeps: bool = False) -> OwnFolders:
    """Create private folders below ``$TMPDIR``, which defaults to ``/tmp``.

    If private folders cannot be created there safely, they are created in `fallback`.
    A private folder replaces TMPDIR if other users can create files in TMPDIR, unless `keeps` is set. A
    private folder also replaces TMPDIR if another user owns or can write to torch's default cache folder, or
    if `fallback` is used. Raises OSError.
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
    """Return `environ` with private folders for temporary and compiled files. Raises OSError."""
    folders = own_folders(environ, state_folder(environ) / "caches" / own_host())
    if folders.note:
        print_note(folders.note)
    return folders.added_to(environ)


def _without_outer(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without the folders that trainkit or torch set in an outer process.

    The result lacks the cache folders of trainkit and torch and trainkit's part of TMPDIR.
    """
    own = f"/{_name()}/"
    # torch adds its default cache folder to os.environ, so a value equal to this default was not set by the
    # user.
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
    """Create `folder` if it is missing; return why the folder cannot be trusted, or None if it can.

    `others` contains the permission bits that other users must not have.
    """
    try:
        return None if make_private(folder, others) else f"{folder} can be written or replaced by other users"
    except OSError as error:
        return str(error)
