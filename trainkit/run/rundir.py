"""Define the paths in a run folder, and the locks that commands and the supervisor acquire."""

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
ROLLED_BACK_SUFFIX = ".rolled-back"


def is_same_folder(one: Path, other: Path) -> bool:
    """Return whether two paths refer to the same folder, even if its file system is mounted twice.

    The device number differs between mounts, so inode and change time are compared; a copy has a different
    change time, which users cannot set. Returns False if either path does not exist.
    """
    try:
        ours, theirs = one.stat(), other.stat()
    except OSError:
        return False
    both = [(found.st_ino, found.st_ctime_ns) for found in (ours, theirs)]
    return os.path.samestat(ours, theirs) or both[0] == both[1]


class Child:
    """A descriptor that returns a path below the `path` attribute of its owner."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder | AttemptDir, kind: type | None = None) -> Path:
        return folder.path / self._name


class Numbered:
    """A descriptor for paths that contain a rank, node or step number.

    The descriptor returns a function that converts a number or name to a path below the owner's `path`.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern

    def __get__(
        self, folder: RunFolder | AttemptDir, kind: type | None = None
    ) -> Callable[[int | str], Path]:
        return lambda number: folder.path / self._pattern.format(number)


class RunFolder:
    """The folder of a run or group, and its path as shown in messages."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    @property
    def shown(self) -> str:
        """Return the path in the form shown in messages."""
        return shown_path(self.path)

    @property
    def quoted(self) -> str:
        """Return the path, quoted for the shell, for a command that the user enters in the current folder."""
        # Keep a slash in the path, because an argument without a slash could also be a job id, run name or
        # config.
        return quote(self.shown if "/" in self.shown else str(self.path))


DELETED = " (deleted)"
"""Suffix for a deleted folder's path in messages, used if another folder now has this path."""


class RunDir(RunFolder):
    """The paths in a run folder."""

    config_file = Child("config.yaml")
    """The effective config for the newest attempt."""
    plan_file = Child("plan.json")
    """The launch plan for the newest attempt."""
    provenance_file = Child("provenance.json")
    job_file = Child("job.json")
    script_file = Child("submit.sbatch")
    """The batch script for the newest attempt."""
    step_file = Child("step.json")
    """The command line of the step that a submitit job starts, as a JSON list of arguments."""
    code_dir = Child("code")
    """The snapshot of the code, made at submission."""
    work_dir = Child("work")
    """The working directory of a COMMAND; the first start creates it from the code snapshot."""
    work_file = Child("work.json")
    """Records the code snapshot that the files in `work_dir` were copied from."""
    values_file = Child("values.json")
    """The swept values of a trial that does not belong to a group; see `trainkit.run.trial`."""
    input_file = Child("stdin")
    """The content of standard input for rank 0 of a COMMAND, reused in each attempt; missing if the run has
    no standard input."""
    events_file = Child("events.jsonl")
    metrics_file = Child("metrics.jsonl")
    rollbacks_file = Child("rollbacks.json")
    """The rollbacks of the run, if any; see `trainkit.run.rollbacks`."""
    compiled_file = Child("compiled.bin")
    """The ranks' torch.compile cache, in torch's file format."""
    caches_dir = Child("caches")
    """The compile caches for hosts that have no private folder for temporary files."""
    heartbeat_file = Child("heartbeat")
    """A COMMAND that prints nothing for a long time can touch this file, so that the COMMAND is not
    considered hung."""
    tensorboard_dir = Child("tensorboard")
    checkpoints_dir = Child("checkpoints")
    pins_dir = Child("pins")
    """The pins of checkpoints, if any; see `trainkit.run.pins`."""
    checkpoint_dir = Numbered(f"checkpoints/{CHECKPOINT_PREFIX}{{:08d}}")
    attempts_dir = Child("attempts")
    lock_file = Child(LOCK_NAME)
    """Locked by a command while it changes the next action of the run."""
    supervisor_lock_file = Child(".supervisor.lock")
    """Locked by the run's supervisor as long as the supervisor is running."""

    _held: int | None = None
    _inode = 0
    _made: tuple[int, ...] = ()
    was_replaced = False
    """True if this run's folder was deleted and its path now refers to another folder."""

    @property
    def shown(self) -> str:
        """Return the path in the form shown in messages; for a replaced folder, its former path."""
        return super().shown.removesuffix(DELETED * self.was_replaced)

    def hold(self) -> None:
        """Keep the folder open, so that `follow` can find it after a move; raise OSError on failure."""
        if self._held is not None:
            return
        self._held = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._inode, self._made = os.fstat(self._held).st_ino, self._when_made()

    def _when_made(self) -> tuple[int, ...]:
        """Return values that identify this folder, and that differ for any later folder at the same path.

        An inode number alone is not enough: a new folder may reuse the inode of a deleted one, and some file
        systems change inode numbers. Raises OSError if the folder does not exist.
        """
        with contextlib.suppress(FileNotFoundError):
            found = self.provenance_file.stat()
            return found.st_mtime_ns, found.st_size
        return (self.path.stat().st_ino,)

    def follow(self) -> bool:
        """Return whether the open folder was moved since the last call; if it was, update `path`."""
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
                return False  # The file system does not respond, so a move cannot be detected.
        for found in self._places():
            with contextlib.suppress(OSError):
                if held is not None and found.is_dir() and os.path.samestat(held, found.stat()):
                    self.path = found
                    return True
        with contextlib.suppress(OSError):
            # The folder may be the same although its stat differs: a remount changes the device number, and a
            # restart of the file server can make all open handles stale.
            if self._when_made() != self._made:
                # The path now refers to another run's folder, where this run must not write.
                self.path, self.was_replaced = self.path.with_name(f"{self.name}{DELETED}"), True
        return False

    def _places(self) -> Iterator[Path]:
        """Yield candidate paths that the open folder may have been moved to."""
        with contextlib.suppress(OSError):
            yield Path(f"/proc/self/fd/{self._held}").readlink()
        with contextlib.suppress(OSError):
            # If another host moved the folder, this host's kernel still reports the old path, so search the
            # parent folder.
            yield from (Path(entry) for entry in os.scandir(self.path.parent) if entry.inode() == self._inode)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def was_started_by_hand(self) -> bool:
        """Return whether the run was created by `trainkit.loop` in a program that trainkit did not start."""
        return self.job_file.exists() and not self.config_file.exists()

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self, number)

    def latest_number(self) -> int | None:
        """Return the attempt number that ``attempts/latest`` points to; None if this link does not exist."""
        try:
            name = (self.attempts_dir / "latest").readlink().name
        except OSError:
            return None
        return int(name) if name.isdigit() else None

    def attempt_numbers(self) -> list[int]:
        """Return the numbers of the existing attempts in ascending order; the first attempt is 1."""
        if not self.attempts_dir.is_dir():
            return []
        return sorted(int(p.name) for p in self.attempts_dir.iterdir() if p.name.isdigit())

    def next_attempt(self) -> AttemptDir:
        """Return the paths of the attempt that would be created next."""
        return self.attempt(max(self.attempt_numbers(), default=0) + 1)

    def exists(self) -> bool:
        """Return whether the folder exists and contains a run."""
        # A run created by `trainkit.loop` outside of trainkit's launcher has no config.
        is_run = self.config_file.is_file() or self.job_file.is_file()
        return is_run and self.attempts_dir.is_dir()


class AttemptDir:
    """The paths of one attempt: a single start of the workers with a fixed config and plan."""

    config_file = Child("config.yaml")
    plan_file = Child("plan.json")
    logs_dir = Child("logs")
    supervisor_log = Child("logs/supervisor.log")
    batch_host_log = Child("logs/batch-host.log")
    """The log of the host that runs the batch script. This log is separate from the supervisor's log, where
    the task numbers in srun's messages denote ranks."""
    errors_dir = Child("errors")
    hangs_dir = Child("hangs")
    """A folder for stack traces, created by the first rank that hangs."""
    stacks_dir = Child("stacks")
    flight_dir = Child("flight")
    """A folder where torch writes the collectives of each rank to ``rank-N``; used only with GPUs."""
    profile_dir = Child("profile")
    done_file = Child("done")
    """A COMMAND creates this file to report that it has finished. After a stop signal, exit code 0 means that
    the COMMAND has finished if this file exists; otherwise, the COMMAND was interrupted."""
    rendezvous_file = Child("rendezvous.json")
    """The address where the ranks on several hosts connect; empty until the first task has published it."""
    store_file = Child("store")
    """The file for torch's `FileStore`, through which the ranks on a single machine connect."""
    script_file = Child("submit.sbatch")
    """The batch script used to submit this attempt."""
    end_file = Child("end.json")
    """Describes how the attempt ended; missing while the attempt is running, or if its supervisor was
    killed."""
    node_log = Numbered("logs/node-{:04d}.log")
    rank_log = Numbered("logs/rank-{:04d}.log")
    rank_result = Numbered("results/rank-{:04d}.pkl")
    """The return value or exception of the user's function; the folder is created by the first rank that
    calls the function."""
    rank_error = Numbered("errors/rank-{:04d}.json")
    rank_hang = Numbered("hangs/rank-{:04d}.json")
    rank_stacks = Numbered("stacks/rank-{:04d}.txt")
    rank_collectives = Numbered("stacks/rank-{:04d}.collectives.json")
    """The collectives that a rank of the built-in trainer had called before it hung."""
    rank_profile = Numbered("profile/rank-{:04d}.json")
    rank_record = Numbered("ranks/rank-{:04d}.jsonl")
    """Values in logged steps that are specific to a rank; used by `trainkit replay`."""

    def __init__(self, run: RunDir, number: int) -> None:
        self.run = run
        self.number = number

    @property
    def path(self) -> Path:
        """Return the attempt's path below the current path of its run folder."""
        return self.run.attempts_dir / f"{self.number:03d}"

    @property
    def waits_in(self) -> str | None:
        """Return the capability that makes a rank wait for user input; None if no rank is waiting.

        While a rank waits for user input, the other ranks are not considered hung.
        """
        return next((name for name in ATTENDING if any((self.path / name).glob("rank-*.json"))), None)

    @property
    def attended_in(self) -> str | None:
        """Return the capability through which a user has interacted with a rank; None if there is none."""
        return next((name for name in ATTENDING if (self.path / name / "rank").exists()), None)

    def create(self) -> None:
        """Create the folders for a new attempt.

        Raises FileExistsError if another command has already created this attempt, and OSError if a folder
        cannot be created.
        """
        ensure_folder(self.run.attempts_dir, 0o700)
        self.path.mkdir(mode=0o700)
        try:
            for folder in (self.logs_dir, self.errors_dir):
                folder.mkdir(mode=0o700)
            self.make_latest()
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)  # A partial folder would look like an attempt.
            raise

    def make_latest(self) -> None:
        """Point the symlink ``attempts/latest`` at this attempt."""
        latest = self.run.attempts_dir / "latest"
        staged = self.run.attempts_dir / f".latest-{self.number:03d}"
        staged.unlink(missing_ok=True)  # A killed command may have left this temporary link behind.
        staged.symlink_to(self.path.name)
        staged.replace(latest)


class RunLocked(TrainkitError):
    """Raised if another process holds a run's lock and does not release it in time.

    `stopped` is True if the wait was interrupted by a stop signal.
    """

    def __init__(self, file: Path, busy: LockBusy) -> None:
        hint = f"if the host of that process is permanently down, remove {shown_path(file)}"
        super().__init__(str(busy), hint)
        self.stopped = isinstance(busy, LockStopped)


@contextlib.contextmanager
def run_lock(run: RunDir, timeout_s: float | None = None) -> Iterator[None]:
    """Hold the run's lock, so that only one command at a time can change the run's next action.

    Raises UsageError if the folder cannot be written or locked. Raises RunLocked if another process still
    holds the lock after `timeout_s`, or if a stop signal interrupts the wait; see `acquire_lock`.
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
                hint="only users with write access to its folder can control the run",
            ) from error
        yield


def refuse_missing(run: RunDir) -> None:
    """Raise UsageError if the run folder no longer exists.

    Without this check, starting the run could write to another folder that now has the same path.
    """
    if not run.exists():
        raise UsageError(
            f"{run.path} is no longer a run folder: the folder was moved or deleted before this job started",
            hint="`trainkit resume DIR` resumes the run in its new folder DIR",
        )


def become_sole_supervisor(run: RunDir, timeout_s: float) -> None:
    """Acquire the supervisor lock of the run until this process exits; raise RunLocked if it stays locked.

    Two supervisors would corrupt the run. A check of job.json cannot prevent a second supervisor, because the
    file may be lost or edited.
    """
    try:
        acquire_lock(run.supervisor_lock_file, timeout_s)  # The lock is released when this process exits.
    except LockBusy as busy:
        raise RunLocked(run.supervisor_lock_file, busy) from None


def is_being_changed(run: RunDir) -> bool:
    """Return whether a process holds the run's lock, which `run_lock` acquires."""
    return is_locked(run.lock_file)


def is_supervised(run: RunDir) -> bool:
    """Return whether a process holds the supervisor lock, which `become_sole_supervisor` acquires."""
    return is_locked(run.supervisor_lock_file)


def folders_named(parent: Path, name: str) -> Iterator[Path]:
    """Yield `parent/name`, then `parent/name-2`, `parent/name-3` and so on."""
    yield parent / name
    for number in itertools.count(2):
        yield parent / f"{name}-{number}"


def next_name(name: str, run_dir: Path | None) -> str:
    """Return the name for a new run or group: `name`, or in `./runs` its first unused variant."""
    if run_dir is not None:
        return name
    folders = folders_named(Path(RUNS_FOLDER), name)
    return next(folder.name for folder in folders if not os.path.lexists(folder))


def submission_token(run: RunDir, attempt: int, follow_up: int = 0) -> str:
    """Return a token that identifies the job of an attempt; the token is part of the job's comment in Slurm.

    The token is used to find the job if the response of sbatch is lost. Each chained job has its own token;
    `follow_up` is the number of the chained job, starting at 1.
    """
    key = f"{run.path}/{attempt}" + (f"+{follow_up}" if follow_up else "")
    return f"trainkit:{hashlib.sha256(key.encode(errors='surrogateescape')).hexdigest()[:16]}"
