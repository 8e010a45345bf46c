"""The run folder: its paths, and functions that write, read and wait for its files.

All writers use `write_atomic` (whole files) or `append_jsonl` (whole lines), so a reader never sees a partial
file or line, except for a line cut off by a crash, which `read_jsonl` skips.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from trainkit.folders import ensure_folder
from trainkit.jsonl import append_jsonl as append_jsonl
from trainkit.jsonl import read_jsonl as read_jsonl
from trainkit.jsonl import read_jsonl_reversed as read_jsonl_reversed


def utc_now() -> str:
    """The current time in the format of the run's files."""
    return as_utc(datetime.now(timezone.utc))


def as_utc(time: datetime, timespec: str = "milliseconds") -> str:
    """A timezone-aware time in the format of the run's files: ISO-8601, UTC."""
    return time.astimezone(timezone.utc).isoformat(timespec=timespec).replace("+00:00", "Z")


def parse_time(text: object) -> datetime | None:
    """Parse a time from a run's file; None if it is not a time."""
    if not isinstance(text, str):
        return None
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None


def seconds_between(start: object, end: datetime | None) -> float | None:
    """Seconds from `start`, in the format of the run's files, to `end`; None if either is unknown."""
    started = parse_time(start)
    return None if started is None or end is None else (end - started).total_seconds()


RUNS_FOLDER = "runs"
CHECKPOINT_PREFIX = "step-"
PARTIAL_SUFFIX = ".partial"
REJECTED_SUFFIX = ".rejected"
RESUME_ACTIONS = ("restart", "requeue", "resubmit", "follow_up")
"""The actions in end.json after which the run resumes without a command."""


class RunDir:
    """The paths of one run folder."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config_file(self) -> Path:
        """The effective config of the newest attempt."""
        return self.path / "config.yaml"

    @property
    def plan_file(self) -> Path:
        """The launch plan of the newest attempt."""
        return self.path / "plan.json"

    @property
    def provenance_file(self) -> Path:
        return self.path / "provenance.json"

    @property
    def job_file(self) -> Path:
        return self.path / "job.json"

    @property
    def script_file(self) -> Path:
        """The batch script of the newest attempt."""
        return self.path / "submit.sbatch"

    @property
    def step_file(self) -> Path:
        """The argv of the step that a submitit job starts, as JSON."""
        return self.path / "step.json"

    @property
    def code_dir(self) -> Path:
        """The snapshot of the code at submission."""
        return self.path / "code"

    @property
    def work_dir(self) -> Path:
        """The folder in which a command runs, made from the snapshot at its first start."""
        return self.path / "work"

    @property
    def work_file(self) -> Path:
        """Which snapshot the files in `work_dir` come from."""
        return self.path / "work.json"

    @property
    def events_file(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def heartbeat_file(self) -> Path:
        """A command that prints nothing for long writes or touches it, to show that it does not hang."""
        return self.path / "heartbeat"

    @property
    def tensorboard_dir(self) -> Path:
        return self.path / "tensorboard"

    @property
    def trackers_dir(self) -> Path:
        """How far each tracker, such as MLflow, has the metrics."""
        return self.path / "trackers"

    def health_file(self, host: str) -> Path:
        """Samples of a node: processors, memory, network, disks and GPUs."""
        return self.path / "health" / f"{host}.jsonl"

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    @property
    def attempts_dir(self) -> Path:
        return self.path / "attempts"

    @property
    def lock_file(self) -> Path:
        """Locked while a command changes what the run does next."""
        return self.path / ".lock"

    @property
    def supervisor_lock_file(self) -> Path:
        """Locked by the run's supervisor until it exits."""
        return self.path / ".supervisor.lock"

    def checkpoint_dir(self, step: int) -> Path:
        return self.checkpoints_dir / f"{CHECKPOINT_PREFIX}{step:08d}"

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self, number)

    def latest_number(self) -> int | None:
        """The attempt that ``attempts/latest`` points to; None without the link."""
        try:
            name = (self.attempts_dir / "latest").readlink().name
        except OSError:
            return None
        return int(name) if name.isdigit() else None

    def attempt_numbers(self) -> list[int]:
        """The numbers of the existing attempts, oldest first; they start at 1."""
        if not self.attempts_dir.is_dir():
            return []
        return sorted(int(p.name) for p in self.attempts_dir.iterdir() if p.name.isdigit())

    def exists(self) -> bool:
        """Whether this folder exists and contains a run."""
        return self.config_file.is_file() and self.attempts_dir.is_dir()


class AttemptDir:
    """The paths of one attempt: one start of the workers, with its config and plan."""

    def __init__(self, run: RunDir, number: int) -> None:
        self.run = run
        self.number = number
        self.path = run.attempts_dir / f"{number:03d}"

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def logs_dir(self) -> Path:
        return self.path / "logs"

    @property
    def supervisor_log(self) -> Path:
        return self.logs_dir / "supervisor.log"

    @property
    def trackers_log(self) -> Path:
        return self.logs_dir / "trackers.log"

    @property
    def batch_host_log(self) -> Path:
        """Separate from the supervisor's log, in which srun's messages about tasks refer to the ranks."""
        return self.logs_dir / "batch-host.log"

    def node_log(self, node_rank: int) -> Path:
        return self.logs_dir / f"node-{node_rank:04d}.log"

    def rank_log(self, rank: int) -> Path:
        return self.logs_dir / f"rank-{rank:04d}.log"

    @property
    def errors_dir(self) -> Path:
        return self.path / "errors"

    def rank_error(self, rank: int) -> Path:
        return self.errors_dir / f"rank-{rank:04d}.json"

    @property
    def hangs_dir(self) -> Path:
        """Created by the first rank that hangs."""
        return self.path / "hangs"

    def rank_hang(self, rank: int) -> Path:
        return self.hangs_dir / f"rank-{rank:04d}.json"

    @property
    def stacks_dir(self) -> Path:
        return self.path / "stacks"

    def rank_stacks(self, rank: int) -> Path:
        return self.stacks_dir / f"rank-{rank:04d}.txt"

    @property
    def profile_dir(self) -> Path:
        return self.path / "profile"

    def rank_profile(self, rank: int) -> Path:
        return self.profile_dir / f"rank-{rank:04d}.json"

    @property
    def ranks_dir(self) -> Path:
        return self.path / "ranks"

    def rank_record(self, rank: int) -> Path:
        """What a rank computed by itself, on the steps that were logged."""
        return self.ranks_dir / f"rank-{rank:04d}.jsonl"

    @property
    def done_file(self) -> Path:
        """Created by a command to say that it is done: exit code 0 after a notice then means finished."""
        return self.path / "done"

    @property
    def rendezvous_file(self) -> Path:
        """The address at which the ranks of a Slurm step connect; empty until its first task writes it."""
        return self.path / "rendezvous.json"

    @property
    def script_file(self) -> Path:
        """The batch script that was submitted for this attempt."""
        return self.path / "submit.sbatch"

    @property
    def end_file(self) -> Path:
        """How the attempt ended; absent while it runs and if its supervisor was killed."""
        return self.path / "end.json"

    def create(self) -> None:
        """Create the folders of a new attempt.

        Raises FileExistsError when another command has already created it, OSError when it cannot be written.
        """
        ensure_folder(self.run.attempts_dir, 0o700)
        self.path.mkdir(mode=0o700)
        try:
            for folder in (self.logs_dir, self.errors_dir):
                folder.mkdir(mode=0o700)
            self.make_latest()
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)  # a partial folder would count as an attempt
            raise

    def make_latest(self) -> None:
        """Point the symlink ``attempts/latest`` to this attempt."""
        latest = self.run.attempts_dir / "latest"
        staged = self.run.attempts_dir / f".latest-{self.number:03d}"
        staged.unlink(missing_ok=True)  # of a command that was killed before the next lines
        staged.symlink_to(self.path.name)
        staged.replace(latest)


def read_end(attempt: AttemptDir) -> dict[str, Any] | None:
    """The content of end.json; None while the attempt runs and if its supervisor was killed."""
    try:
        end = read_json(attempt.end_file)
    except (OSError, ValueError):
        return None
    return end if isinstance(end, dict) else None


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


def will_resume(end: Mapping[str, Any]) -> bool:
    """Whether the run resumes automatically after this end.json."""
    return end.get("action") in RESUME_ACTIONS


def write_atomic(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees either the old or the new content."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write one JSON value atomically, indented, with keys in their given order."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """The JSON value in a file; raises OSError if it cannot be read, ValueError if it is not JSON."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_json_in_place(path: Path, value: Any) -> None:
    """Write one JSON value into a file for which other hosts wait with `wait_for_json`; creates it if needed.

    The file stays the one that they have opened before. A reader may see a part of it: it is then not JSON.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


WAIT_POLL_S = 0.05
LONGEST_POLL_S = 1.0
"""Every node of a job may wait for the same file, on one file server."""


def wait_for_json(
    path: Path,
    timeout_s: float,
    *,
    accept: Callable[[Any], bool] = lambda value: True,
    pause: Callable[[float], object] = time.sleep,
    creates: bool = False,
) -> Any:
    """Wait until a file that another host writes is visible and `accept` is true; returns its JSON value.

    An NFS client remembers for up to a minute that a name is missing, but asks the server about a file that
    exists each time it is opened. With `creates`, the file is created empty if it is missing, for the other
    host to write it in place. Raises TimeoutError, with the reason, if the value does not appear in time.
    `pause` may raise to stop.
    """
    deadline_s, pause_s = time.monotonic() + timeout_s, WAIT_POLL_S
    while True:
        try:
            value = read_json(path) if not creates else _read_or_create(path)
            if accept(value):
                return value
            reason = "it is from another start"
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = str(error)
        if time.monotonic() > deadline_s:
            raise TimeoutError(reason)
        pause(pause_s)
        pause_s = min(LONGEST_POLL_S, 1.5 * pause_s)


def _read_or_create(path: Path) -> Any:
    """The JSON value in a file, which is created empty if it is missing."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), encoding="utf-8") as stream:
        return json.loads(stream.read())


def refresh_listing(folder: Path) -> None:
    """Have the next listing of a folder come from the server.

    An NFS client may list a folder as it was up to a minute ago, unless it has changed the folder itself.
    """
    # On a full or unwritable disk, or without the folder, the listing is as good as it was.
    with contextlib.suppress(OSError):
        handle, name = tempfile.mkstemp(prefix=".refresh.", dir=folder)
        os.close(handle)
        os.unlink(name)


@dataclass(frozen=True)
class ProcessStat:
    """A process as the kernel describes it in ``/proc/PID/stat``."""

    state: str
    """One letter, such as ``T`` for stopped and ``Z`` for a zombie."""
    parent_pid: int
    start_ticks: int
    """Start time in clock ticks since boot: together with the pid it identifies the process."""


PROC = Path("/proc")


def process_stat(pid: int) -> ProcessStat | None:
    """The kernel's state of a process; None if there is no such process. Raises OSError if unreadable."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name is in parentheses and may itself contain parentheses and spaces.
    fields = text.rpartition(")")[2].split()
    return ProcessStat(fields[0], int(fields[1]), int(fields[19]))


def log_event(run: RunDir, attempt: int, event: str, **fields: Any) -> None:
    """Append one event to the run's `events.jsonl`."""
    append_jsonl(run.events_file, {"time": utc_now(), "attempt": attempt, "event": event, **fields})


def read_metrics(run: RunDir) -> list[dict[str, Any]]:
    """The training curve: one record per step, the last one written if a step was computed twice."""
    by_step: dict[int, dict[str, Any]] = {}
    for record in read_jsonl(run.metrics_file):
        if isinstance(record.get("step"), int):
            by_step[record["step"]] = record
    return [by_step[step] for step in sorted(by_step)]


def best_result(run: RunDir, events: Iterable[dict[str, Any]] | None = None) -> dict[str, Any] | None:
    """The lowest validation loss of a run, else its newest loss, as ``metric, value, step``; None without.

    `events` are all ``evaluated`` events of the run, for callers that have already read them.
    """
    evaluated = [
        record
        for record in (read_jsonl(run.events_file, ["evaluated"]) if events is None else events)
        if record.get("event") == "evaluated" and isinstance(record.get("val_loss"), (int, float))
    ]
    if evaluated:
        best = min(evaluated, key=lambda record: record["val_loss"])
        return {"metric": "val_loss", "value": best["val_loss"], "step": best.get("step")}
    for record in read_jsonl_reversed(run.metrics_file, ["loss"]):
        if isinstance(record.get("loss"), (int, float)):
            return {"metric": "loss", "value": record["loss"], "step": record.get("step")}
    return None


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_STATE_HOME/trainkit``; it may not exist yet."""
    default = Path(environ.get("HOME") or "~").expanduser() / ".local/state"
    return Path(environ.get("XDG_STATE_HOME") or default) / "trainkit"
