"""Plans and starts the next attempt of a run, with a config that may have changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainkit.backend import backend_of
from trainkit.backends.jobs import read_whole_job, require_not_running
from trainkit.cluster.target import Target, make_target
from trainkit.config import LoadedConfig, RunConfig
from trainkit.control.changed_config import (
    RunSoFar,
    refuse_finished,
    refuse_incompatible,
    run_so_far,
    share_left,
)
from trainkit.control.requeue import note_dead_job
from trainkit.launch.create import start_attempt
from trainkit.launch.plan_run import gather, plan_run
from trainkit.launch.repeat import load_again, refuse_by_hand, refuse_replay, submission_folder
from trainkit.launch.snapshot import renewed_code
from trainkit.plan.launch import LaunchPlan
from trainkit.run.record import AttemptRecord, read_job
from trainkit.run.rundir import RunDir, run_lock

if TYPE_CHECKING:
    from trainkit.launch.earliest_end import Choice


@dataclass(frozen=True)
class PlannedResume:
    """The next attempt of a run, planned."""

    so_far: RunSoFar
    loaded: LoadedConfig
    plan: LaunchPlan
    choice: Choice | None = None
    """Why it has this number of nodes, with `chooses_nodes`."""


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
) -> Iterator[PlannedResume]:
    """Plan the next attempt of a run, with the folder that it was submitted from as the current one.

    Without a `target` or ``launch.backend`` in `flags` it runs where it ran. `chooses_nodes` takes the number
    of nodes that is expected to finish first. `starts_here` is whether it is
    this command that starts it, in its own folder. Raises UsageError and ConfigError where it cannot resume,
    also for values that are incompatible with the newest checkpoint.
    """
    refuse_replay(run)
    job = read_job(run)
    if starts_here:
        require_not_running(run, job, "resume")
        note_dead_job(run, job, warn)
    refuse_by_hand(run)
    so_far = run_so_far(run, job, run)
    loaded, workload = load_again(run, so_far.plan, overrides, flags), so_far.plan.workload
    refuse_finished(so_far, loaded.config, new_code=new_code)
    with submission_folder(job, new_code) as code_dir:
        if target is None and "launch.backend" not in flags:
            target = same_place(job.newest, loaded)
        target = target or make_target(loaded, run=run.path)
        facts = gather(loaded, workload, target=target, resumes=bool(so_far.saved), code_dir=code_dir)
        lr_of = so_far.plan if so_far.config.optimizer == loaded.config.optimizer else None
        choice = None
        if chooses_nodes:
            from trainkit.launch.earliest_end import choose_nodes  # slow to import

            left = 1.0 if workload.is_command else share_left(so_far, loaded.config.train.steps)
            loaded, plan, choice = choose_nodes(
                loaded, workload, code_dir=code_dir, facts=facts, before=lr_of, left=left
            )
        else:
            plan = plan_run(loaded, facts, workload, code_dir=code_dir, before=lr_of)
        if not plan.is_job:
            plan = replace(plan, after=so_far.plan.after)  # what it has not waited for yet
        if not workload.is_command:
            refuse_incompatible(so_far, loaded, facts.data)
        yield PlannedResume(so_far, loaded, plan, choice)


def resume_run(
    run: RunDir,
    config: RunConfig,
    plan: LaunchPlan,
    *,
    new_code: bool,
    now: bool = False,
    foreground: bool = False,
) -> AttemptRecord:
    """Start the next attempt of a run that has ended, with this config and plan; returns its job.json entry.

    `new_code` replaces the run's copy of the code, `now` and `foreground` are those of `NewAttempt`. Raises
    UsageError if the run is still running.
    """
    with run_lock(run):
        job = read_whole_job(run)
        require_not_running(run, job, "resume")  # under the lock: another command may have started it
        with renewed_code(run, job, config, plan) if new_code else nullcontext(job) as job:
            return start_attempt(run, job, config, plan, "run" if foreground else "resume", now=now)


def same_place(entry: AttemptRecord | None, loaded: LoadedConfig) -> Target | None:
    """This machine, if that attempt ran here and the config leaves the backend open; else None."""
    reason = None if entry is None else backend_of(entry).stays_here(entry)
    return Target("local", reason) if reason and loaded.config.launch.backend == "auto" else None
