"""Whether the disk of a run folder has the locks and the space that a run needs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from trainkit.config import RunConfig
from trainkit.errors import UsageError
from trainkit.folders import shown_path
from trainkit.formats import plural, size
from trainkit.locks import NEEDS_FLOCK, local_locks, unsupported
from trainkit.plan.launch import LaunchPlan

PLENTY_SHARE = 0.05
"""Checkpoints that take less of the free space are not worth a line."""


def lock_problem(folder: Path, on_other_hosts: bool) -> str | None:
    """`local_locks` for a job on other hosts; raises UsageError where the file system has no locks at all."""
    place = Path(os.path.realpath(folder))
    reason = unsupported(next(path for path in (place, *place.parents) if path.is_dir()))
    if reason is not None:
        raise UsageError(
            f"files in {folder} cannot be locked: {reason}",
            hint=f"{NEEDS_FLOCK}; `submit --run-dir` chooses another folder",
        )
    return local_locks(folder) if on_other_hosts else None


def disk_forecast(
    folder: Path, plan: LaunchPlan, config: RunConfig, num_runs: int = 1, *, starts: bool = True
) -> str | None:
    """A line about the checkpoints of runs and the space for them; None where that is plenty, or unknown.

    Raises UsageError if not even one fits and the runs are about to start.
    """
    place, kept, one = Path(os.path.realpath(folder)), config.checkpoint.keep_last, plan.checkpoint_bytes
    if one is None:
        return None
    try:
        free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.is_dir())).free
    except OSError:
        return None  # what creates the folder says what is wrong with it
    if one * num_runs > free and starts:
        message = f"a checkpoint needs {size(one)}, but {shown_path(folder)} has only {size(free)} free"
        if num_runs > 1:
            message = f"{num_runs} runs with a checkpoint each need {size(one * num_runs)}: {message}"
        raise UsageError(message, hint="free disk space, or choose a folder on another disk with --run-dir")
    if kept is None:
        every, steps = config.checkpoint.every_steps, config.train.steps
        # More by epochs, by minutes and after validations.
        count = -(-steps // every) if every and steps else 1
        how_many, advice = "at least", "set checkpoint.keep_last (now null, which keeps all)"
    else:
        # One is being written, one is the best.
        count = kept + 1 + (config.checkpoint.best_metric is not None)
        how_many, advice = "up to", f"lower checkpoint.keep_last (now {kept})"
    need = count * one * num_runs
    if need < PLENTY_SHARE * free and kept is not None:
        return None
    whose = f"{num_runs} runs with " if num_runs > 1 else ""
    where = f"{size(free)} free in {shown_path(folder)}"
    text = f"{whose}{how_many} {plural(count, 'checkpoint')} of {size(one)}: {size(need)} of {where}"
    if need > free:
        return f"warning: {text}; {advice}, or free disk space"
    return f"  disk                {text}"
