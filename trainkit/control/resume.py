"""Resumes a run, with an unchanged or changed config or as a new run, or resumes the runs in a group."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from trainkit.backend import backend_named, backend_of
from trainkit.backends.jobs import read_whole_job, refuse_copied_group, require_not_running
from trainkit.backends.slurm.group_chunks import recover_chunks, submit_chunks
from trainkit.capability import NodesChoice
from trainkit.cluster.target import Target, make_target
from trainkit.config import LoadedConfig, RunConfig
from trainkit.control.changed_config import (
    RunSoFar,
    refuse_finished,
    refuse_incompatible,
    run_so_far,
    share_left,
)
from trainkit.control.requeue import hosts_of_dead_job, note_dead_job
from trainkit.control.rollback import RollbackRequest, before, plan_rollback
from trainkit.errors import UsageError, print_note
from trainkit.formats import plural
from trainkit.launch.create import next_script, start_attempt, start_group
from trainkit.launch.plan_run import gather, plan_run
from trainkit.launch.repeat import load_again, refuse_by_hand, refuse_replay, submission_folder
from trainkit.launch.snapshot import future_code, renewed_code
from trainkit.plan.launch import LaunchPlan
from trainkit.run.end import read_newest_end
from trainkit.run.events import log_event
from trainkit.run.group import RunGroup
from trainkit.run.manifest import newest_intact
from trainkit.run.record import AttemptRecord, read_job
from trainkit.run.rollbacks import EVENT, Rollback, read_rollbacks, write_rollbacks
from trainkit.run.rundir import PARTIAL_SUFFIX, RunDir, run_lock
from trainkit.shipped import node_chooser


@dataclass(frozen=True)
class PlannedResume:
    """The plan for the next attempt of a run."""

    so_far: RunSoFar
    loaded: LoadedConfig
    plan: LaunchPlan
    rollback: Rollback | None = None
    """The rollback to record before the attempt starts; None unless it was requested."""
    choice: NodesChoice | None = None
    """The explanation of how the number of nodes was chosen; None unless `chooses_nodes` was set."""


@contextmanager
def planned_resume(
    run: RunDir,
    overrides: Sequence[str],
    flags: Mapping[str, tuple[str, object]],
    *,
    warn: Callable[[str], None],
    target: Target | None = None,
    starts_here: bool = True,
    new_code: bool = False,
    chooses_nodes: bool = False,
    request: RollbackRequest | None = None,
) -> Iterator[PlannedResume]:
    """Plan a run's next attempt; while planning, the run's submission folder is the working directory.

    The run stays on its machine or cluster unless `target` is given or `flags` sets ``launch.backend``.
    If `chooses_nodes` is set, the plan uses the number of nodes that is expected to finish the run first.
    `starts_here` means that this command will start the attempt in the run's own folder. With a `request`,
    the run goes back to the requested checkpoint. Raises UsageError or ConfigError if the run cannot resume,
    for example because the new values are incompatible with the checkpoint.
    """
    refuse_replay(run)
    job = read_job(run)
    if starts_here:
        require_not_running(run, job, "resume")
        note_dead_job(run, job, warn)
    refuse_by_hand(run)
    so_far = run_so_far(run, job, run)
    loaded, workload = load_again(run, so_far.plan, overrides, flags), so_far.plan.workload
    rollback = None if request is None else plan_rollback(so_far, request)
    if rollback is None or rollback.step == rollback.from_step:
        refuse_finished(so_far, loaded.config, new_code=new_code)
    if rollback is not None:
        so_far = before(so_far, rollback)
    with submission_folder(job, new_code) as code_dir:
        if target is None and "launch.backend" not in flags:
            target = same_place(job.newest, loaded)
        target = target or make_target(loaded, run=run.path)
        facts = gather(loaded, workload, target=target, resumes=bool(so_far.saved), code_dir=code_dir)
        lr_of = so_far.plan if so_far.config.optimizer == loaded.config.optimizer else None
        choice = None
        if chooses_nodes:
            left = 1.0 if workload.is_command else share_left(so_far, loaded.config.train.steps)
            loaded, plan, choice = node_chooser()(
                loaded, workload, code_dir=code_dir, facts=facts, before=lr_of, left=left
            )
        else:
            plan = plan_run(loaded, facts, workload, code_dir=code_dir, before=lr_of)
        if not plan.is_job:
            plan = replace(plan, after=so_far.plan.after)  # the run is still waiting for these jobs
        if not workload.is_command:
            refuse_incompatible(so_far, loaded, facts.data)
        yield PlannedResume(so_far, loaded, plan, rollback, choice)


def resume_run(
    run: RunDir,
    config: RunConfig,
    plan: LaunchPlan,
    *,
    new_code: bool,
    now: bool = False,
    foreground: bool = False,
    rollback: Rollback | None = None,
) -> AttemptRecord:
    """Start the next attempt of an ended run with this config and plan; return the attempt's job.json entry.

    `new_code` replaces the run's copy of the code. `rollback` is recorded before the attempt starts. For
    `now` and `foreground`, see `NewAttempt`. Raises UsageError if the run is still running.
    """
    with run_lock(run):
        job = read_whole_job(run)
        # Repeat the check while holding the lock, because another command may have started the run in the
        # meantime.
        require_not_running(run, job, "resume")
        with (
            renewed_code(run, job, config, plan) if new_code else nullcontext(job) as job,
            recorded(run, rollback),
        ):
            return start_attempt(run, job, config, plan, "run" if foreground else "resume", now=now)


def preview_resume(
    so_far: RunSoFar, config: RunConfig, plan: LaunchPlan, *, new_code: bool, fork: RunDir | None
) -> tuple[LaunchPlan, str | None]:
    """Return the plan and batch script of a run's next attempt, or None if it needs no script; write nothing.

    `fork` is the new run if the run resumes in another folder. The working directory must be the run's
    submission folder, as in `planned_resume`. Raises UsageError if the code cannot be copied, or if the
    script would contain a secret.
    """
    run, job = so_far.run, so_far.job
    if fork is not None:
        run, job, new_code = fork, replace(job, cwd=str(Path.cwd())), True
    if new_code:
        job = replace(job, code=future_code(run, config, plan))
    if fork is None and job.newest is not None:
        # A resume first records the hosts on which the newest job could not start.
        hosts = hosts_of_dead_job(run, job)
        plan = backend_named(plan.backend).without_hosts(plan, hosts, print_note)
    return plan, next_script(run, job, config, plan)


def same_place(entry: AttemptRecord | None, loaded: LoadedConfig) -> Target | None:
    """Return this machine as the target if the attempt ran here and the config sets no backend; else None."""
    reason = None if entry is None else backend_of(entry).stays_here(entry)
    return Target("local", reason) if reason and loaded.config.launch.backend == "auto" else None


def resume_group(group: RunGroup) -> str:
    """Start the unsubmitted runs in a group; if the group is on this machine, start all unfinished runs.

    Returns the group's job id; on Slurm, this is the id of the newest array. Raises UsageError if the group's
    process may still be alive, or if no run needs to be started.
    """
    path, process = group.quoted, group.record.process
    if process is None:
        return _submit_remaining(group)
    alive = process.alive()
    if alive is None:
        raise UsageError(
            f"cannot tell from here whether {group.shown} is running: it was started on {process.host}",
            hint=f"run `trainkit resume {quote(str(group.path))}` on that host",
        )
    if alive and group.has_process():
        raise UsageError(
            f"{group.shown} is running as {group.job_id}",
            hint=f"`trainkit cancel {path}` cancels the runs of the group",
        )
    ends = (read_newest_end(group.run(index).path) for index in group.trials)
    if all(end is not None and end.state == "finished" for end in ends):
        raise UsageError(
            f"all runs of {group.shown} have finished", hint=f"`trainkit status {path}` shows the runs"
        )
    group.update(cancelled_at=None)
    return start_group(group)


def _submit_remaining(group: RunGroup) -> str:
    path = group.quoted
    refuse_copied_group(group, "resume")
    recover_chunks(group)
    if not group.unsubmitted:
        hint = f"`trainkit resume {path}/INDEX` resumes a single run"
        raise UsageError(f"all runs of {group.shown} have already been submitted", hint=hint)
    group.update(cancelled_at=None)
    if not submit_chunks(group, print_note):
        raise UsageError(
            f"Slurm currently accepts none of the {plural(len(group.unsubmitted), 'unsubmitted run')} of "
            f"{group.shown}",
            hint="every job of the group submits more runs when the job finishes",
        )
    return group.job_ids[-1]


@contextmanager
def recorded(run: RunDir, rollback: Rollback | None) -> Iterator[None]:
    """Record a rollback, if any, before an attempt starts; if the attempt cannot start, remove the record.

    The attempt moves the checkpoints aside from which the run goes back.
    """
    if rollback is None:
        yield
        return
    known = read_rollbacks(run)
    write_rollbacks(run, [*known, rollback])
    try:
        yield
    except BaseException:
        write_rollbacks(run, known)
        raise
    log_event(run, rollback.attempt, EVENT, **rollback.fields())


def newest_checkpoint_of(so_far: RunSoFar) -> Path:
    """Return the newest intact checkpoint of a run; raise UsageError if it has none."""
    checkpoint = newest_intact(so_far.saved)
    if checkpoint is None:
        raise UsageError(
            f"{so_far.run.shown} has no intact checkpoint to resume from",
            hint="`trainkit submit` starts a new run",
        )
    return checkpoint.path


def copy_newest_checkpoint(
    checkpoint: Path, run: RunDir, source: RunDir, rollback: Rollback | None = None
) -> None:
    """Copy a checkpoint of `source` to a newly created run; if copying fails, remove the run folder.

    The new run also gets the rollbacks of `source`, and the additional `rollback`.
    """
    try:
        copy_checkpoint(checkpoint, run)
        if found := [*read_rollbacks(source), *([] if rollback is None else [rollback])]:
            # The rollbacks affect all attempts of the new run.
            write_rollbacks(run, [replace(item, attempt=0) for item in found])
    except BaseException:
        shutil.rmtree(run.path, ignore_errors=True)
        raise


def copy_checkpoint(checkpoint: Path, run: RunDir) -> Path:
    """Publish a copy of a checkpoint in another run, using hard links if the filesystem supports them.

    Published checkpoints never change, so both runs can share the files.
    """
    target = run.checkpoints_dir / checkpoint.name
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    shutil.copytree(checkpoint, partial, copy_function=_link_or_copy)
    partial.rename(target)
    return target


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
