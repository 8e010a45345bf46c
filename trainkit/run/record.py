"""job.json: the attempts of a run, and the job and process of each."""

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
"""The reason, in job.json, of an attempt that the supervisor starts without a command."""


def submitit_pickle(run: RunDir, job_id: str) -> Path:
    """What a job of submitit looks for, by its id; it exists only for those."""
    return run.path / "submitit" / f"{job_id}_submitted.pkl"


def copy_submitit_pickle(run: RunDir, job_id: str, new_id: str) -> None:
    """Give a job that continues another one its pickle, if that is a job of submitit."""
    if (pickle := submitit_pickle(run, job_id)).exists():
        shutil.copyfile(pickle, submitit_pickle(run, new_id))


class HasCluster:
    """A record of what was submitted to a cluster."""

    cluster: str | None

    @property
    def elsewhere(self) -> str | None:
        """The cluster of its jobs, if Slurm's commands have to name it here."""
        return other_cluster(self.cluster)

    @property
    def expected_cluster(self) -> str | None:
        """The cluster of its jobs; the one of this host if it is not recorded."""
        return self.cluster or cluster_name()


@dataclass(frozen=True)
class AttemptRecord(HasCluster):
    """One attempt in job.json; None where a value is missing."""

    attempt: int = 0
    job_id: str = ""
    """``local-PID`` for an attempt without Slurm."""
    cluster: str | None = field(default=None, metadata=OPTIONAL)
    submitted_at: str | None = field(default=None, metadata=OPTIONAL)
    host: str | None = field(default=None, metadata=OPTIONAL)
    """With the next three values, the supervisor's process."""
    boot_id: str | None = field(default=None, metadata=OPTIONAL)
    pid: int | None = field(default=None, metadata=OPTIONAL)
    start_ticks: int | None = field(default=None, metadata=OPTIONAL)
    backend: str | None = field(default=None, metadata=OPTIONAL)
    """None without Slurm."""
    reason: str | None = field(default=None, metadata=OPTIONAL)
    """The command that started it, ``submit run requeue resume``, or `AUTO_RESTART`."""
    step_id: str | None = field(default=None, metadata=OPTIONAL)
    """The step of `srun trainkit run`."""
    node: str | None = field(default=None, metadata=OPTIONAL)
    """Slurm's name of the supervisor's host."""
    started_at: str | None = field(default=None, metadata=OPTIONAL)
    cancelled_at: str | None = field(default=None, metadata=OPTIONAL)
    cancelled_now: bool = field(default=False, metadata=OPTIONAL)
    """Cancelled without a save."""
    requeue_requested_at: str | None = field(default=None, metadata=OPTIONAL)
    folder: str | None = field(default=None, metadata=OPTIONAL)
    """With `inode`, the run's folder when this was recorded: it may have been moved since, or copied."""
    inode: int | None = field(default=None, metadata=OPTIONAL)
    more: dict[str, object] = field(default_factory=dict)
    """What another version recorded."""

    @property
    def job(self) -> str:
        """Its job for Slurm's commands: see `on_cluster`."""
        return on_cluster(self.job_id, self.elsewhere)

    @property
    def in_foreground(self) -> bool:
        """Whether it saves and ends when the command that started it does."""
        return self.reason == "run"

    @property
    def has_started(self) -> bool:
        """Whether its supervisor has begun: Slurm can end a job before that."""
        return self.backend is None or self.started_at is not None

    @property
    def takeover(self) -> str:
        """Why an earlier attempt ends while this one runs."""
        return f"superseded: attempt {self.attempt} in job {self.job_id} has taken the run over"

    @property
    def is_complete(self) -> bool:
        """Whether it names its attempt and its job; an entry that was edited by hand may not."""
        return self.attempt > 0 and self.job_id != ""

    @property
    def is_cancelled(self) -> bool:
        return self.cancelled_at is not None

    def is_attempt(self, other: AttemptRecord) -> bool:
        """Whether both are of one attempt, in the record of a run or in a copy of it."""
        names = ("attempt", "job_id", "submitted_at")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def alive(self) -> bool | None:
        """Whether its supervisor is alive; None when this host cannot tell."""
        if self.host is None or self.pid is None:
            return None
        return ProcessId(self.host, self.boot_id or "", self.pid, self.start_ticks).alive()


@dataclass(frozen=True)
class CodeCopy:
    """The copy of a run's code, as job.json describes it."""

    source: str = ""
    """The folder that was copied: the root of the git work tree, or the working directory."""
    code: str = ""
    """The root of the copy."""
    subfolder: str = ""
    """The working directory relative to both roots; empty for the root."""
    kind: str = ""
    """``git`` or ``pattern``."""
    num_files: int = 0
    num_bytes: int = 0
    left_out: list[dict[str, str]] = field(default_factory=list)
    """The first files that were not copied: ``path, reason``."""
    links: list[str] = field(default_factory=list)
    """The first paths in the copy that are links to the source, which may change."""
    import_path: list[str] = field(default_factory=list)
    """Folders of the copy for PYTHONPATH, so that modules are imported from the copy."""
    notes: list[str] = field(default_factory=list)
    """Messages for the user."""
    workdir: str = ""
    """The working directory in the copy."""
    has_repository: bool | None = None
    """Whether Git finds a repository of its own in the copy; None for a copy of an earlier version."""
    more: dict[str, object] = field(default_factory=dict)
    """What another version recorded."""


@dataclass
class JobRecord:
    """The content of job.json."""

    backend: str | None = None
    name: str = ""
    cwd: str | None = None
    """The folder that the run was submitted from."""
    code: CodeCopy | None = None
    """None if the run uses the files in place."""
    attempts: list[AttemptRecord] = field(default_factory=list)
    follow_ups: list[str] | None = field(default=None, metadata=OPTIONAL)
    """The ids of the jobs that continue the run, one after another."""
    more: dict[str, object] = field(default_factory=dict)
    """What another version recorded."""

    @property
    def newest(self) -> AttemptRecord | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def waiting(self) -> list[str]:
        """The follow-up jobs that have not started an attempt, in order, as `AttemptRecord.job` names them.

        They are on the cluster of the newest attempt. Some may have left the queue.
        """
        if self.newest is None or not self.follow_ups:
            return []
        elsewhere = self.newest.elsewhere
        return [on_cluster(job_id, elsewhere) for job_id in self.follow_ups if not self.of_job(job_id)]

    @property
    def num_auto_restarts(self) -> int:
        """The number of automatic restarts since a command last started the run."""
        reasons = [entry.reason for entry in self.attempts]
        return len(list(itertools.takewhile(lambda reason: reason == AUTO_RESTART, reversed(reasons))))

    def of_attempt(self, number: int) -> AttemptRecord:
        """The record of an attempt; one of attempt 0 without it."""
        return next((entry for entry in self.attempts if entry.attempt == number), AttemptRecord())

    def superseding(self, number: int) -> AttemptRecord | None:
        """The newest attempt, if it is later than this one: it has taken the run over."""
        return self.newest if self.newest is not None and self.newest.attempt > number else None

    def of_job(self, job_id: str, cluster: str | None = None) -> list[AttemptRecord]:
        """The attempts of a job, oldest first; of `cluster`, by default of that of the newest attempt."""
        if cluster is None and self.newest is not None:
            cluster = self.newest.cluster
        own = [entry for entry in self.attempts if entry.job_id == job_id]
        return [entry for entry in own if None in (cluster, entry.cluster) or entry.cluster == cluster]


def create_job(
    run: RunDir, *attempts: AttemptRecord, backend: str, name: str, cwd: str, code: CodeCopy | None
) -> JobRecord:
    """Write the job.json of a new run, whose attempts no supervisor has begun."""
    job = JobRecord(backend, name, cwd, code, list(attempts))
    write_json(run.job_file, to_json(job))
    return job


@dataclass(frozen=True)
class RendezvousRecord:
    """``rendezvous.json`` of an attempt: where its ranks meet; None and empty before they do."""

    step: str | None = None
    """Which step wrote it, over all starts of a job."""
    step_id: str | None = None
    """Of a step of Slurm."""
    addr: str | None = None
    port: int | None = None
    nonce: str | None = None
    hosts: list[str] = field(default_factory=list)
    """By node rank."""


def read_rendezvous(attempt: AttemptDir) -> RendezvousRecord:
    """The content of rendezvous.json; empty if it is missing or unreadable, as in a run on this machine."""
    return read_record(RendezvousRecord, read_object(attempt.rendezvous_file))


def read_job(run: RunDir) -> JobRecord:
    """The content of job.json; with no attempts if the file is missing or unreadable."""
    try:
        return read_job_to_change(run)
    except OSError:
        return JobRecord(name=run.name)


@contextlib.contextmanager
def changed_job(run: RunDir) -> Iterator[JobRecord]:
    """The content of job.json, written back at the end of the block; with the run's lock held.

    Raises OSError if it cannot be read: what cannot be read now is not replaced.
    """
    job = read_job_to_change(run)
    yield job
    write_json(run.job_file, to_json(job))


def read_job_to_change(run: RunDir) -> JobRecord:
    """The content of job.json; raises OSError rather than take an unreadable file for an empty one."""
    try:
        content = read_json(run.job_file)
    except (FileNotFoundError, ValueError):
        content = None
    return job_of(run, content)


def job_of(run: RunDir, content: object) -> JobRecord:
    """The record of a run from the JSON of its job.json; an empty one if it is none."""
    if not isinstance(content, dict) or not isinstance(content.get("attempts"), list):
        content = {}
    job = read_record(JobRecord, {**content, "attempts": [*map(_with_text_id, content.get("attempts", ()))]})
    job.name = job.name or run.name
    job.attempts = [entry for entry in job.attempts if entry.is_complete]
    return job


def _with_text_id(entry: object) -> object:
    """An entry whose job id may be a number, as people write it."""
    if isinstance(entry, dict) and type(entry.get("job_id")) is int:
        return {**entry, "job_id": str(entry["job_id"])}
    return entry


def attempt_of(entry: object) -> AttemptRecord | None:
    """The record of an attempt from its JSON; None if it is none, as in a file that was edited by hand."""
    entry = _with_text_id(entry)
    record = read_record(AttemptRecord, entry) if isinstance(entry, dict) else AttemptRecord()
    return record if record.is_complete else None


def record_of(attempt: AttemptDir) -> AttemptRecord:
    """The record of an attempt in job.json, as `JobRecord.of_attempt` returns it."""
    return read_job(attempt.run).of_attempt(attempt.number)


def is_alive(run: RunDir, entry: AttemptRecord) -> bool | None:
    """Whether the supervisor of a run's attempt on this machine is alive; None when this host cannot tell."""
    alive = entry.alive()
    # Another name of this machine, or a container on it: its kernel knows who holds the lock.
    return False if alive is None and entry.boot_id == boot_id() and not is_supervised(run) else alive


def add_attempt(run: RunDir, attempt: int, pid: int, reason: str) -> AttemptRecord:
    """Record that the supervisor `pid` on this host runs an attempt; with the run's lock held."""
    own = asdict(ProcessId.of(pid))
    return _append(run, AttemptRecord(attempt, f"local-{pid}", None, utc_now(), **own, reason=reason))


def add_slurm_attempt(
    run: RunDir, attempt: int, job_id: str, reason: str, backend: str, **known: Any
) -> AttemptRecord:
    """Record that a Slurm job will run an attempt; with the run's lock held.

    `job_id` may name its cluster, as `on_cluster` does.
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
    """Record which process of the Slurm job runs an attempt; with the run's lock held."""
    with changed_job(run) as job:
        known = claimed_by(pid)
        job.attempts = [replace(one, **known) if one.attempt == attempt else one for one in job.attempts]


def claimed_by(pid: int) -> dict[str, Any]:
    """The values of an `AttemptRecord` that say which process of a Slurm job runs the attempt since now."""
    return {**asdict(ProcessId.of(pid)), "node": own_host(), "started_at": utc_now()}


def set_follow_ups(run: RunDir, job_ids: list[str]) -> None:
    """Record the jobs that wait to continue the run; with the run's lock held."""
    with changed_job(run) as job:
        job.follow_ups = job_ids


def change_newest(run: RunDir, **values: Any) -> AttemptRecord:
    """Change the record of the newest attempt and return it; with the run's lock held."""
    with changed_job(run) as job:
        job.attempts[-1] = replace(job.attempts[-1], **values)
    return job.attempts[-1]


def mark_cancelled(run: RunDir, *, now: bool = False) -> AttemptRecord:
    """Record that the user cancelled the newest attempt, with `now` without a save; returns its record."""
    return change_newest(run, cancelled_at=utc_now(), **({"cancelled_now": True} if now else {}))


def open_attempt(run: RunDir, config_text: str, plan_text: str) -> AttemptDir:
    """Create the run's next attempt; its config, plan and the files of the plan also become those of the run.

    Raises FileExistsError when another command has already created it, OSError when it cannot be written.
    """
    attempt = run.next_attempt()
    if not run.attempts_dir.exists():  # with that, the folder is a run: `resume` starts it if this is killed
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
    """Write the plan of the newest attempt and its files, which become those of the run too."""
    for name, content in {attempt.plan_file.name: text, **_plan_files(text)}.items():
        write_atomic(attempt.path / name, content)
        write_atomic(attempt.run.path / name, content)


def _plan_files(plan_text: str) -> dict[str, str]:
    try:
        return files_of(take_parts(json.loads(plan_text)))
    except (ValueError, TypeError, AttributeError):
        return {}  # the attempt ends with that as its reason, which its owner can read


def reopen_attempt(attempt: AttemptDir) -> AttemptDir:
    """Create the next attempt with the config and plan of this one; raises as `read_trusted`, and OSError."""
    return open_attempt(attempt.run, *map(read_trusted, (attempt.config_file, attempt.plan_file)))


def discard_attempt(attempt: AttemptDir) -> None:
    """Remove the newest attempt, which never started; the previous one becomes the newest again."""
    run = attempt.run
    shutil.rmtree(attempt.path, ignore_errors=True)
    earlier = run.attempt_numbers()
    if not earlier:
        return
    before = run.attempt(earlier[-1])
    with contextlib.suppress(OSError):  # on a full disk the run's files may never have been replaced
        before.make_latest()
        for own, newest in (
            (before.config_file, run.config_file),
            (before.plan_file, run.plan_file),
            (before.script_file, run.script_file),
        ):
            if own.exists():
                write_atomic(newest, read_trusted(own))


def copied_file(run: RunDir, name: str) -> Path:
    """The copy of a file in the run's code snapshot, else the file itself.

    A relative `name` refers to the folder that the run was submitted from, which may be gone.
    """
    original, (folder, code) = Path(name).absolute(), _snapshot(run)
    if code is None:
        return original
    inside = os.path.relpath(Path(folder, name), folder)
    copied = Path(os.path.normpath(Path(code.workdir) / inside))
    return copied if copied.is_relative_to(code.code) and copied.is_file() else original


def copied_folder(run: RunDir) -> Path:
    """The folder of the code snapshot that corresponds to that of the submission, else the current folder."""
    code = _snapshot(run)[1]
    return Path.cwd() if code is None else Path(code.workdir)


def _snapshot(run: RunDir) -> tuple[str, CodeCopy | None]:
    """The folder that a run was submitted from, and where its code snapshot is; None if it has none.

    Raises ValueError for a damaged job.json: the ranks would run other code than that of the run.
    """
    try:
        content = read_json(run.job_file)
    except FileNotFoundError:
        return str(Path.cwd()), None
    if not isinstance(content, dict):
        raise ValueError(f"{run.job_file} is damaged: it has no JSON object")
    job = read_record(JobRecord, content)
    return job.cwd or str(Path.cwd()), job.code
