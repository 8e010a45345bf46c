"""job.json: the attempts of a run, the job and process of each, and whether that process is alive.

A process is identified by its host, boot id, pid and start time, because pids are reused. Processes of other
hosts cannot be seen from here.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainkit.errors import TrainkitError, UsageError
from trainkit.job.rank_env import own_host
from trainkit.locks import (
    NEEDS_FLOCK,
    LockBusy,
    LockStopped,
    LockUnsupported,
    acquire_lock,
    file_lock,
    release_lock,
)
from trainkit.rundir import (
    PROC,
    RESUME_ACTIONS,
    AttemptDir,
    RunDir,
    process_stat,
    read_end,
    read_json,
    read_jsonl,
    utc_now,
    will_resume,
    write_atomic,
    write_json,
)
from trainkit.slurm.conf_file import cluster_name

AUTO_RESTART = "comeback"
"""The reason, in job.json, of an attempt that the supervisor starts without a command."""

KILLED = "killed by cancel --now"
"""The reason, in end.json, of an end without a save."""


class Liveness(str, enum.Enum):
    """Whether a process is alive, as far as this host can tell."""

    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"


def process_identity(pid: int) -> dict[str, Any]:
    """The identity of a process on this host: ``host, boot_id, pid, start_ticks``.

    Raises ProcessLookupError when there is no such process.
    """
    stat = process_stat(pid)
    if stat is None:
        raise ProcessLookupError(pid)
    return {
        "host": os.uname().nodename,
        "boot_id": _boot_id(),
        "pid": pid,
        "start_ticks": stat.start_ticks,
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
        stat = process_stat(entry["pid"])
    except OSError:
        return Liveness.UNKNOWN
    alive = stat is not None and stat.state not in "ZX" and stat.start_ticks == entry.get("start_ticks")
    return Liveness.ALIVE if alive else Liveness.GONE


def _boot_id() -> str:
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class RunLocked(TrainkitError):
    """A lock of a run is still held by another process; with `stopped`, a stop signal ended the wait."""

    def __init__(self, file: Path, busy: LockBusy) -> None:
        hint = f"if the host of that process is down for good, remove {file}"
        super().__init__(str(busy), hint)
        self.stopped = isinstance(busy, LockStopped)


@contextmanager
def run_lock(run: RunDir, timeout_s: float | None = None) -> Iterator[None]:
    """Hold the run's lock, so that only one command at a time changes what the run does next.

    Raises UsageError when the folder cannot be written or locked; RunLocked when another process still has
    the lock after `timeout_s` or a stop signal ends the wait, as `acquire_lock` describes.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(file_lock(run.lock_file, timeout_s))
        except LockBusy as busy:
            raise RunLocked(run.lock_file, busy) from None
        except LockUnsupported as error:
            raise UsageError(
                f"{run.lock_file} cannot be locked: {error.strerror}",
                hint=NEEDS_FLOCK,
            ) from error
        except OSError as error:
            raise UsageError(
                f"{run.path} cannot be changed: {error.strerror}",
                hint="only users with write access to its folder can control a run",
            ) from error
        yield


def become_sole_supervisor(run: RunDir, timeout_s: float) -> None:
    """Lock the run for this supervisor until it exits; raises RunLocked like `run_lock`.

    Two supervisors in one folder would damage the run, and job.json, which can be lost or edited, does not
    prevent that.
    """
    try:
        acquire_lock(run.supervisor_lock_file, timeout_s)  # held until this process exits
    except LockBusy as busy:
        raise RunLocked(run.supervisor_lock_file, busy) from None


def is_supervised(run: RunDir) -> bool:
    """Whether some process holds the lock of `become_sole_supervisor`."""
    try:
        descriptor = acquire_lock(run.supervisor_lock_file, 0.0)
    except BlockingIOError:
        return True
    release_lock(descriptor)
    return False


def submission_token(run: RunDir, attempt: int, follow_up: int = 0) -> str:
    """The unique token in the comment of an attempt's job, by which it is found if sbatch's answer is lost.

    Each follow-up job has its own; they are counted from 1.
    """
    key = f"{run.path}/{attempt}" + (f"+{follow_up}" if follow_up else "")
    return f"trainkit:{hashlib.sha256(key.encode(errors='surrogateescape')).hexdigest()[:16]}"


def submitit_file(run: RunDir, job_id: str, name: str) -> Path:
    """The path of a submitit file of a job; it exists only for jobs that submitit submitted."""
    return run.path / "submitit" / f"{job_id}_{name}"


def copy_submitit_files(run: RunDir, job_id: str, new_id: str) -> None:
    """Copy the submitit files of a job to a new one, whose script looks for a pickle named after its id."""
    for name in ("submitted.pkl", "submission.sh"):
        file = submitit_file(run, job_id, name)
        if file.exists():
            shutil.copyfile(file, submitit_file(run, new_id, name))


def create_job(run: RunDir, *, backend: str, name: str, cwd: str, code: Mapping[str, Any] | None) -> None:
    """Write the job.json of a new run, with no attempts."""
    write_json(run.job_file, {"backend": backend, "name": name, "cwd": cwd, "code": code, "attempts": []})


def read_job(run: RunDir) -> dict[str, Any]:
    """The content of job.json; with no attempts if the file is missing or unreadable."""
    try:
        return read_job_to_change(run)
    except OSError:
        return {"backend": None, "name": run.name, "attempts": []}


def read_job_to_change(run: RunDir) -> dict[str, Any]:
    """The content of job.json, to be written back: raises OSError if it cannot be read."""
    try:
        job = read_json(run.job_file)
    except (FileNotFoundError, ValueError):
        job = None
    if not isinstance(job, dict) or not isinstance(job.get("attempts"), list):
        job = {}
    entries = [entry for entry in job.get("attempts", []) if _is_entry(entry)]
    return {"backend": None, **job, "name": str(job.get("name") or run.name), "attempts": entries}


def _is_entry(value: object) -> bool:
    """Whether a value is a valid entry of an attempt: a file edited by hand may contain anything."""
    return isinstance(value, dict) and isinstance(value.get("attempt"), int) and "job_id" in value


def newest_entry(run: RunDir) -> dict[str, Any] | None:
    """The entry of the newest attempt; None without attempts."""
    entries = read_job(run)["attempts"]
    return entries[-1] if entries else None


def find_entry(run: RunDir, attempt: int) -> dict[str, Any] | None:
    """The entry of one attempt; None if it has none."""
    return next((entry for entry in read_job(run)["attempts"] if entry["attempt"] == attempt), None)


def superseding_entry(attempt: AttemptDir) -> dict[str, Any] | None:
    """The newest entry if it is that of a later attempt, which has taken the run over; else None."""
    newest = newest_entry(attempt.run)
    return newest if newest is not None and newest["attempt"] > attempt.number else None


def describe_superseded(entry: Mapping[str, Any]) -> str:
    """Why an attempt ends, for the entry that `superseding_entry` returned."""
    return f"superseded: attempt {entry['attempt']} in job {entry['job_id']} has taken the run over"


def add_entry(run: RunDir, attempt: int, pid: int, reason: str) -> dict[str, Any]:
    """Record that the supervisor `pid` on this host runs an attempt; returns the entry.

    `reason` is the command that started it, ``submit run requeue resume``, or `AUTO_RESTART`. Call with the
    lock held.
    """
    entry = {
        "attempt": attempt,
        "job_id": f"local-{pid}",
        "submitted_at": utc_now(),
        **process_identity(pid),
        "reason": reason,
    }
    _append_entry(run, entry)
    return entry


def add_slurm_entry(
    run: RunDir, attempt: int, job_id: str, reason: str, backend: str, **more: Any
) -> dict[str, Any]:
    """Record that a Slurm job will run an attempt; returns the entry. Call with the lock held."""
    # Of several clusters Slurm chooses one, and only the answer of sbatch would name it.
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
    _append_entry(run, entry)
    return entry


def _append_entry(run: RunDir, entry: dict[str, Any]) -> None:
    job = read_job_to_change(run)
    job["attempts"].append(entry)
    write_json(run.job_file, job)


def claim_entry(run: RunDir, attempt: int, pid: int) -> None:
    """Record which process of the Slurm job runs an attempt; call with the lock held."""
    job = read_job_to_change(run)
    for entry in job["attempts"]:
        if entry["attempt"] == attempt:
            entry |= {**process_identity(pid), "node": own_host(), "started_at": utc_now()}
    write_json(run.job_file, job)


def waiting_follow_ups(run: RunDir) -> list[str]:
    """The follow-up jobs that have not started an attempt, in order; some may have left the queue."""
    job = read_job(run)
    started = {entry["job_id"] for entry in job["attempts"]}
    return [str(job_id) for job_id in job.get("follow_ups") or [] if job_id not in started]


def set_follow_ups(run: RunDir, job_ids: list[str]) -> None:
    """Record the jobs that wait to continue the run; call with the lock held."""
    write_json(run.job_file, {**read_job_to_change(run), "follow_ups": job_ids})


def is_slurm(entry: Mapping[str, Any]) -> bool:
    """Whether an entry belongs to a Slurm job, whose state only Slurm knows."""
    return entry.get("backend") in ("sbatch", "submitit", "srun")


def has_started(entry: Mapping[str, Any]) -> bool:
    """Whether the supervisor of an entry has begun: Slurm can end a job before that."""
    return not is_slurm(entry) or "started_at" in entry


def num_auto_restarts(run: RunDir) -> int:
    """The number of automatic restarts since a command last started the run."""
    reasons = [entry.get("reason") for entry in read_job(run)["attempts"]]
    return len(list(itertools.takewhile(lambda reason: reason == AUTO_RESTART, reversed(reasons))))


def is_exiting(run: RunDir, entry: Mapping[str, Any]) -> bool:
    """Whether the supervisor of an entry has recorded the end of the run and only has to exit."""
    end = read_end(run.attempt(entry["attempt"]))
    return end is not None and not will_resume(end)


def mark_cancelled(run: RunDir, *, now: bool = False) -> None:
    """Record that the user cancelled the newest attempt; call with the lock held.

    `now` means that it does not save.
    """
    job = read_job_to_change(run)
    job["attempts"][-1]["cancelled_at"] = utc_now()
    if now:
        job["attempts"][-1]["cancelled_now"] = True
    write_json(run.job_file, job)


def mark_requeue_requested(run: RunDir, *, requested: bool = True) -> None:
    """Record whether the user wants the newest attempt saved and restarted; call with the lock held.

    The signal alone can be lost: between two steps no process receives it.
    """
    job = read_job_to_change(run)
    job["attempts"][-1].pop("requeue_requested_at", None)
    if requested:
        job["attempts"][-1]["requeue_requested_at"] = utc_now()
    write_json(run.job_file, job)


def is_cancelled(attempt: AttemptDir) -> bool:
    """Whether the user cancelled an attempt."""
    return "cancelled_at" in (find_entry(attempt.run, attempt.number) or {})


def is_cancelled_now(attempt: AttemptDir) -> bool:
    """Whether the user cancelled an attempt without a save."""
    return bool((find_entry(attempt.run, attempt.number) or {}).get("cancelled_now"))


def next_attempt_number(run: RunDir) -> int:
    """The number of the attempt that `open_attempt` would create."""
    return max(run.attempt_numbers(), default=0) + 1


def open_attempt(run: RunDir, config_text: str, plan_text: str) -> AttemptDir:
    """Create the run's next attempt; its config, plan and launcher files also become those of the run.

    Raises FileExistsError when another command has already created it, OSError when it cannot be written.
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
        for name, text in _launcher_files(plan_text).items():
            write_atomic(attempt.path / name, text)
            write_atomic(run.path / name, text)
    except OSError:
        discard_attempt(attempt)
        raise
    return attempt


def _launcher_files(plan_text: str) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads(plan_text).get("launcher_files", {})
    except ValueError:
        return {}  # the attempt ends with that as its reason, which its owner can read
    return found


def reopen_attempt(attempt: AttemptDir) -> AttemptDir:
    """Create the next attempt with the config and plan of this one."""
    texts = [file.read_text(encoding="utf-8") for file in (attempt.config_file, attempt.plan_file)]
    return open_attempt(attempt.run, *texts)


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
                write_atomic(newest, own.read_text(encoding="utf-8"))


WITHOUT_RECORD = "ended without a record"


def is_guessed(end: Mapping[str, Any]) -> bool:
    """Whether a later start of the job wrote this end.json, since the attempt left no record of its end."""
    return str(end.get("reason")).startswith(WITHOUT_RECORD)


ACTIONS = ("finished", "stopped", "failed", *RESUME_ACTIONS)
"""The values of `action` in end.json."""


def end_line(attempt: int, action: str, reason: str) -> str:
    """The line of its log with which an attempt ends: what Slurm writes below it is about a later one."""
    return f"attempt {attempt}: {action}: {reason}"


def is_end_line(line: str, attempt: int) -> bool:
    """Whether a line of a log is the `end_line` of an attempt."""
    return line.startswith(tuple(end_line(attempt, action, "") for action in ACTIONS))


SLOWDOWN_EVENTS = ("slow_rank", "slow_rank_over", "slow_run", "slow_run_over")


def open_slowdowns(run: RunDir, attempt: int) -> list[dict[str, Any]]:
    """The events of ranks of an attempt, or of the whole run, that became slow and still are."""
    return still_slow(read_jsonl(run.events_file, SLOWDOWN_EVENTS), attempt)


def still_slow(events: Iterable[dict[str, Any]], attempt: int) -> list[dict[str, Any]]:
    """As `open_slowdowns`, from the `SLOWDOWN_EVENTS` of a run."""
    found: dict[object, dict[str, Any]] = {}
    for event in events:
        if event.get("attempt") == attempt and event.get("event") in SLOWDOWN_EVENTS:
            found.pop(event.get("rank"), None)
            if event.get("event") in ("slow_rank", "slow_run"):
                found[event.get("rank")] = event
    return list(found.values())


SILENCE_EVENTS = ("silent", "silent_over")
"""What the supervisor logs of a COMMAND that prints nothing, and of its next output."""
SAVE_EVENTS = ("checkpoint_commit", "checkpoint_failed")
FAILED_SAVES = 2
"""So many saves that fail in a row are reported: one may fail for a moment."""


def failed_in_a_row(failed: list[dict[str, Any]], event: dict[str, Any]) -> list[dict[str, Any]]:
    """The newest saves of one attempt, as far as all of them failed, after one more of `SAVE_EVENTS`."""
    if event.get("event") != "checkpoint_failed":
        return []
    return [*(one for one in failed if one.get("attempt") == event.get("attempt")), event]
