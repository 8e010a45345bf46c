"""Read and write job.json, which records a run's attempts and the job and process of each attempt."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trainkit.run.files import (
    OPTIONAL,
    read_json,
    read_object,
    read_record,
    to_json,
    utc_now,
    write_atomic,
    write_json,
)
from trainkit.run.process import ProcessId, boot_id, own_host
from trainkit.run.rundir import AttemptDir, RunDir, is_supervised
from trainkit.scheduler import on_cluster, split_job
from trainkit.shipped import files_of, take_parts
from trainkit.slurm.environment import cluster_name, other_cluster
from trainkit.trust import read_trusted

AUTO_RESTART = "restart"
"""The `reason` in job.json for an attempt that the supervisor started automatically."""


def submitit_pickle(run: RunDir, job_id: str) -> Path:
    """Return the path where submitit looks for the pickle of a job; only submitit jobs have one."""
    return run.path / "submitit" / f"{job_id}_submitted.pkl"


def copy_submitit_pickle(run: RunDir, job_id: str, new_id: str) -> None:
    """Copy the pickle of a submitit job for the job that continues the run; do nothing for any other job."""
    if (pickle := submitit_pickle(run, job_id)).exists():
        shutil.copyfile(pickle, submitit_pickle(run, new_id))


class HasCluster:
    """Base class for records that describe a submission to a cluster."""

    cluster: str | None

    @property
    def other_cluster(self) -> str | None:
        """Return the cluster that Slurm commands on this host must specify for the jobs, or None."""
        return other_cluster(self.cluster)

    @property
    def expected_cluster(self) -> str | None:
        """Return the name of the jobs' cluster; if it was not recorded, the name of this host's cluster."""
        return self.cluster or cluster_name()


@dataclass(frozen=True)
class AttemptRecord(HasCluster):
    """An attempt in job.json; values that are missing from the file are None."""

    attempt: int = 0
    job_id: str = ""
    """The Slurm job id, or ``local-PID`` for an attempt without Slurm."""
    cluster: str | None = field(default=None, metadata=OPTIONAL)
    submitted_at: str | None = field(default=None, metadata=OPTIONAL)
    host: str | None = field(default=None, metadata=OPTIONAL)
    """The host of the supervisor; identifies the supervisor's process together with the next three fields."""
    boot_id: str | None = field(default=None, metadata=OPTIONAL)
    pid: int | None = field(default=None, metadata=OPTIONAL)
    start_ticks: int | None = field(default=None, metadata=OPTIONAL)
    backend: str | None = field(default=None, metadata=OPTIONAL)
    """The name of the backend; None without Slurm."""
    reason: str | None = field(default=None, metadata=OPTIONAL)
    """The trainkit command that started the attempt (submit, run, requeue or resume), or `AUTO_RESTART`."""
    step_id: str | None = field(default=None, metadata=OPTIONAL)
    """The id of the Slurm step, if the attempt was started by `srun trainkit run`."""
    node: str | None = field(default=None, metadata=OPTIONAL)
    """The Slurm node name of the supervisor's host."""
    started_at: str | None = field(default=None, metadata=OPTIONAL)
    cancelled_at: str | None = field(default=None, metadata=OPTIONAL)
    cancelled_now: bool = field(default=False, metadata=OPTIONAL)
    """True if the attempt was cancelled without saving a checkpoint."""
    requeue_requested_at: str | None = field(default=None, metadata=OPTIONAL)
    folder: str | None = field(default=None, metadata=OPTIONAL)
    """The path of the run folder when this record was written. A difference in this path or in `inode` shows
    that the folder was moved or copied after the record was written."""
    inode: int | None = field(default=None, metadata=OPTIONAL)
    more: dict[str, object] = field(default_factory=dict)
    """Values of the attempt that are unknown to this trainkit version."""

    @property
    def job(self) -> str:
        """Return the job as an argument for Slurm commands, in the format returned by `on_cluster`."""
        return on_cluster(self.job_id, self.other_cluster)

    @property
    def in_foreground(self) -> bool:
        """Return whether the attempt runs in the foreground, so that it stops together with its command."""
        return self.reason == "run"

    @property
    def has_started(self) -> bool:
        """Return whether the supervisor has started; Slurm may cancel a job before its supervisor starts."""
        return self.backend is None or self.started_at is not None

    @property
    def takeover(self) -> str:
        """Return the reason to record for earlier attempts that are superseded by this attempt."""
        return f"superseded: attempt {self.attempt} in job {self.job_id} has taken over the run"

    @property
    def is_complete(self) -> bool:
        """Return whether the record contains an attempt number and a job id; manual edits may remove them."""
        return self.attempt > 0 and self.job_id != ""

    @property
    def is_cancelled(self) -> bool:
        return self.cancelled_at is not None

    def is_attempt(self, other: AttemptRecord) -> bool:
        """Return whether both records describe the same attempt; one may come from a copy of the run."""
        names = ("attempt", "job_id", "submitted_at")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def alive(self) -> bool | None:
        """Return whether the supervisor is alive; None if this host cannot determine it."""
        if self.host is None or self.pid is None:
            return None
        return ProcessId(self.host, self.boot_id or "", self.pid, self.start_ticks).alive()


@dataclass(frozen=True)
class CodeCopy:
    """Describes a copy of a run's code, as recorded in job.json."""

    source: str = ""
    """The folder that was copied: the root of the Git work tree, or the working directory."""
    code: str = ""
    """The root folder of the copy."""
    subfolder: str = ""
    """The working directory relative to `source` and `code`; empty if it is the root."""
    kind: str = ""
    """How the files to copy were selected: ``git`` or ``pattern``."""
    num_files: int = 0
    num_bytes: int = 0
    left_out: list[dict[str, str]] = field(default_factory=list)
    """Files that were not copied, each with its ``path`` and ``reason``; at most `snapshot.MAX_LISTED` are
    listed."""
    links: list[str] = field(default_factory=list)
    """Paths in the copy that are symlinks to the source, where the files may still change; at most
    `snapshot.MAX_LISTED` are listed."""
    import_path: list[str] = field(default_factory=list)
    """Folders in the copy that are added to PYTHONPATH, so that modules are imported from the copy instead of
    the source."""
    notes: list[str] = field(default_factory=list)
    """Notes about the copy, shown to the user."""
    workdir: str = ""
    """The run's working directory in the copy."""
    has_repository: bool | None = None
    """True if the copy contains a Git repository; None if an older trainkit version made the copy."""
    more: dict[str, object] = field(default_factory=dict)
    """Values of the copy that are unknown to this trainkit version."""


@dataclass
class JobRecord:
    """The content of job.json."""

    backend: str | None = None
    name: str = ""
    cwd: str | None = None
    """The working directory when the run was submitted."""
    code: CodeCopy | None = None
    """The code copy; None if the run uses the original files."""
    attempts: list[AttemptRecord] = field(default_factory=list)
    follow_ups: list[str] | None = field(default=None, metadata=OPTIONAL)
    """The job ids of the chained jobs, in execution order."""
    more: dict[str, object] = field(default_factory=dict)
    """Values in job.json that are unknown to this trainkit version."""

    @property
    def newest(self) -> AttemptRecord | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def waiting(self) -> list[str]:
        """Return the chained jobs that have not started an attempt, in the format of `AttemptRecord.job`.

        All chained jobs run on the cluster of the newest attempt. Some chained jobs may no longer be in the
        queue.
        """
        if self.newest is None or not self.follow_ups:
            return []
        other_cluster = self.newest.other_cluster
        return [on_cluster(job_id, other_cluster) for job_id in self.follow_ups if not self.of_job(job_id)]

    @property
    def num_auto_restarts(self) -> int:
        """Return the number of automatic restarts since the run was last started by a command."""
        reasons = [entry.reason for entry in self.attempts]
        return len(list(itertools.takewhile(lambda reason: reason == AUTO_RESTART, reversed(reasons))))

    def of_attempt(self, number: int) -> AttemptRecord:
        """Return the record of an attempt; if there is none, an empty record whose attempt number is 0."""
        return next((entry for entry in self.attempts if entry.attempt == number), AttemptRecord())

    def superseding(self, number: int) -> AttemptRecord | None:
        """Return the newest attempt if it is newer than attempt `number` and so supersedes it; else None."""
        return self.newest if self.newest is not None and self.newest.attempt > number else None

    def of_job(self, job_id: str, cluster: str | None = None) -> list[AttemptRecord]:
        """Return the attempts of a job, oldest first.

        `cluster` defaults to the cluster of the newest attempt.
        """
        if cluster is None and self.newest is not None:
            cluster = self.newest.cluster
        own = [entry for entry in self.attempts if entry.job_id == job_id]
        return [entry for entry in own if None in (cluster, entry.cluster) or entry.cluster == cluster]


def create_job(
    run: RunDir, *attempts: AttemptRecord, backend: str, name: str, cwd: str, code: CodeCopy | None
) -> JobRecord:
    """Write job.json for a new run, before the supervisor of its first attempt starts."""
    job = JobRecord(backend, name, cwd, code, list(attempts))
    write_json(run.job_file, to_json(job))
    return job


@dataclass(frozen=True)
class RendezvousRecord:
    """The content of ``rendezvous.json``: the address where the ranks of an attempt connect.

    The values are None or empty until the first task has published the address.
    """

    step: str | None = None
    """A key for the step that wrote the file; each start of a job uses a different key."""
    step_id: str | None = None
    """The step id in Slurm, or None if unknown."""
    addr: str | None = None
    port: int | None = None
    nonce: str | None = None
    hosts: list[str] = field(default_factory=list)
    """The hosts, ordered by node rank."""


def read_rendezvous(attempt: AttemptDir) -> RendezvousRecord:
    """Read rendezvous.json; return an empty record if it is unreadable or missing, as in a local run."""
    return read_record(RendezvousRecord, read_object(attempt.rendezvous_file))


def read_job(run: RunDir) -> JobRecord:
    """Read job.json; return an empty record if the file is missing or unreadable."""
    try:
        return read_job_to_change(run)
    except OSError:
        return JobRecord(name=run.name)


@contextlib.contextmanager
def changed_job(run: RunDir) -> Iterator[JobRecord]:
    """Yield the content of job.json, and write it back when the block exits.

    The caller must hold the run's lock. Raises OSError if the file cannot be read, because writing it then
    would lose its content.
    """
    job = read_job_to_change(run)
    yield job
    write_json(run.job_file, to_json(job))


def read_job_to_change(run: RunDir) -> JobRecord:
    """Read job.json in order to change it; raise OSError if the file exists but cannot be read."""
    try:
        content = read_json(run.job_file)
    except (FileNotFoundError, ValueError):
        content = None
    return job_of(run, content)


def job_of(run: RunDir, content: object) -> JobRecord:
    """Convert a parsed job.json to a record; return an empty record if the content is invalid."""
    if not isinstance(content, dict) or not isinstance(content.get("attempts"), list):
        content = {}
    job = read_record(JobRecord, {**content, "attempts": [*map(_with_text_id, content.get("attempts", ()))]})
    job.name = job.name or run.name
    job.attempts = [entry for entry in job.attempts if entry.is_complete]
    return job


def _with_text_id(entry: object) -> object:
    """Convert a numeric job id, which users may write when editing the file, to a string."""
    if isinstance(entry, dict) and type(entry.get("job_id")) is int:
        return {**entry, "job_id": str(entry["job_id"])}
    return entry


def attempt_of(entry: object) -> AttemptRecord | None:
    """Convert a parsed attempt to a record; return None if it is invalid, for example after a manual edit."""
    entry = _with_text_id(entry)
    record = read_record(AttemptRecord, entry) if isinstance(entry, dict) else AttemptRecord()
    return record if record.is_complete else None


def record_of(attempt: AttemptDir) -> AttemptRecord:
    """Return the record of an attempt in job.json; an empty record if there is none."""
    return read_job(attempt.run).of_attempt(attempt.number)


def is_alive(run: RunDir, entry: AttemptRecord) -> bool | None:
    """Return whether the supervisor of a local attempt is alive; None if this host cannot determine it."""
    alive = entry.alive()
    # The record may have been written in a container on this machine, or before the hostname changed. An
    # equal boot id means that the supervisor ran on this machine, so the lock shows whether the supervisor is
    # alive.
    return False if alive is None and entry.boot_id == boot_id() and not is_supervised(run) else alive


def add_attempt(run: RunDir, attempt: int, pid: int, reason: str) -> AttemptRecord:
    """Record that the supervisor with the process id `pid` on this host executes an attempt.

    The caller must hold the run's lock.
    """
    own = asdict(ProcessId.of(pid))
    return _append(run, AttemptRecord(attempt, f"local-{pid}", None, utc_now(), **own, reason=reason))


def add_slurm_attempt(
    run: RunDir, attempt: int, job_id: str, reason: str, backend: str, **known: Any
) -> AttemptRecord:
    """Record that a Slurm job will execute an attempt.

    The caller must hold the run's lock. `job_id` may include the cluster, in the format returned by
    `on_cluster`.
    """
    job_id, cluster = split_job(job_id)
    named = cluster or cluster_name()
    record = AttemptRecord(attempt, job_id, named, utc_now(), backend=backend, reason=reason)
    return _append(run, replace(record, **known))


def _append(run: RunDir, record: AttemptRecord) -> AttemptRecord:
    record = replace(record, folder=record.folder or str(run.path), inode=run.path.stat().st_ino)
    with changed_job(run) as job:
        job.attempts.append(record)
    return record


def claim_entry(run: RunDir, attempt: int, pid: int) -> None:
    """Record which process of the Slurm job executes an attempt. The caller must hold the run's lock."""
    with changed_job(run) as job:
        known = claimed_by(pid)
        job.attempts = [replace(one, **known) if one.attempt == attempt else one for one in job.attempts]


def claimed_by(pid: int) -> dict[str, Any]:
    """Return the `AttemptRecord` fields that identify process `pid`, which is starting the attempt."""
    return {**asdict(ProcessId.of(pid)), "node": own_host(), "started_at": utc_now()}


def set_follow_ups(run: RunDir, job_ids: list[str]) -> None:
    """Record the chained jobs that will continue the run. The caller must hold the run's lock."""
    with changed_job(run) as job:
        job.follow_ups = job_ids


def change_newest(run: RunDir, **values: Any) -> AttemptRecord:
    """Change the record of the newest attempt and return it. The caller must hold the run's lock."""
    with changed_job(run) as job:
        job.attempts[-1] = replace(job.attempts[-1], **values)
    return job.attempts[-1]


def mark_cancelled(run: RunDir, *, now: bool = False) -> AttemptRecord:
    """Record that the user cancelled the newest attempt, and return its record.

    Set `now` if the attempt was cancelled without saving a checkpoint.
    """
    return change_newest(run, cancelled_at=utc_now(), **({"cancelled_now": True} if now else {}))


def open_attempt(run: RunDir, config_text: str, plan_text: str) -> AttemptDir:
    """Create the run's next attempt; copy its config, plan and plan files to the run folder.

    Raises FileExistsError if another command has already created this attempt, and OSError if a file cannot
    be written.
    """
    attempt = run.next_attempt()
    # A folder with the config and the plan is a run that `resume` can start, even if this process is killed
    # now.
    if not run.attempts_dir.exists():
        write_atomic(run.config_file, config_text)
        write_atomic(run.plan_file, plan_text)
    attempt.create()
    try:
        for file in (attempt.config_file, run.config_file):
            write_atomic(file, config_text)
        write_plan(attempt, plan_text)
    except OSError:
        discard_attempt(attempt)
        raise
    return attempt


def write_plan(attempt: AttemptDir, text: str) -> None:
    """Write the plan and plan files of the newest attempt to both the attempt's folder and the run folder."""
    for name, content in {attempt.plan_file.name: text, **_plan_files(text)}.items():
        write_atomic(attempt.path / name, content)
        write_atomic(attempt.run.path / name, content)


def _plan_files(plan_text: str) -> dict[str, str]:
    try:
        return files_of(take_parts(json.loads(plan_text)))
    except (ValueError, TypeError, AttributeError):
        return {}  # Ignore the error here, because the attempt will fail later and report the same error.


def reopen_attempt(attempt: AttemptDir) -> AttemptDir:
    """Create the next attempt with the same config and plan as this attempt.

    Raises OSError if a file cannot be written, and the errors of `read_trusted`.
    """
    return open_attempt(attempt.run, *map(read_trusted, (attempt.config_file, attempt.plan_file)))


def discard_attempt(attempt: AttemptDir) -> None:
    """Remove the newest attempt, which has not started; the previous attempt becomes the newest one."""
    run = attempt.run
    shutil.rmtree(attempt.path, ignore_errors=True)
    earlier = run.attempt_numbers()
    if not earlier:
        return
    before = run.attempt(earlier[-1])
    with contextlib.suppress(OSError):  # On a full disk, the files in the run folder stay unchanged.
        before.make_latest()
        for own, newest in (
            (before.config_file, run.config_file),
            (before.plan_file, run.plan_file),
            (before.script_file, run.script_file),
        ):
            if own.exists():
                write_atomic(newest, read_trusted(own))


def copied_file(run: RunDir, name: str) -> Path:
    """Return the copy of a user file in the run's code snapshot; the original file if it was not copied.

    A relative `name` is resolved against the working directory at submission, which may no longer exist.
    """
    original, (folder, code) = Path(name).absolute(), _snapshot(run)
    if code is None:
        return original
    inside = os.path.relpath(Path(folder, name), folder)
    copied = Path(os.path.normpath(Path(code.workdir) / inside))
    return copied if copied.is_relative_to(code.code) and copied.is_file() else original


def copied_folder(run: RunDir) -> Path:
    """Return the working directory in the code snapshot; the current directory if there is no snapshot."""
    code = _snapshot(run)[1]
    return Path.cwd() if code is None else Path(code.workdir)


def _snapshot(run: RunDir) -> tuple[str, CodeCopy | None]:
    """Return the working directory at submission, and the run's code snapshot (None if there is none).

    Raises ValueError if job.json is damaged, because the ranks could otherwise execute the wrong code.
    """
    try:
        content = read_json(run.job_file)
    except FileNotFoundError:
        return str(Path.cwd()), None
    if not isinstance(content, dict):
        raise ValueError(f"{run.job_file} is damaged: it has no JSON object")
    job = read_record(JobRecord, content)
    return job.cwd or str(Path.cwd()), job.code
