"""Copies a checkpoint into the folder of a run that goes on from it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from trainkit.rundir import PARTIAL_SUFFIX, RunDir


def copy_checkpoint(checkpoint: Path, run: RunDir) -> Path:
    """Publish a copy of a checkpoint in another run, as hard links where the filesystem allows.

    A published checkpoint is never written again, so both runs can hold the same files.
    """
    target = run.checkpoints_dir / checkpoint.name
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    shutil.copytree(checkpoint, partial, copy_function=_link_or_copy)
    partial.rename(target)
    return target


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
