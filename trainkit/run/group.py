"""Define a group: a folder that contains the runs of a sweep.

The runs are either tasks of Slurm arrays, or started by one process on this machine. A group folder contains
``sweep.json submit.sbatch provenance.json code/ logs/INDEX.log`` and one run folder ``INDEX/`` per trial. A
trial's folder is created when the trial starts or, on Slurm, when a command needs the folder. Submitting ten
thousand trials therefore takes as long as submitting ten.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trainkit.errors import UsageError
from trainkit.locks import file_lock, is_locked
from trainkit.run.events import log_event
from trainkit.run.files import (
    OPTIONAL,
    changed,
    read_json,
    read_record,
    to_json,
    utc_now,
    write_atomic,
    write_json,
)
from trainkit.run.process import ProcessId
from trainkit.run.record import AttemptRecord, CodeCopy, HasCluster, create_job, open_attempt
from trainkit.run.rundir import Child, RunDir, RunFolder, is_same_folder
from trainkit.scheduler import on_cluster
from trainkit.trust import read_trusted

GROUP_VERSION = 1
WAITS_FOR_ROOM = (
    "Slurm currently accepts no more jobs from this user; the run will be submitted when a job "
    "of the group finishes"
)
"""The reason shown for a trial that has not been submitted yet; see `RunGroup.unsubmitted`."""


@dataclass(frozen=True)
class Trial:
    """One run of a group, as described in `sweep.json`."""

    index: int = -1
    """The index of the trial; also the name of its folder."""
    values: dict[str, object] = field(default_factory=dict)
    """The values of the swept keys in this trial, by dotted key."""
    config: dict[str, object] = field(default_factory=dict, metadata=OPTIONAL)
    """The changes from the group's config to the trial's config, in the format that `difference` returns."""
    plan: dict[str, object] = field(default_factory=dict, metadata=OPTIONAL)
    """The changes from the group's plan to the trial's plan, in the same format as `config`."""


@dataclass(frozen=True)
class Chunk:
    """One Slurm array of a group.

    A group consists of several arrays if Slurm limits the array size or the number of jobs per user.
    """

    last: int = -1
    """The index of the last trial in this array. This array begins after the last trial of the previous
    array."""
    offset: int = 0
    """Trial index minus array task id; nonzero if task ids equal to the indices would exceed Slurm's
    limit."""
    job_id: str | None = None
    """The job id of the array; None until it is known."""


@dataclass(frozen=True)
class GroupRecord(HasCluster):
    """The content of `sweep.json`, excluding the trials."""

    version: int = GROUP_VERSION
    name: str = ""
    backend: str = ""
    cwd: str = ""
    cluster: str | None = None
    job_id: str | None = None
    """The job id of the group's first array; None until it is known."""
    array: str = ""
    """The value of sbatch's `--array` option."""
    keys: list[str] = field(default_factory=list)
    """The config keys that differ between the trials."""
    code: CodeCopy | None = None
    """The code copy that all runs share; None if the runs use the original files."""
    config: dict[str, object] = field(default_factory=dict)
    plan: dict[str, object] = field(default_factory=dict)
    process: ProcessId | None = field(default=None, metadata=OPTIONAL)
    """The process on this machine that starts the runs; None on Slurm."""
    parts: list[Chunk] = field(default_factory=list, metadata=OPTIONAL)
    """The group's Slurm arrays, in trial order; empty for a group on this machine."""
    submitted_at: str | None = field(default=None, metadata=OPTIONAL)
    cancelled_at: str | None = field(default=None, metadata=OPTIONAL)
    folder: str | None = field(default=None, metadata=OPTIONAL)
    """The path of the group's folder when the group was created. A difference in this path or in `inode`
    shows that the folder was moved or copied after the group was created."""
    inode: int | None = field(default=None, metadata=OPTIONAL)
    more: dict[str, object] = field(default_factory=dict)
    """Values in sweep.json that are unknown to this trainkit version."""

    def to_dict(self, trials: Iterable[Trial]) -> dict[str, object]:
        """Return the JSON value of sweep.json with the given trials."""
        own: dict[str, object] = {}
        for key, value in to_json(self).items():
            own[key] = value
            if key == "plan":
                own["points"] = to_json(list(trials))
        return own


class RunGroup(RunFolder):
    """The paths in a group's folder, and the content of its `sweep.json`."""

    sweep_file = Child("sweep.json")
    script_file = Child("submit.sbatch")
    """The batch script for the group's first array."""
    provenance_file = Child("provenance.json")
    code_dir = Child("code")
    """The code snapshot of the group; the runs have symlinks to this folder."""
    logs_dir = Child("logs")
    """The logs of the array tasks. Each log contains all output of a run's first attempt, whose
    `supervisor.log` is a symlink to the log."""
    supervisor_lock_file = Child(".supervisor.lock")
    """A file that is locked by the process that starts the runs on this machine; unused on Slurm."""
    process_log = Child("logs/group.log")

    def log_file(self, index: int | str, offset: int = 0) -> Path:
        """Return the log path of an array task; if the index is ``%a``, Slurm inserts the task id.

        `offset` is the `Chunk.offset` of the task's array.
        """
        return self.logs_dir / f"{f'{offset}+' if offset else ''}{index}.log"

    def script_of(self, part: Chunk) -> Path:
        """Return the batch script for an array; all arrays with offset 0 share one script."""
        return self.path / f"submit-{part.offset}.sbatch" if part.offset else self.script_file

    def folder(self, index: int) -> str:
        """Return the folder path of a trial; the folder may not exist yet."""
        return f"{self.path}/{index}"

    def run(self, index: int) -> RunDir:
        """Return the run of a trial."""
        return RunDir(self.folder(index))

    def created(self) -> list[int]:
        """Return the indices of the trials that already have a folder."""
        names = (path.name for path in self.path.iterdir())
        return [int(name) for name in names if is_index(name) and int(name) in self.trials]

    def exists(self) -> bool:
        """Return whether this folder contains a group."""
        return self.sweep_file.is_file()

    @property
    def record(self) -> GroupRecord:
        """Return the content of `sweep.json`; the content is cached on first access.

        Raises UsageError if the file cannot be read or was written by a newer trainkit version.
        """
        return self._content[0]

    @property
    def trials(self) -> dict[int, Trial]:
        """Return the trials by index; raise UsageError for the same reasons as `record`."""
        return self._content[1]

    @cached_property
    def _content(self) -> tuple[GroupRecord, dict[int, Trial]]:
        try:
            content = read_json(self.sweep_file)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{self.shown}/sweep.json cannot be read: {error}",
                hint="specify the folder of one of its runs",
            ) from error
        values = content.pop("points", None) if isinstance(content, dict) else None
        is_list = isinstance(values, list) and all(isinstance(value, dict) for value in values)
        trials = [read_record(Trial, value) for value in values or ()] if is_list else [Trial()]
        if any(trial.index < 0 for trial in trials):
            message = f"{self.shown}/sweep.json was not written by trainkit"
            raise UsageError(message, hint="specify the folder of one of its runs")
        record = read_record(GroupRecord, content)
        record = replace(record, parts=sorted(record.parts, key=lambda part: part.last))
        if record.version > GROUP_VERSION:
            raise UsageError(
                f"{self.shown}/sweep.json has version {record.version}, "
                f"but this trainkit version supports only version {GROUP_VERSION}",
                hint="use the trainkit version that submitted the group, or a newer version",
            )
        return record, {trial.index: trial for trial in trials}

    def read_again(self) -> None:
        """Discard the cached content of `sweep.json`, because another process may have changed the file."""
        self.__dict__.pop("_content", None)

    def update(self, **changes: Any) -> None:
        """Write changed values to `sweep.json`; preserve other values that another process has changed."""
        with file_lock(self.path / ".lock"):
            self.read_again()
            record, trials = replace(self.record, **changes), self.trials
            write_json(self.sweep_file, record.to_dict(trials.values()))
        self.__dict__["_content"] = record, trials

    @property
    def name(self) -> str:
        return self.record.name or self.path.name

    @property
    def original(self) -> RunGroup | None:
        """Return the original group if this folder is a copy of an existing group; otherwise None.

        The job ids in the sweep.json of a copy belong to the original group.
        """
        home = RunGroup(self.record.folder or self.path)
        if is_same_folder(home.path, self.path) or not home.exists():
            return None
        return home if home.record.submitted_at == self.record.submitted_at else None

    def has_process(self) -> bool:
        """Return whether the process that starts the group's runs on this machine is alive.

        Returns False for a copy of a group, because only the process of the original group holds a lock.
        """
        return is_locked(self.supervisor_lock_file)

    @property
    def limit(self) -> int:
        """Return the maximum number of runs that may execute on this machine simultaneously."""
        return int(self.record.array.partition("%")[2] or 1)

    @property
    def job_id(self) -> str | None:
        """Return the job id of the first array, or None until it is known."""
        return self.record.job_id

    def trial(self, index: int) -> Trial:
        """Return the trial with an index; raise UsageError if it does not exist."""
        if index not in self.trials:
            indices = sorted(self.trials)
            raise UsageError(
                f"{self.shown} has no trial {index}", hint=f"its trials are {indices[0]} to {indices[-1]}"
            )
        return self.trials[index]

    @property
    def parts(self) -> list[Chunk]:
        """Return the Slurm arrays in trial order; an empty list before submission."""
        whole = [] if self.job_id is None else [Chunk(sys.maxsize, job_id=self.job_id)]
        return self.record.parts or whole

    @property
    def job_ids(self) -> list[str]:
        """Return the job ids of the arrays."""
        return [part.job_id for part in self.parts if part.job_id is not None]

    @property
    def jobs(self) -> list[str]:
        """Return the arrays as job arguments for Slurm commands, in the format returned by `on_cluster`."""
        return [on_cluster(job_id, self.record.other_cluster) for job_id in self.job_ids]

    @property
    def unsubmitted(self) -> list[int]:
        """Return the indices of trials that wait for submission because of Slurm's limit on jobs per user."""
        last = self.parts[-1].last if self.parts else -1
        return sorted(index for index in self.trials if index > last)

    def part_of(self, index: int) -> Chunk | None:
        """Return the array that contains a trial; None if the trial has not been submitted."""
        parts = self.parts
        found = bisect_left(parts, index, key=lambda part: part.last)
        return parts[found] if found < len(parts) else None

    def task_id(self, index: int) -> str | None:
        """Return the Slurm id of a trial's array task; None if the trial has not been submitted."""
        part = self.part_of(index)
        return None if part is None or part.job_id is None else f"{part.job_id}_{index - part.offset}"


def group_of(run: RunDir) -> tuple[RunGroup, int] | None:
    """Return a run's group and its trial index in the group; None if the run does not belong to a group.

    The run folder may not exist yet.
    """
    group = RunGroup(run.path.parent)
    if not is_index(run.name) or not group.exists():
        return None
    return group, int(run.name)


def is_index(text: str) -> bool:
    """Return whether a text has the form of a trial's folder name in a group."""
    return text.isascii() and text.isdigit() and str(int(text)) == text


def create_task_run(run: RunDir, job_id: str | None = None) -> RunDir:
    """Return `run`; first create its folder if `run` is a trial that has no folder yet.

    The folder of a trial is created when its array task starts, or earlier if a command needs the folder.
    Raises UsageError for the same reasons as `task_run`.
    """
    found = None if run.exists() else group_of(run)
    return run if found is None else task_run(*found, job_id)


def task_run(group: RunGroup, index: int, job_id: str | None = None) -> RunDir:
    """Return the run of a trial; create its folder if it does not exist yet.

    `job_id` is the id of the array task; by default it is derived from the group's sweep.json. Raises
    UsageError if the group has no such trial or was not submitted, or if the folder cannot be written.
    """
    run = group.run(index)
    if run.exists():
        return run
    trial = group.trial(index)
    if (process := group.record.process) is not None:
        path, starts, hint = group.quoted, "start one after another", "status {}` shows them"
        if process.alive() is False:
            starts, hint = "will not be started", "resume {}` starts them"
        raise UsageError(
            f"{run.shown} has not started: the runs of {group.shown} {starts}",
            hint=f"`trainkit {hint.format(path)}",
        )
    if job_id is None and os.path.lexists(run.path) and not run.exists():
        raise UsageError(
            f"{run.shown} is not a run folder: it has no job.json",
            hint=f"`trainkit status {group.quoted}` shows its state",
        )
    job_id = job_id or group.task_id(index)
    if job_id is None and group.job_id is not None:
        raise UsageError(
            f"{run.shown} is not submitted yet: {WAITS_FOR_ROOM}",
            hint=f"`trainkit resume {group.quoted}` submits the run as soon as Slurm accepts another job",
        )
    if job_id is None:
        raise UsageError(
            f"it is unknown whether {group.shown} was submitted: its sweep.json has no job id",
            hint="`squeue --me` lists your jobs",
        )
    create_trial_run(group, trial, job_id)
    return run


def create_trial_run(group: RunGroup, trial: Trial, job_id: str | None = None) -> None:
    """Create the run folder of a trial; `job_id` is the id of its array task.

    Without a `job_id`, the run is created without an attempt. The folder has a temporary name until all files
    are written, so that readers never see an incomplete run. Raises UsageError if the folder cannot be
    written.
    """
    run, stage = group.run(trial.index), None
    try:
        stage = RunDir(tempfile.mkdtemp(prefix=f".{trial.index}.", dir=group.path))
        _fill(stage, group, trial, job_id)
        stage.path.rename(run.path)
    except BaseException as error:
        if stage is not None:
            shutil.rmtree(stage.path, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        if not run.exists():  # Another command or the array task itself may have created the run.
            raise UsageError(
                f"cannot create the run folder {run.shown}: {error.strerror or error}",
                hint="check the permissions of the parent folder and the free disk space",
            ) from error


def _fill(stage: RunDir, group: RunGroup, trial: Trial, job_id: str | None) -> None:
    record = group.record
    config, plan = trial_texts(group, trial)
    stage.checkpoints_dir.mkdir(mode=0o700)
    shutil.copyfile(group.provenance_file, stage.provenance_file)
    for shared in ("code", "stdin"):
        if (group.path / shared).exists():
            (stage.path / shared).symlink_to(Path(os.pardir, shared))
    name = f"{group.name}/{trial.index}"
    if job_id is None:
        write_atomic(stage.config_file, config)
        write_atomic(stage.plan_file, plan)
        create_job(stage, backend=record.backend, name=name, cwd=record.cwd, code=record.code)
        return
    attempt, part = open_attempt(stage, config, plan), group.part_of(trial.index) or Chunk()
    for copy in (attempt.script_file, stage.script_file):
        write_atomic(copy, read_trusted(group.script_of(part)))
    # Slurm writes all output of the task to this log.
    log = group.log_file(trial.index - part.offset, part.offset).name
    attempt.supervisor_log.symlink_to(Path(*[os.pardir] * 4, group.logs_dir.name, log))
    entry = AttemptRecord(
        attempt.number,
        job_id,
        record.expected_cluster,
        record.submitted_at or utc_now(),
        backend=record.backend,
        reason="submit",
        cancelled_at=record.cancelled_at or None,
        folder=group.folder(trial.index),
        inode=stage.path.stat().st_ino,
    )
    create_job(stage, entry, backend=record.backend, name=name, cwd=record.cwd, code=record.code)
    log_event(stage, attempt.number, "submitted", job_id=job_id, reason="submit")


def trial_texts(group: RunGroup, trial: Trial) -> tuple[str, str]:
    """Return the initial content of config.yaml and plan.json for a trial's run."""
    from trainkit.config.yamlfile import dump  # imported here because the import is slow

    config, plan = changed(group.record.config, trial.config), changed(group.record.plan, trial.plan)
    return dump(config), json.dumps(plan, indent=2, ensure_ascii=False) + "\n"
