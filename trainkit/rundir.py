"""A run is a folder: every path in it and every way to write to it.

All writers go through `write_atomic` (whole files) or `append_jsonl` (whole lines), so a reader never
sees half of anything but a last line cut off by a crash, and `read_jsonl` copes with that one.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any


def utc_now() -> str:
    """Now, as files hold it."""
    return as_utc(datetime.now(timezone.utc))


def as_utc(time: datetime, timespec: str = "milliseconds") -> str:
    """A time that knows its zone, as files hold it."""
    return time.astimezone(timezone.utc).isoformat(timespec=timespec).replace("+00:00", "Z")


def parse_time(text: object) -> datetime | None:
    """A time that a file holds; None for what is none."""
    if not isinstance(text, str):
        return None
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None


def seconds_between(start: object, end: datetime | None) -> float | None:
    """Seconds from a time that a file holds until another; None when one of them is not known."""
    begun = parse_time(start)
    return None if begun is None or end is None else (end - begun).total_seconds()


RUNS_FOLDER = "runs"
CHECKPOINT_PREFIX = "step-"
PARTIAL_SUFFIX = ".partial"
REJECTED_SUFFIX = ".rejected"


COMEBACK_ACTIONS = ("restart", "requeue", "resubmit", "follow_up")
"""What end.json calls an end after which the run goes on by itself."""


class RunDir:
    """The paths of one run."""

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
        """The argv of the step that a submitit job starts."""
        return self.path / "step.json"

    @property
    def code_dir(self) -> Path:
        """The code as it was when the run was submitted."""
        return self.path / "code"

    @property
    def events_file(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard_dir(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    @property
    def attempts_dir(self) -> Path:
        return self.path / "attempts"

    @property
    def lock_file(self) -> Path:
        """Held with flock while a command changes what the run will do next."""
        return self.path / ".lock"

    @property
    def supervisor_lock_file(self) -> Path:
        """Held with flock by the run's supervisor for as long as it lives."""
        return self.path / ".supervisor.lock"

    def checkpoint_dir(self, step: int) -> Path:
        return self.checkpoints_dir / f"{CHECKPOINT_PREFIX}{step:08d}"

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self, number)

    def attempt_numbers(self) -> list[int]:
        """The attempts that exist, oldest first; attempts count from 1."""
        if not self.attempts_dir.is_dir():
            return []
        return sorted(int(p.name) for p in self.attempts_dir.iterdir() if p.name.isdigit())

    def exists(self) -> bool:
        """True when this folder holds a run, not merely when it exists."""
        return self.config_file.is_file() and self.attempts_dir.is_dir()


class AttemptDir:
    """The paths of one attempt: one start of the workers, with the config and plan it ran with."""

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
    def guard_log(self) -> Path:
        """Apart from the supervisor's, in which the end of a task is one of the ranks' step."""
        return self.logs_dir / "guard.log"

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
        """Made by the first rank that comes no further."""
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
    def rendezvous_file(self) -> Path:
        """Where the ranks of a Slurm step meet; written by its first task."""
        return self.path / "rendezvous.json"

    @property
    def script_file(self) -> Path:
        """The batch script that was submitted for this attempt."""
        return self.path / "submit.sbatch"

    @property
    def end_file(self) -> Path:
        """How the attempt ended; absent while it runs and after a death without a word."""
        return self.path / "end.json"

    def create(self) -> None:
        """Make the folders of a new attempt.

        Raises FileExistsError when another command was faster.
        """
        self.run.attempts_dir.mkdir(mode=0o700, exist_ok=True)
        self.path.mkdir(mode=0o700)
        try:
            for folder in (self.logs_dir, self.errors_dir):
                folder.mkdir(mode=0o700)
            self.make_latest()
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)  # half of it would be taken for an attempt
            raise

    def make_latest(self) -> None:
        """Point the link ``attempts/latest`` at this attempt."""
        latest = self.run.attempts_dir / "latest"
        staged = self.run.attempts_dir / f".latest-{self.number:03d}"
        staged.symlink_to(self.path.name)
        staged.replace(latest)


def read_end(attempt: AttemptDir) -> dict[str, Any] | None:
    """How an attempt ended; None while that is not written, and after a death without a word."""
    try:
        end = read_json(attempt.end_file)
    except (OSError, ValueError):
        return None
    return end if isinstance(end, dict) else None


def copied_file(run: RunDir, name: str) -> Path:
    """A file of the code that a run was submitted with, named as from the folder it was submitted from.

    That is the copy; the file itself where there is none of it.
    """
    original = Path(name).absolute()
    try:
        code = read_json(run.job_file).get("code")
    except FileNotFoundError:
        code = None
    if not code:
        return original
    copied = Path(os.path.normpath(Path(code["workdir"]) / os.path.relpath(original)))
    return copied if copied.is_relative_to(code["code"]) and copied.is_file() else original


def goes_on(end: Mapping[str, Any]) -> bool:
    """Whether an end.json says that the run goes on by itself."""
    return end.get("action") in COMEBACK_ACTIONS


def write_atomic(path: Path, text: str) -> None:
    """Write a whole file so that a reader sees the old or the new one, never a half."""
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
    """Write one JSON value, indented, keys in the order given."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """The JSON value in a file; FileNotFoundError and ValueError pass through."""
    return json.loads(path.read_text(encoding="utf-8"))


def append_jsonl(path: Path, record: dict[str, Any]) -> None:
    """Append one record as one line in one write.

    A line that a crash cut off before is closed first, so the new record stands on a line of its own.
    """
    line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        written = os.write(descriptor, line)
        if written != len(line):
            os.ftruncate(descriptor, size)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
    finally:
        os.close(descriptor)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file; lines that a crash cut off are passed over; no file is no records."""
    if not path.is_file():
        return  # a pipe or a device in its place would never end
    try:
        stream = path.open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    with stream:
        for line in stream:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record


def log_event(run: RunDir, attempt: int, event: str, **fields: Any) -> None:
    """Append one event to the run's `events.jsonl`."""
    append_jsonl(run.events_file, {"time": utc_now(), "attempt": attempt, "event": event, **fields})


def read_metrics(run: RunDir) -> list[dict[str, Any]]:
    """The training curve: one record a step, the newest attempt's where a step was computed twice."""
    by_step: dict[int, dict[str, Any]] = {}
    for record in read_jsonl(run.metrics_file):
        if isinstance(record.get("step"), int):
            by_step[record["step"]] = record
    return [by_step[step] for step in sorted(by_step)]


def best_result(run: RunDir, events: Iterable[dict[str, Any]] | None = None) -> dict[str, Any] | None:
    """The lowest validation loss of a run as ``metric, value, step``; without one, its newest loss.

    `events` are all of the run's for who has read them already.
    """
    evaluated = [
        record
        for record in (read_jsonl(run.events_file) if events is None else events)
        if record.get("event") == "evaluated" and isinstance(record.get("val_loss"), (int, float))
    ]
    if evaluated:
        best = min(evaluated, key=lambda record: record["val_loss"])
        return {"metric": "val_loss", "value": best["val_loss"], "step": best.get("step")}
    losses = [
        record for record in read_jsonl(run.metrics_file) if isinstance(record.get("loss"), (int, float))
    ]
    return {"metric": "loss", "value": losses[-1]["loss"], "step": losses[-1].get("step")} if losses else None


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_STATE_HOME/trainkit``; it may not exist yet."""
    home = environ.get("XDG_STATE_HOME") or str(
        Path(environ.get("HOME") or "~").expanduser() / ".local/state"
    )
    return Path(home) / "trainkit"
