"""Copies the newest checkpoint of a run to a new one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from trainkit.errors import UsageError
from trainkit.run.manifest import newest_intact, published
from trainkit.run.rundir import PARTIAL_SUFFIX, RunDir


def newest_checkpoint_of(run: RunDir) -> Path:
    """The newest intact checkpoint of a run; raises UsageError when there is none."""
    checkpoint = newest_intact(published(run.checkpoints_dir))
    if checkpoint is None:
        raise UsageError(
            f"{run.shown} has no intact checkpoint to resume from", hint="`trainkit submit` starts a new run"
        )
    return checkpoint.path


def copy_newest_checkpoint(checkpoint: Path, run: RunDir) -> None:
    """Copy a checkpoint to a newly created run; removes the run folder if that fails."""
    try:
        copy_checkpoint(checkpoint, run)
    except BaseException:
        shutil.rmtree(run.path, ignore_errors=True)
        raise


def copy_checkpoint(checkpoint: Path, run: RunDir) -> Path:
    """Publish a copy of a checkpoint in another run, as hard links if the filesystem supports them.

    Published checkpoints never change, so both runs can share the files.
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
