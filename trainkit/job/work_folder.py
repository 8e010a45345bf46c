"""The working directory of a command, which contains a copy of the run's code and the command's output files.

The code snapshot in ``code/`` never changes and is shared by all trials of a sweep. A command that writes to
``out/`` must neither change the snapshot nor find files of another run in ``out/``.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trainkit.folders import ensure_folder
from trainkit.job.processes import retry_on_disk_error
from trainkit.plan.launch import LaunchPlan
from trainkit.run.files import read_json, write_json
from trainkit.run.git_copy import GIT, carry_repository, repositories_below, retire_repository
from trainkit.run.record import JobRecord
from trainkit.run.rundir import RunDir

WORK_DIR_VARIABLE = "TRAINKIT_JOB_WORK_DIR"
"""The environment variable with the directory where a command runs."""
NUM_THREADS = 8
"""Number of threads for copying files. On a shared filesystem, copying a file takes milliseconds."""


def enter_work_folder(run: RunDir, job: JobRecord, plan: LaunchPlan) -> None:
    """Set `WORK_DIR_VARIABLE`, so that the agents start the run's command in its working directory.

    Raises OSError.
    """
    os.environ.pop(WORK_DIR_VARIABLE, None)  # may be inherited from the submitting job
    folder = retry_on_disk_error(lambda: prepare_work_folder(run, job)) if plan.workload.is_command else None
    if folder is not None:
        os.environ[WORK_DIR_VARIABLE] = str(folder)


def prepare_work_folder(run: RunDir, job: JobRecord) -> Path | None:
    """Return the directory where the run's command starts, or None if there is no code snapshot.

    The working directory is created at the first start of a run. If the run's code has been updated since the
    last start, files that the run has not changed are replaced, and the run's outputs are kept. Raises
    OSError.
    """
    if job.cwd is None and run.work_dir.exists():
        # If job.json was lost, use the folder that already contains outputs.
        return run.work_dir / str(read_json(run.work_file)["subfolder"])
    code = job.code
    if code is None:
        return None
    snapshot, subfolder = Path(code.code), code.subfolder
    before = sorted(run.path.glob("code.[0-9][0-9][0-9]"))  # earlier snapshots of the run's code
    record = {"num_replaced_snapshots": len(before), "subfolder": subfolder}
    if not run.work_dir.exists():
        stage = Path(tempfile.mkdtemp(prefix=".work.", dir=run.path))
        try:
            _copy(snapshot, stage, list(_files(snapshot)))
            for inside in repositories_below(snapshot):
                carry_repository(snapshot / inside, stage / inside)
            write_json(run.work_file, record)
            stage.rename(run.work_dir)
        except BaseException:
            shutil.rmtree(stage, ignore_errors=True)
            raise
    else:
        num_seen = int(read_json(run.work_file)["num_replaced_snapshots"])
        if len(before) > num_seen:
            _renew(run.work_dir, before[num_seen], snapshot)
            write_json(run.work_file, record)
    folder = run.work_dir / subfolder
    ensure_folder(folder, parents=True)
    return folder


def _renew(work: Path, before: Path, after: Path) -> None:
    """Copy new code into a working directory; keep each file changed by the run as ``NAME.before-CODE``."""
    new = list(_files(after))
    changed = [name for name in new if not _is_same(work / name, after / name)]
    for name in changed:
        target = work / name
        if os.path.lexists(target) and not _is_same(target, before / name):
            target.rename(target.with_name(f"{target.name}.before-{before.name}"))
        else:
            target.unlink(missing_ok=True)
    _copy(after, work, changed)
    for name in set(_files(before)) - set(new):
        if _is_same(work / name, before / name):
            (work / name).unlink()
    repositories = repositories_below(after)
    for inside in {*repositories, *repositories_below(before)}:
        if (work / inside / GIT).exists():
            retire_repository(work / inside, f".before-{before.name}")
    for inside in repositories:
        carry_repository(after / inside, work / inside)


def _files(root: Path) -> Iterator[str]:
    """Yield the relative paths of files and links below a folder, excluding Python caches and Git's files."""
    for folder, folders, files in os.walk(root):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        folders[:] = [name for name in folders if name not in ("__pycache__", GIT, *links)]
        yield from (os.path.relpath(Path(folder, name), root) for name in (*files, *links))


def _copy(source: Path, target: Path, names: list[str]) -> None:
    for folder in sorted({Path(name).parent for name in names}):
        ensure_folder(target / folder, parents=True)
    from concurrent.futures import ThreadPoolExecutor  # only needed by runs with a code copy

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(lambda name: _copy_file(source / name, target / name), names))


def _copy_file(source: Path, target: Path) -> None:
    shutil.copy2(source, target, follow_symlinks=False)
    if not target.is_symlink():
        target.chmod(target.stat().st_mode | 0o200)  # the files in the snapshot are read-only


def _is_same(one: Path, other: Path) -> bool:
    if one.is_symlink() or other.is_symlink():
        return one.is_symlink() and other.is_symlink() and one.readlink() == other.readlink()
    return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)
