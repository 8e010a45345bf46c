"""job.json: the attempts of a run, and the job and process of each."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.run.end import (
    read_end,
    will_resume,
)
from trainkit.run.files import (
    read_json,
    utc_now,
    write_atomic,
    write_json,
)
from trainkit.run.process import (
    own_host,
    process_identity,
)
from trainkit.run.rundir import (
    AttemptDir,
    RunDir,
)
from trainkit.slurm.conf_file import cluster_name

AUTO_RESTART = "comeback"
"""The reason, in job.json, of an attempt that the supervisor starts without a command."""


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


def copied_file(run: RunDir, name: str) -> Path:
    """The copy of a file in the run's code snapshot, else the file itself.

    A relative `name` refers to the folder that the run was submitted from, which may be gone.
    """
    original, (folder, code) = Path(name).absolute(), _snapshot(run)
    if code is None:
        return original
    inside = os.path.relpath(Path(folder, name), folder)
    copied = Path(os.path.normpath(Path(code["workdir"]) / inside))
    return copied if copied.is_relative_to(code["code"]) and copied.is_file() else original


def copied_folder(run: RunDir) -> Path:
    """The folder of the code snapshot that corresponds to that of the submission, else the current folder."""
    code = _snapshot(run)[1]
    return Path.cwd() if code is None else Path(code["workdir"])


def _snapshot(run: RunDir) -> tuple[str, dict[str, Any] | None]:
    """The folder that a run was submitted from, and where its code snapshot is; None if it has none."""
    try:
        job = read_json(run.job_file)
    except FileNotFoundError:
        return str(Path.cwd()), None
    return str(job.get("cwd") or Path.cwd()), job.get("code") or None
