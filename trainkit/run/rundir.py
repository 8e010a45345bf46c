"""The run folder: its paths, and the locks of the command that changes it and of its supervisor."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import quote

from trainkit.errors import TrainkitError, UsageError
from trainkit.folders import ensure_folder, shown_path
from trainkit.locks import (
    LockBusy,
    LockStopped,
    LockUnsupported,
    NotALock,
    acquire_lock,
    file_lock,
    is_locked,
)
from trainkit.shipped import ATTENDING

STARTS_FOLDER = "starts"
RUNS_FOLDER = "runs"
LOCK_NAME = ".lock"
CHECKPOINT_PREFIX = "step-"
MANIFEST_NAME = "manifest.json"
PARTIAL_SUFFIX = ".partial"
REJECTED_SUFFIX = ".rejected"


def is_same_folder(one: Path, other: Path) -> bool:
    """Whether two paths are one folder, also where its file system is mounted twice; False if one is missing.

    Such a mount has another device; a copy has a time of change of its own, which nobody can set.
    """
    try:
        ours, theirs = one.stat(), other.stat()
    except OSError:
        return False
    both = [(found.st_ino, found.st_ctime_ns) for found in (ours, theirs)]
    return os.path.samestat(ours, theirs) or both[0] == both[1]


class Child:
    """A path below the `path` of its owner."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder | AttemptDir, kind: type | None = None) -> Path:
        return folder.path / self._name


class Numbered:
    """The paths of ranks, nodes or steps below the `path` of its owner, by their numbers or names."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern

    def __get__(
        self, folder: RunFolder | AttemptDir, kind: type | None = None
    ) -> Callable[[int | str], Path]:
        return lambda number: folder.path / self._pattern.format(number)


class RunFolder:
    """The folder of a run or a group, and how messages name it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    @property
    def shown(self) -> str:
        """Its path in a sentence."""
        return shown_path(self.path)

    @property
    def word(self) -> str:
        """Its path as a word of a command that is typed where this one was."""
        # A word without a slash could also be a job id, the name of another run, or a config.
        return quote(self.shown if "/" in self.shown else str(self.path))


DELETED = " (deleted)"
"""What the path of a folder ends with once another one has its place."""


class RunDir(RunFolder):
    """The paths of one run folder."""

    config_file = Child("config.yaml")
    """The effective config of the newest attempt."""
    plan_file = Child("plan.json")
    """The launch plan of the newest attempt."""
    provenance_file = Child("provenance.json")
    job_file = Child("job.json")
    script_file = Child("submit.sbatch")
    """The batch script of the newest attempt."""
    step_file = Child("step.json")
    """The argv of the step that a submitit job starts, as JSON."""
    code_dir = Child("code")
    """The snapshot of the code at submission."""
    work_dir = Child("work")
    """The folder in which a command runs, made from the snapshot at its first start."""
    work_file = Child("work.json")
    """Which snapshot the files in `work_dir` come from."""
    values_file = Child("values.json")
    """The values of its trial by key, if it is none of a group: see `trainkit.run.trial`."""
    input_file = Child("stdin")
    """The standard input of rank 0 of a command at each attempt, if the run keeps one."""
    events_file = Child("events.jsonl")
    metrics_file = Child("metrics.jsonl")
    compiled_file = Child("compiled.bin")
    """What torch.compile has made for the ranks, in the format of torch."""
    caches_dir = Child("caches")
    """What torch compiles for each host that has no private folder for temporary files."""
    heartbeat_file = Child("heartbeat")
    """A command that prints nothing for long writes or touches it, to show that it does not hang."""
    tensorboard_dir = Child("tensorboard")
    checkpoints_dir = Child("checkpoints")
    checkpoint_dir = Numbered(f"checkpoints/{CHECKPOINT_PREFIX}{{:08d}}")
    attempts_dir = Child("attempts")
    lock_file = Child(LOCK_NAME)
    """Locked while a command changes what the run does next."""
    supervisor_lock_file = Child(".supervisor.lock")
    """Locked by the run's supervisor until it exits."""

    _held: int | None = None
    _inode = 0
    _made: tuple[int, ...] = ()
    was_replaced = False
    """Whether another folder has the place of the held one, which was deleted."""

    @property
    def shown(self) -> str:
        """The path in a sentence; if another folder has replaced this one, the path that both have had."""
        return super().shown.removesuffix(DELETED * self.was_replaced)

    def hold(self) -> None:
        """Hold on to the folder, so that `follow` finds it wherever it is moved to. Raises OSError."""
        if self._held is not None:
            return
        self._held = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._inode, self._made = os.fstat(self._held).st_ino, self._when_made()

    def _when_made(self) -> tuple[int, ...]:
        """What tells this folder from another one at its path; raises OSError if there is none.

        Inodes do not: a new folder may get the number of a deleted one, and some file systems change them.
        """
        with contextlib.suppress(FileNotFoundError):
            found = self.provenance_file.stat()
            return found.st_mtime_ns, found.st_size
        return (self.path.stat().st_ino,)

    def follow(self) -> bool:
        """Whether the held folder was moved since the last call; `path` is then the new one."""
        if self._held is None:
            return False
        held = None
        try:
            held = os.fstat(self._held)
            if os.path.samestat(held, self.path.stat()):
                return False
        except FileNotFoundError:
            pass
        except OSError as error:
            if held is not None or error.errno != errno.ESTALE:
                return False  # a file system that does not answer has moved nothing
        for found in self._places():
            with contextlib.suppress(OSError):
                if held is not None and found.is_dir() and os.path.samestat(held, found.stat()):
                    self.path = found
                    return True
        with contextlib.suppress(OSError):
            # It may still be the same: a file system that was mounted again is another device, and after some
            # restarts of a server all is stale.
            if self._when_made() != self._made:
                # That is another run: nothing of this one is written there.
                self.path, self.was_replaced = self.path.with_name(f"{self.name}{DELETED}"), True
        return False

    def _places(self) -> Iterator[Path]:
        """Where the held folder may be now."""
        with contextlib.suppress(OSError):
            yield Path(f"/proc/self/fd/{self._held}").readlink()
        with contextlib.suppress(OSError):
            # Of what another host has moved, this one knows the old path only.
            yield from (Path(entry) for entry in os.scandir(self.path.parent) if entry.inode() == self._inode)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def was_started_by_hand(self) -> bool:
        """Whether `trainkit.loop` has made it in a program that trainkit has not started."""
        return self.job_file.exists() and not self.config_file.exists()

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

    def next_attempt(self) -> AttemptDir:
        """The attempt that would be created now."""
        return self.attempt(max(self.attempt_numbers(), default=0) + 1)

    def exists(self) -> bool:
        """Whether this folder exists and contains a run."""
        is_run = self.config_file.is_file() or self.job_file.is_file()  # a loop by hand has no config
        return is_run and self.attempts_dir.is_dir()


class AttemptDir:
    """The paths of one attempt: one start of the workers, with its config and plan."""

    config_file = Child("config.yaml")
    plan_file = Child("plan.json")
    logs_dir = Child("logs")
    supervisor_log = Child("logs/supervisor.log")
    batch_host_log = Child("logs/batch-host.log")
    """Separate from the supervisor's log, in which srun's messages about tasks refer to the ranks."""
    errors_dir = Child("errors")
    hangs_dir = Child("hangs")
    """Created by the first rank that hangs."""
    stacks_dir = Child("stacks")
    flight_dir = Child("flight")
    """Where torch writes which collectives a rank has called, as ``rank-N``; only of ranks with GPUs."""
    profile_dir = Child("profile")
    done_file = Child("done")
    """Created by a command to say that it is done: exit code 0 after a notice then means finished."""
    rendezvous_file = Child("rendezvous.json")
    """The address at which the ranks of several hosts connect; empty until the first host writes it."""
    store_file = Child("store")
    """By which the ranks of one machine find each other."""
    script_file = Child("submit.sbatch")
    """The batch script that was submitted for this attempt."""
    end_file = Child("end.json")
    """How the attempt ended; absent while it runs and if its supervisor was killed."""
    node_log = Numbered("logs/node-{:04d}.log")
    rank_log = Numbered("logs/rank-{:04d}.log")
    rank_result = Numbered("results/rank-{:04d}.pkl")
    """What a function returned or raised; the folder is created by the first rank that calls it."""
    rank_error = Numbered("errors/rank-{:04d}.json")
    rank_hang = Numbered("hangs/rank-{:04d}.json")
    rank_stacks = Numbered("stacks/rank-{:04d}.txt")
    rank_collectives = Numbered("stacks/rank-{:04d}.collectives.json")
    """Which collectives a rank of the trainer had called when it hung."""
    rank_profile = Numbered("profile/rank-{:04d}.json")
    rank_record = Numbered("ranks/rank-{:04d}.jsonl")
    """What a rank computed by itself, on the steps that were logged."""

    def __init__(self, run: RunDir, number: int) -> None:
        self.run = run
        self.number = number

    @property
    def path(self) -> Path:
        """Below the run's, which may be moved."""
        return self.run.attempts_dir / f"{self.number:03d}"

    @property
    def waits_in(self) -> str | None:
        """The capability in which a rank waits for a person now; None while none does.

        The other ranks wait too, and do not hang.
        """
        return next((name for name in ATTENDING if any((self.path / name).glob("rank-*.json"))), None)

    @property
    def attended_in(self) -> str | None:
        """The capability in which a person has attended to one of its ranks; None if nobody has."""
        return next((name for name in ATTENDING if (self.path / name / "rank").exists()), None)

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


class RunLocked(TrainkitError):
    """A lock of a run is still held by another process; with `stopped`, a stop signal ended the wait."""

    def __init__(self, file: Path, busy: LockBusy) -> None:
        hint = f"if the host of that process is down for good, remove {shown_path(file)}"
        super().__init__(str(busy), hint)
        self.stopped = isinstance(busy, LockStopped)


@contextlib.contextmanager
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
        except (LockUnsupported, NotALock) as error:
            message = f"{shown_path(run.lock_file)} cannot be locked: {error.strerror}"
            raise UsageError(message, hint=error.hint) from error
        except OSError as error:
            raise UsageError(
                f"{run.shown} cannot be changed: {error.strerror}",
                hint="only users with write access to its folder can control a run",
            ) from error
        yield


def refuse_missing(run: RunDir) -> None:
    """Raise UsageError if the run is gone: a start writes nothing into a folder that has its place now."""
    if not run.exists():
        raise UsageError(
            f"{run.path} is not the folder of a run any more: it was moved or deleted before this start",
            hint="`trainkit resume DIR` continues the run where it is now",
        )


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
    return is_locked(run.supervisor_lock_file)


def folders_named(parent: Path, name: str) -> Iterator[Path]:
    """`parent/name`, then `name-2`, `name-3` and so on."""
    yield parent / name
    for number in itertools.count(2):
        yield parent / f"{name}-{number}"


def next_name(name: str, run_dir: Path | None) -> str:
    """The name that a new run or group gets: of one in `./runs`, its first free one."""
    if run_dir is not None:
        return name
    folders = folders_named(Path(RUNS_FOLDER), name)
    return next(folder.name for folder in folders if not os.path.lexists(folder))


def submission_token(run: RunDir, attempt: int, follow_up: int = 0) -> str:
    """The unique token in the comment of an attempt's job, by which it is found if sbatch's answer is lost.

    Each follow-up job has its own; they are counted from 1.
    """
    key = f"{run.path}/{attempt}" + (f"+{follow_up}" if follow_up else "")
    return f"trainkit:{hashlib.sha256(key.encode(errors='surrogateescape')).hexdigest()[:16]}"
