"""Create the folder of a run or group, protected from changes by other users, and start the job."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from trainkit.backend import JobScript, NewAttempt, backend_named
from trainkit.config import RunConfig, dump_effective
from trainkit.errors import UsageError
from trainkit.folders import ensure_folder, shown_path
from trainkit.launch.secrets import refuse_leaks
from trainkit.launch.snapshot import write_origin
from trainkit.plan.launch import LaunchPlan
from trainkit.run.files import utc_now, write_atomic, write_json
from trainkit.run.group import GroupRecord, RunGroup
from trainkit.run.owner import cannot_create, refuse_place
from trainkit.run.pins import pin, run_of
from trainkit.run.record import AttemptRecord, CodeCopy, JobRecord, create_job
from trainkit.run.registry import register
from trainkit.run.rundir import LOCK_NAME, RUNS_FOLDER, RunDir, folders_named, run_lock
from trainkit.run.submitted import submitted_hash
from trainkit.slurm.environment import cluster_name

if TYPE_CHECKING:
    from trainkit.launch.submission import Submission


@dataclass(frozen=True)
class CreatedRun:
    """A run folder that is complete but has no attempt yet."""

    run: RunDir
    config_name: str
    job: JobRecord
    """The content of job.json; for a group, the values shared by all its runs."""

    @property
    def name(self) -> str:
        """Return the config's name, with a number appended if ./runs already contained this folder name."""
        return self.job.name

    @property
    def code(self) -> CodeCopy | None:
        """Return the code copy; None if the run uses the original files."""
        return self.job.code


def create_submission(
    submission: Submission,
    argv: Sequence[str],
    run_dir: Path | None = None,
    option: str = "--run-dir",
) -> CreatedRun:
    """Create the folder of a run or group without starting its job.

    `option` is the name, shown in errors, of the command-line option for `run_dir`. Raises UsageError if
    `run_dir` is not empty or not writable, or if a secret would be written to a file.
    """
    config, plan = submission.trials[0].config, submission.trials[0].plan
    if submission.array is None:
        return create_run(config, plan, argv, run_dir, submission.code_from, submission.stdin)
    with new_folder(config.name, run_dir, option) as (folder, name):
        group, run = RunGroup(folder), RunDir(folder)
        group.logs_dir.mkdir(mode=0o700)
        code = write_origin(run, config, plan, argv, submission.code_from)
        _keep_input(run, config, submission.stdin)
        pin_source(run, config)
        record = _group_record(folder, name, submission, code)
        refuse_leaks(json.dumps(record), str(group.sweep_file), config.secrets, os.environ)
        if backend_named(plan.backend).template is not None:
            write_atomic(group.script_file, submission.script(run, code).text)
        write_json(group.sweep_file, record)
    return CreatedRun(run, config.name, JobRecord(plan.backend, name, str(Path.cwd()), code))


def create_run(
    config: RunConfig,
    plan: LaunchPlan,
    argv: Sequence[str],
    run_dir: Path | None = None,
    code_from: CodeCopy | None = None,
    stdin: bytes | None = None,
) -> CreatedRun:
    """Create the folder of a run: `run_dir`, which must be new or empty, or by default ``runs/NAME``.

    `code_from` is another run's code copy, used instead of the current code. `stdin` is the
    content of standard input for rank 0 of a COMMAND, reused in each attempt.

    Raises UsageError if the folder is not writable, the code cannot be copied, or a secret would be written
    to a file.
    """
    with new_folder(config.name, run_dir) as (folder, name):
        run = RunDir(folder)
        run.checkpoints_dir.mkdir(mode=0o700)
        code = write_origin(run, config, plan, argv, code_from)
        _keep_input(run, config, stdin)
        pin_source(run, config)
        job = create_job(run, backend=plan.backend, name=name, cwd=str(Path.cwd()), code=code)
    return CreatedRun(run, config.name, job)


def _keep_input(run: RunDir, config: RunConfig, stdin: bytes | None) -> None:
    if stdin is not None:
        refuse_leaks(stdin.decode(errors="replace"), str(run.input_file), config.secrets, os.environ)
        write_atomic(run.input_file, stdin)


def pin_source(run: RunDir, config: RunConfig) -> None:
    """Pin the checkpoint that `model.init_from` names, for as long as the folder of the new run exists.

    If `model.init_from` is a run folder, nothing is pinned, because each start chooses a checkpoint.
    """
    source = config.model.init_from
    found = None if source is None else run_of(Path(source))
    if found is None:
        return
    # Without write access to the folder of the other run, its checkpoint can still be read, but not pinned.
    with suppress(OSError):
        pin(*found, f"run {run.path}", other_run=str(run.path))


def start_submission(
    submission: Submission, created: CreatedRun, *, now: bool = False
) -> tuple[str, int | None]:
    """Start a created submission; return its job id and, for a single run, the attempt number.

    For a single run, `now` is passed to `NewAttempt`. If Slurm rejects the job, removes the folder and raises
    SlurmRefused. If it is unknown whether the job exists, keeps the folder and raises SlurmUnreachable.
    """
    if submission.array is not None:
        return start_group(RunGroup(created.run.path)), None
    first = submission.trials[0]
    entry = start_run(created.run, created.job, first.config, first.plan, "submit", now=now)
    return entry.job_id, entry.attempt


def start_group(group: RunGroup) -> str:
    """Start a group and return its job id.

    If Slurm rejects the job, removes the group and raises SlurmRefused. If it is unknown whether the job
    exists, keeps the group and raises SlurmUnreachable.
    """
    with defer_sigint():  # Ctrl-C must not leave a started group that is not recorded.
        job_id = backend_named(group.record.backend).start_group(group)
        group.update(job_id=job_id, submitted_at=utc_now())
        register(RunDir(group.path), group.name)
    return job_id


def start_run(
    run: RunDir, job: JobRecord, config: RunConfig, plan: LaunchPlan, reason: str, *, now: bool = False
) -> AttemptRecord:
    """Start the first attempt of a newly created run, and return its entry in job.json.

    `job` is the content of the run's job.json. If `reason` is ``run``, a run on this machine stops when this
    process exits. If the attempt cannot be started, the run folder is removed.
    """
    try:
        with run_lock(run):
            return start_attempt(run, job, config, plan, reason, now=now)
    except BaseException:
        if not run.attempt_numbers():
            shutil.rmtree(run.path, ignore_errors=True)
        raise


def start_attempt(
    run: RunDir, job: JobRecord, config: RunConfig, plan: LaunchPlan, reason: str, *, now: bool = False
) -> AttemptRecord:
    """Start the next attempt of a run, and return its entry in job.json.

    The caller must hold the run's lock. `job` is the content of job.json, and `reason` is ``submit``,
    ``run``, ``requeue`` or ``resume``. `now` affects only runs on this machine.
    """
    config_text, plan_text, script = _attempt_files(run, job, config, plan)
    new = NewAttempt(config_text, plan_text, plan, reason, job, script, config.requeue.follow_ups, now)
    entry = backend_named(plan.backend).start(run, new)
    register(run, job.name)
    return entry


def next_script(run: RunDir, job: JobRecord, config: RunConfig, plan: LaunchPlan) -> str | None:
    """Return the batch script that `start_attempt` would submit, or None if the backend uses none.

    Writes nothing. Raises UsageError if the script, the config or the plan contains a secret.
    """
    _, _, script = _attempt_files(run, job, config, plan)
    return None if script is None else script.text


def _attempt_files(
    run: RunDir, job: JobRecord, config: RunConfig, plan: LaunchPlan
) -> tuple[str, str, JobScript | None]:
    """Return the config, the plan and the batch script of a run's next attempt, if there is a script."""
    config_text, plan_text = dump_effective(config), plan.to_text()
    for text, where in ((config_text, run.config_file), (plan_text, run.plan_file)):
        refuse_leaks(text, str(where), config.secrets, os.environ)
    if backend_named(plan.backend).template is None:
        return config_text, plan_text, None
    from trainkit.launch.script import script_for

    if job.cwd is None:
        raise UsageError(
            f"{shown_path(run.job_file)} cannot be read, "
            "so the working directory and the code of the run are unknown",
            hint=f"`trainkit resume {run.quoted} --as DIR` resumes in a new folder",
        )
    submitted, number = submitted_hash(config_text, plan.to_dict()), run.next_attempt().number
    script = script_for(run, number, plan, config, Path(job.cwd), job.code, submitted)
    return config_text, plan_text, script


def _group_record(
    folder: Path, name: str, submission: Submission, code: CodeCopy | None
) -> dict[str, object]:
    assert submission.array is not None
    first = submission.trials[0]
    record = GroupRecord(
        name=name,
        backend=first.plan.backend,
        cwd=str(Path.cwd()),
        # If the plan allows several clusters, Slurm chooses one of them, and sbatch reports its name.
        cluster=None if first.plan.clusters else cluster_name(),
        array=submission.array.directive,
        keys=list(dict.fromkeys(key for trial in submission.trials for key in trial.values)),
        code=code,
        config=submission.group_config,
        plan=first.plan.to_dict(),
        folder=str(folder.absolute()),
        inode=folder.stat().st_ino,
    )
    return record.to_dict(submission.group_trials)


@contextmanager
def defer_sigint() -> Iterator[None]:
    """Defer the KeyboardInterrupt for the first SIGINT to the end of the block.

    A second SIGINT raises KeyboardInterrupt immediately. Only the main thread receives signals, so nothing is
    deferred in other threads. If SIGINT is ignored, it remains ignored. Ctrl-C still sends SIGINT to child
    processes in the terminal's foreground process group.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted:
        raise KeyboardInterrupt


@contextmanager
def new_folder(name: str, run_dir: Path | None, option: str = "--run-dir") -> Iterator[tuple[Path, str]]:
    """Create a new folder for a run or group, and yield (folder, name).

    If the block raises an exception, the folder is removed. `option` is the name, shown in errors, of the
    command-line option for `run_dir`. Raises UsageError for the same reasons as `refuse_place`.
    """
    refuse_place(name, run_dir, option)
    folder = None
    try:
        if run_dir is None:
            folder = _next_free_folder(Path(RUNS_FOLDER), name)
            name = folder.name
        else:
            ensure_folder(run_dir.parent, parents=True)
            ensure_folder(run_dir, 0o700)
            try:  # If two commands both found the folder empty, only one of them may use it.
                os.close(os.open(run_dir / LOCK_NAME, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            except FileExistsError:
                raise cannot_create(
                    run_dir, "another command is creating a run in this folder", option
                ) from None
            folder = run_dir
        yield folder, name
    except BaseException as error:
        if folder is not None:
            # Everything in the folder was created by this command; remove the folder, because it would block
            # a retry.
            shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise cannot_create(run_dir or Path(RUNS_FOLDER), error.strerror or str(error), option) from error


def _next_free_folder(parent: Path, name: str) -> Path:
    """Create the first of `parent/name`, `parent/name-2`, `parent/name-3` and so on that does not exist."""
    if not parent.is_dir():
        ensure_folder(parent, 0o755)
        parent.chmod(0o755)  # The umask may have removed the permissions of other users.
    for folder in folders_named(parent, name):
        try:
            folder.mkdir(mode=0o700)
            return folder
        except FileExistsError:
            continue
    raise AssertionError("numbers do not end")
