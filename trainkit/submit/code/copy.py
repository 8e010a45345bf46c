"""Which code a run trains with: a copy made when it was submitted, or the files as they are."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainkit.config import RunConfig
from trainkit.job.record import read_job
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import RunDir, write_json
from trainkit.submit.code.snapshot import Snapshot, plan_snapshot, take_snapshot
from trainkit.submit.create import wants_copy


def planned_code(run: RunDir, config: RunConfig, plan: LaunchPlan, cwd: Path) -> dict[str, Any] | None:
    """What `copy_code` would give now; nothing is written."""
    return (
        _described(plan_snapshot(cwd, run, links=_runs_in_copy(plan)), plan)
        if wants_copy(config, plan)
        else None
    )


def copy_code(run: RunDir, plan: LaunchPlan, cwd: Path) -> dict[str, Any]:
    """Copy the code into the run; what job.json keeps of that.

    Raises UsageError when it is too large, cannot be read, or there is no space.
    """
    return _described(take_snapshot(cwd, run, links=_runs_in_copy(plan)), plan)


@contextmanager
def renewed_code(run: RunDir, config: RunConfig, plan: LaunchPlan) -> Iterator[None]:
    """Copy the code as it is now in the place of the run's copy, which stays as ``code.001`` and so on.

    Call with the run's lock held; job.json tells the new one from then on. When what it was copied for is
    refused, so that there is no new attempt, all is as it was. Raises UsageError as `copy_code`.
    """
    job, attempts = read_job(run), run.attempt_numbers()
    kept = next(run.path / f"code.{number:03d}" for number in range(1, 1000) if not _has(run, number))
    had_one = run.code_dir.exists()
    if had_one:
        run.code_dir.rename(kept)
    try:
        code = copy_code(run, plan, Path(str(job["cwd"]))) if wants_copy(config, plan) else None
    except BaseException:
        if had_one:
            kept.rename(run.code_dir)
        raise
    write_json(run.job_file, {**job, "code": code})
    try:
        yield
    except BaseException:
        if run.attempt_numbers() == attempts:
            shutil.rmtree(run.code_dir, ignore_errors=True)
            if had_one:
                kept.rename(run.code_dir)
            write_json(run.job_file, job)
        raise


def _has(run: RunDir, number: int) -> bool:
    return (run.path / f"code.{number:03d}").exists()


def _runs_in_copy(plan: LaunchPlan) -> bool:
    """Whether the working directory is the copy, so that what git ignores has to be found from there."""
    return plan.command is not None


def _described(snapshot: Snapshot, plan: LaunchPlan) -> dict[str, Any]:
    kept = snapshot.to_dict()
    # Such a file is its own folder's for Python too, so that what it imports comes from there.
    past_copy = [word for word in plan.command or () if Path(word).is_relative_to(kept["source"])]
    return {
        **kept,
        "notes": [
            *kept["notes"],
            *(
                f"{word} is used as it then is; named from {kept['source']} it would be the copy"
                for word in past_copy
                if Path(word).is_file()
            ),
        ],
        "workdir": str(snapshot.workdir),
        "import_path": list(snapshot.import_path),
    }
