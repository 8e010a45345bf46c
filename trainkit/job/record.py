"""job.json: which process carries each attempt of a run, and whether that process is still there.

A process is named by host, boot, pid and start time together. A pid alone can belong to somebody else
by the time it is looked at, and what another host is doing cannot be seen from here.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import itertools
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainkit.errors import UsageError
from trainkit.job.rank_env import own_host
from trainkit.rundir import (
    AttemptDir,
    RunDir,
    goes_on,
    read_end,
    read_json,
    utc_now,
    write_atomic,
    write_json,
)
from trainkit.slurm.conf_file import cluster_name

PROC = Path("/proc")
COMEBACK = "comeback"
"""The reason of an attempt that the supervisor starts itself."""

KILLED = "killed by cancel --now"
"""The reason of an end that was not to wait for anything to be saved."""


class Liveness(str, enum.Enum):
    """Whether a process is there, as far as this host can know."""

    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"


def process_identity(pid: int) -> dict[str, Any]:
    """What names a process of this host for good: ``host, boot_id, pid, start_ticks``.

    Raises ProcessLookupError when there is no such process.
    """
    state_and_start = _stat(pid)
    if state_and_start is None:
        raise ProcessLookupError(pid)
    return {
        "host": os.uname().nodename,
        "boot_id": _boot_id(),
        "pid": pid,
        "start_ticks": state_and_start[1],
    }


def liveness(entry: Mapping[str, Any]) -> Liveness:
    """Whether the process of a job.json entry is alive; UNKNOWN when this host cannot tell."""
    if entry.get("host") != os.uname().nodename or not isinstance(entry.get("pid"), int):
        return Liveness.UNKNOWN
    boot_id = _boot_id()
    if not boot_id:
        return Liveness.UNKNOWN
    if entry.get("boot_id") != boot_id:
        return Liveness.GONE
    try:
        found = _stat(entry["pid"])
    except OSError:
        return Liveness.UNKNOWN
    alive = found is not None and found[0] not in "ZX" and found[1] == entry.get("start_ticks")
    return Liveness.ALIVE if alive else Liveness.GONE


def _boot_id() -> str:
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start time in clock ticks since boot; None when there is no such process."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name stands in brackets and may hold brackets and spaces itself.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


@contextmanager
def run_lock(run: RunDir) -> Iterator[None]:
    """Hold the run's lock, so that two commands cannot both decide what it does next.

    Raises UsageError when the folder cannot be written.
    """
    try:
        descriptor = os.open(run.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(
            f"{run.path} cannot be changed: {error.strerror}",
            hint="a run can be steered by who may write to its folder",
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise UsageError(
                f"{run.lock_file} cannot be locked: {error.strerror}",
                hint="the run folder has to be on a filesystem with flock, as Lustre is with `-o flock`",
            ) from error
        yield
    finally:
        os.close(descriptor)


def become_sole_supervisor(run: RunDir, timeout_s: float = 10.0) -> bool:
    """Whether this process is now the run's only supervisor, and stays it until it ends.

    job.json can be lost or edited; this cannot, and two trainings in one folder would spoil both. One that is
    on its way out is waited for.
    """
    descriptor = os.open(run.supervisor_lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                os.close(descriptor)
                return False
            time.sleep(0.05)


def read_job(run: RunDir) -> dict[str, Any]:
    """The job record; one without attempts where there is none or it cannot be read."""
    try:
        return read_job_to_change(run)
    except OSError:
        return {"backend": None, "name": run.name, "attempts": []}


def read_job_to_change(run: RunDir) -> dict[str, Any]:
    """The job record for who changes it: one that is there and cannot be read now must not be replaced.

    Raises OSError.
    """
    try:
        job = read_json(run.job_file)
    except (FileNotFoundError, ValueError):
        job = None
    if not isinstance(job, dict) or not isinstance(job.get("attempts"), list):
        job = {}
    entries = [entry for entry in job.get("attempts", []) if _is_entry(entry)]
    return {"backend": None, **job, "name": str(job.get("name") or run.name), "attempts": entries}


def _is_entry(value: object) -> bool:
    """Whether this is an attempt as `add_entry` writes it; by hand or by a bad disk it can be anything."""
    return isinstance(value, dict) and isinstance(value.get("attempt"), int) and "job_id" in value


def newest_entry(run: RunDir) -> dict[str, Any] | None:
    """The entry of the newest attempt."""
    entries = read_job(run)["attempts"]
    return entries[-1] if entries else None


def find_entry(run: RunDir, attempt: int) -> dict[str, Any] | None:
    """The entry of one attempt."""
    return next((entry for entry in read_job(run)["attempts"] if entry["attempt"] == attempt), None)


def add_entry(run: RunDir, attempt: int, pid: int, reason: str) -> dict[str, Any]:
    """Write down that the supervisor `pid` of this host carries an attempt; call with the lock held.

    `reason` is the command that a person typed, ``submit run requeue resume``, or `COMEBACK`.
    """
    entry = {
        "attempt": attempt,
        "job_id": f"local-{pid}",
        "submitted_at": utc_now(),
        **process_identity(pid),
        "reason": reason,
    }
    job = read_job_to_change(run)
    job["attempts"].append(entry)
    write_json(run.job_file, job)
    return entry


def add_slurm_entry(
    run: RunDir, attempt: int, job_id: str, reason: str, backend: str, **more: Any
) -> dict[str, Any]:
    """Write down that a Slurm job is to carry an attempt; call with the lock held."""
    # Of several Slurm chooses one, and only the answer of sbatch would tell which.
    cluster = None if "," in os.environ.get("SLURM_CLUSTERS", "") else cluster_name()
    entry = {
        "attempt": attempt,
        "job_id": job_id,
        **({} if cluster is None else {"cluster": cluster}),
        "submitted_at": utc_now(),
        "backend": backend,
        "reason": reason,
        **more,
    }
    job = read_job_to_change(run)
    job["attempts"].append(entry)
    write_json(run.job_file, job)
    return entry


def claim_entry(run: RunDir, attempt: int, pid: int) -> None:
    """Write down which process of the Slurm job has taken an attempt; call with the lock held."""
    job = read_job_to_change(run)
    for entry in job["attempts"]:
        if entry["attempt"] == attempt:
            entry |= {**process_identity(pid), "node": own_host(), "started_at": utc_now()}
    write_json(run.job_file, job)


def is_slurm(entry: Mapping[str, Any]) -> bool:
    """Whether an entry is of a Slurm job, whose life only Slurm knows."""
    return entry.get("backend") in ("sbatch", "submitit", "srun")


def num_comebacks(run: RunDir) -> int:
    """How often the job has come back by itself since a person started it."""
    reasons = [entry.get("reason") for entry in read_job(run)["attempts"]]
    return len(list(itertools.takewhile(lambda reason: reason == COMEBACK, reversed(reasons))))


def is_leaving(run: RunDir, entry: Mapping[str, Any]) -> bool:
    """Whether a supervisor has written how its job ended, so that all it still does is exit."""
    end = read_end(run.attempt(entry["attempt"]))
    return end is not None and not goes_on(end)


def mark_cancelled(run: RunDir, *, now: bool = False) -> None:
    """Write down that the user wants the newest attempt to end for good; call with the lock held.

    `now` is the wish that nothing be saved first.
    """
    job = read_job_to_change(run)
    job["attempts"][-1]["cancelled_at"] = utc_now()
    if now:
        job["attempts"][-1]["cancelled_now"] = True
    write_json(run.job_file, job)


def is_cancelled(attempt: AttemptDir) -> bool:
    """Whether the user wants an attempt to end for good."""
    return "cancelled_at" in (find_entry(attempt.run, attempt.number) or {})


def is_cancelled_now(attempt: AttemptDir) -> bool:
    """Whether the user wants an attempt to end at once, whatever is lost."""
    return bool((find_entry(attempt.run, attempt.number) or {}).get("cancelled_now"))


def next_attempt_number(run: RunDir) -> int:
    """The number of the attempt that `open_attempt` would make."""
    return max(run.attempt_numbers(), default=0) + 1


def open_attempt(run: RunDir, config_text: str, plan_text: str) -> AttemptDir:
    """Make the run's next attempt, whose config and plan also become the run's newest ones.

    Raises FileExistsError when another command was faster.
    """
    attempt = run.attempt(next_attempt_number(run))
    attempt.create()
    try:
        for own, newest, text in (
            (attempt.config_file, run.config_file, config_text),
            (attempt.plan_file, run.plan_file, plan_text),
        ):
            write_atomic(own, text)
            write_atomic(newest, text)
    except OSError:
        discard_attempt(attempt)
        raise
    return attempt


def discard_attempt(attempt: AttemptDir) -> None:
    """Remove the newest attempt, which was never started: the one before it is the run's newest again."""
    run = attempt.run
    shutil.rmtree(attempt.path, ignore_errors=True)
    earlier = run.attempt_numbers()
    if not earlier:
        return
    before = run.attempt(earlier[-1])
    with contextlib.suppress(OSError):  # on a full disk the newest files may not have been touched either
        before.make_latest()
        for own, newest in (
            (before.config_file, run.config_file),
            (before.plan_file, run.plan_file),
            (before.script_file, run.script_file),
        ):
            if own.exists():
                write_atomic(newest, own.read_text(encoding="utf-8"))
