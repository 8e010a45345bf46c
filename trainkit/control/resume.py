"""Starts a run again: with a changed config, checked against its newest checkpoint, or as it was."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import isclose
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from trainkit.backends import backend_of
from trainkit.backends.jobs import (
    live_entry,
    recover_job_id,
    refuse_copied_group,
    require_not_running,
    wait_until_out_of_queue,
)
from trainkit.cluster.target import Target, make_target
from trainkit.config import LoadedConfig, RunConfig, load_config, read_effective
from trainkit.config.training import ModelConfig
from trainkit.data.checks import DataFacts
from trainkit.errors import ConfigError, Problem, UsageError, print_note
from trainkit.folders import shown_path, working_in
from trainkit.formats import plural
from trainkit.function import call_file
from trainkit.job.failed_starts import note_bad_hosts
from trainkit.job.group_parts import recover_parts, submit_parts
from trainkit.job.resubmit import excludable
from trainkit.launch.create import start_attempt, start_group
from trainkit.launch.plan_run import gather, plan_run
from trainkit.launch.snapshot import renewed_code
from trainkit.plan.batch import learning_rate
from trainkit.plan.launch import LaunchPlan, with_excluded
from trainkit.plan.model_shape import ModelShape, resolve_model_shape
from trainkit.run.end import SAVED, is_over, read_end, read_newest_end
from trainkit.run.files import numbers, read_json, utc_now
from trainkit.run.group import RunGroup
from trainkit.run.history import RunHistory, read_plan
from trainkit.run.manifest import Manifest, newest_intact, published
from trainkit.run.record import AttemptRecord, JobRecord, change_newest, read_job
from trainkit.run.rundir import PARTIAL_SUFFIX, RunDir, run_lock
from trainkit.slurm.environment import cluster_name

if TYPE_CHECKING:
    from trainkit.launch.earliest_end import Choice

REPLAY_FILE = "replay.json"
"""In the folder of a job of `trainkit replay`: which run and steps it computes again."""
FIXED_KEYS = ("seed", "data.seq_len", "data.shuffle")
"""The keys that determine the order of samples; the trainer also compares the data itself."""


def refuse_by_hand(run: RunDir) -> None:
    """Raise UsageError for a run of `trainkit.loop` that trainkit did not start, and cannot start again."""
    if run.was_started_by_hand:
        raise UsageError(
            f"{run.shown} was not started by trainkit",
            hint="start its program again: it resumes from the newest checkpoint",
        )


def load_again(
    run: RunDir, overrides: Sequence[str], flags: Mapping[str, tuple[str, object]], profile: str | None = None
) -> tuple[LoadedConfig, LaunchPlan]:
    """The config of a run with changed values, and the plan that the run has had."""
    refuse_by_hand(run)
    loaded = load_config(run.config_file, profile=profile, overrides=overrides, flags=flags, layers=False)
    before = LaunchPlan.read(run.plan_file)
    adjustable = {"train.device_batch_size", "parallel.pp_microbatches"}
    if before.workload.is_command:
        # config.yaml has every key: those that were not set must not reach the tool of the launcher.
        adjustable = loaded.origins.keys() - set(before.launcher_keys)
    origin = loaded.origins["name"].rpartition(":")[0]
    return loaded.adjusting(*adjustable, origin=origin), before


def expected_time_s(run: RunDir, plan: LaunchPlan, steps: int | None) -> float | None:
    """Seconds for the steps up to `steps`, at the speed of the newest attempt; None if it ran otherwise."""
    shape = read_plan(run).step_shape
    measured = numbers(RunHistory(run).newest_steps(), "step_s")
    if steps is None or not measured or shape != (vars(plan.layout), vars(plan.batch), plan.device):
        return None
    saved = published(run.checkpoints_dir)
    return max(0, steps - (saved[-1].step if saved else 0)) * statistics.median(measured)


def refuse_finished(
    run: RunDir, before: RunConfig, now: RunConfig, plan: LaunchPlan, *, new_code: bool = False
) -> None:
    """Raise UsageError if the run has finished and nothing is asked that it has not done.

    That is another number of steps, for a command any other value than `before`, or new code.
    """
    end = read_end(run.attempt(max(run.attempt_numbers(), default=0)))
    if end is None or end.state != "finished":
        return
    if not plan.workload.knows_run:
        if new_code or any(changes(before, now)):
            return
        hint = f"`trainkit submit {run.word}` runs it again in a new folder"
        if plan.has_supervisor and plan.debug is None:
            hint += f", `trainkit requeue {run.word}` in this one"
        if call_file(run).exists():
            hint = "call trainkit.submit(…) again"
        raise UsageError(f"{run.shown} has finished: its command ended with exit code 0", hint=hint)
    length = (now.train.steps, now.train.epochs)
    if not published(run.checkpoints_dir) or (before.train.steps, before.train.epochs) != length:
        return
    key, number = ("steps", f"{length[0]}") if length[1] is None else ("epochs", f"{length[1]:g}")
    raise UsageError(
        f"{run.shown} has finished: it has trained for all {number} {key}",
        hint=f"`trainkit resume {run.word} --set train.{key}=N` with a larger N extends it",
    )


def same_place(entry: AttemptRecord | None, loaded: LoadedConfig) -> Target | None:
    """This machine, if that attempt ran here and the config leaves the backend open; else None."""
    reason = None if entry is None else backend_of(entry).stays_here(entry)
    return Target("local", reason) if reason and loaded.config.launch.backend == "auto" else None


def share_left(run: RunDir, steps: int | None) -> float:
    """The share of a run's steps after its newest checkpoint; 1 if their number is unknown."""
    saved = published(run.checkpoints_dir)
    return 1.0 if steps is None or not saved else max(0.0, 1 - saved[-1].step / steps)


def missing_save(run: RunDir, *, knows_run: bool) -> str | None:
    """What a run without a save resumes from, for people; None if one was seen.

    A command that does not save by `trainkit.loop` says it by its exit code alone.
    """
    if published(run.checkpoints_dir):
        return None
    if knows_run:
        return "none yet: training starts at step 0 again"
    ends = (read_end(run.attempt(number)) for number in run.attempt_numbers())
    if any(end is not None and str(end.reason).startswith(SAVED) for end in ends):
        return None
    return "no save was seen: it starts at the beginning, unless it finds one of its own"


def refuse_incompatible(run: RunDir, loaded: LoadedConfig, data: DataFacts | None) -> None:
    """Raise ConfigError with every value of a config that is incompatible with the newest checkpoint.

    `data` is None for a task of the user.
    """
    found = published(run.checkpoints_dir)
    if not found:
        return
    try:
        manifest = found[-1].manifest()
    except (OSError, ValueError):
        return  # damaged: the trainer falls back to an earlier one and checks that
    problems = list(_problems(manifest, loaded, data, found[-1].path.name))
    if problems:
        raise ConfigError(problems)


def _problems(
    manifest: Manifest, loaded: LoadedConfig, data: DataFacts | None, name: str
) -> Iterator[Problem]:
    config, now = loaded.config, flat_values(loaded.config)
    hint = "use the old value, or start a new run"
    before = {"task": manifest.task, "optimizer.name": manifest.optimizer}
    before |= {key: manifest.data.get(key) for key in FIXED_KEYS}
    if data is not None:  # else the trainer compares its parameters
        before["model.architecture"] = (manifest.model or {}).get("architecture")
    for key, old in before.items():
        # Only the class of a task or an architecture counts: its path may have changed.
        if old is not None and str(old).rpartition(":")[2] != str(now[key]).rpartition(":")[2]:
            yield loaded.problem(key, f"is {now[key]}, but {name} was trained with {old}", hint)
    if config.train.steps is not None and config.train.steps < manifest.step:
        message = f"is {config.train.steps}, but the run is already at {name}"
        yield loaded.problem("train.steps", message, "it counts all steps of the run, from the first one")
    if data is not None and manifest.model is not None and not config.uses_transformers:
        try:
            trained = ModelConfig(**manifest.model)
        except ValidationError as error:
            key = ".".join(map(str, error.errors()[0]["loc"]))
            message = f"cannot be compared with the model of {name}: its {key} is not one of this version"
            yield loaded.problem("model", message, "resume with the version of trainkit that saved it")
            return
        if _shape(trained, data.vocab_size) != _shape(config.model, data.vocab_size):
            yield loaded.problem("model", f"differs in shape from the model of {name}", hint)


def _shape(model: ModelConfig, vocab_size: int) -> ModelShape:
    """The shape of the parameters, without dropout, which may change."""
    return replace(resolve_model_shape(model, vocab_size), dropout=0.0)


def changes(before: RunConfig, after: RunConfig, ignored: Collection[str] = ()) -> Iterator[str]:
    """One line for each value that differs and is not `ignored`: ``optimizer.lr: 0.002 -> 0.01``."""
    old, new = flat_values(before), flat_values(after)
    for key in sorted((old.keys() | new.keys()) - {*ignored}):
        if old.get(key) != new.get(key):
            yield f"{key}: {old.get(key)} -> {new.get(key)}"


def learning_rate_change(run: RunDir, before: RunConfig, after: RunConfig, lr: float) -> str | None:
    """What the learning rate does where a run resumes with the peak `lr`, if a changed config changes it."""
    found = published(run.checkpoints_dir)
    if not found or before.train.steps is None or after.train.steps is None:
        return None
    step, steps = found[-1].step, after.train.steps
    old = partial(
        learning_rate,
        total_steps=before.train.steps,
        peak_lr=LaunchPlan.read(run.plan_file).lr,
        config=before.schedule,
    )
    now = learning_rate(step + 1, steps, lr, after.schedule)
    if isclose(now, old(step + 1), rel_tol=1e-3):
        return None
    schedule = f"{after.schedule.name} over {plural(steps, 'step')}"
    return f"{old(step):.3g} at step {step}, {now:.3g} at step {step + 1}: {schedule}"


def flat_values(config: RunConfig) -> dict[str, Any]:
    """The values of a config by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in config.model_dump(mode="json", by_alias=True).items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": item for inner, item in value.items()}
        else:
            flat[key] = value
    return flat


def refuse_replay(run: RunDir) -> None:
    """Raise UsageError if the run is a job of `trainkit replay`."""
    try:
        record = read_json(run.path / REPLAY_FILE)
    except FileNotFoundError:
        return
    raise UsageError(
        f"{run.shown} is a replay of {shown_path(record['run'])}",
        hint=f"`trainkit replay --collect {run.word}` compares the two; or name that run",
    )


def note_dead_job(run: RunDir, warn: Callable[[str], None]) -> list[str]:
    """Have the run avoid the hosts on which its newest job ended before the supervisor began; returns them.

    Raises SlurmUnreachable.
    """
    record = read_job(run)
    entry = record.newest
    if entry is None or is_over(run.attempt(entry.attempt)):
        return []
    cluster = entry.cluster or cluster_name() or ""
    return note_bad_hosts(run, record, backend_of(entry).job(entry), cluster, warn)[1]


@contextmanager
def submission_folder(run: RunDir, takes_new_code: bool) -> Iterator[Path]:
    """Change to the folder that a run was submitted from: paths in its config are relative to it.

    Yields the working directory of the run's command, which is inside its code snapshot if it has one and
    `takes_new_code` is not set.
    """
    job, here = read_job(run), Path.cwd()
    submitted = Path(job.cwd or here)
    if not submitted.is_dir():
        submitted = here
    code = None if takes_new_code else job.code
    with working_in(submitted):
        yield submitted if code is None else Path(code.workdir)


def newest_checkpoint_of(run: RunDir) -> Path:
    """The newest intact checkpoint of a run; raises UsageError when there is none."""
    checkpoint = newest_intact(published(run.checkpoints_dir))
    if checkpoint is None:
        raise UsageError(
            f"{run.shown} has no intact checkpoint to resume from", hint="`trainkit submit` starts a new run"
        )
    return checkpoint.path


def copy_newest_checkpoint(checkpoint: Path, run: RunDir) -> None:
    """Copy a checkpoint to a newly created run; removes the run folder if that fails."""
    try:
        copy_checkpoint(checkpoint, run)
    except BaseException:
        shutil.rmtree(run.path, ignore_errors=True)
        raise


def copy_checkpoint(checkpoint: Path, run: RunDir) -> Path:
    """Publish a copy of a checkpoint in another run, as hard links if the filesystem supports them.

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


@dataclass(frozen=True)
class PlannedResume:
    """The next attempt of a run, planned."""

    job: JobRecord
    before: RunConfig
    loaded: LoadedConfig
    plan: LaunchPlan
    knows_run: bool
    """Whether its ranks write the run folder themselves."""
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
    if starts_here:
        require_not_running(run, "resume")
        note_dead_job(run, warn)
    loaded, plan_before = load_again(run, overrides, flags)
    job, before, workload = read_job(run), read_effective(run.config_file), plan_before.workload
    refuse_finished(run, before, loaded.config, plan_before, new_code=new_code)
    with submission_folder(run, new_code) as code_dir:
        if target is None and "launch.backend" not in flags:
            target = same_place(job.newest, loaded)
        target, resumes = target or make_target(loaded, run=run.path), bool(published(run.checkpoints_dir))
        facts = gather(loaded, workload, target=target, resumes=resumes, code_dir=code_dir)
        lr_of = plan_before if before.optimizer == loaded.config.optimizer else None
        choice = None
        if chooses_nodes:
            from trainkit.launch.earliest_end import choose_nodes  # slow to import

            left = share_left(run, loaded.config.train.steps) if workload.knows_run else 1.0
            loaded, plan, choice = choose_nodes(
                loaded, workload, code_dir=code_dir, facts=facts, before=lr_of, left=left
            )
        else:
            plan = plan_run(loaded, facts, workload, code_dir=code_dir, before=lr_of)
        if plan.slurm is None:
            plan = replace(plan, after=plan_before.after)  # what it has not waited for yet
        if workload.knows_run:
            refuse_incompatible(run, loaded, facts.data)
        yield PlannedResume(job, before, loaded, plan, workload.knows_run, choice)


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
        recover_job_id(run)
        require_not_running(run, "resume")  # under the lock: another command may have started it
        with renewed_code(run, config, plan) if new_code else nullcontext():
            return start_attempt(run, config, plan, "run" if foreground else "resume", now=now)


def resume_group(group: RunGroup) -> str:
    """Start the runs of a group that have not started, on this machine also others that have not finished.

    Returns its job id, on Slurm that of the newest array. Raises UsageError if its process may still be there
    and if there is none to start.
    """
    path, process = group.word, group.record.process
    if process is None:
        return _submit_left(group)
    alive = process.alive()
    if alive is None:
        raise UsageError(
            f"cannot tell from here whether {group.shown} is running: it was started on {process.host}",
            hint=f"run `trainkit resume {quote(str(group.path))}` on that host",
        )
    if alive and group.has_process():
        raise UsageError(
            f"{group.shown} is running as {group.job_id}", hint=f"`trainkit cancel {path}` cancels its runs"
        )
    ends = (read_newest_end(group.run(index).path) for index in group.points)
    if all(end is not None and end.state == "finished" for end in ends):
        raise UsageError(
            f"all runs of {group.shown} have finished", hint=f"`trainkit status {path}` shows them"
        )
    group.update(cancelled_at=None)
    return start_group(group)


def start_again(run: RunDir, reason: str) -> AttemptRecord:
    """Start the next attempt of a run that has ended, with the config and plan of its newest one.

    Call with the run's lock held. Raises UsageError for a run that was never started, and for one that has
    trained for all its steps: what a command has still to do, nobody else knows.
    """
    newest = read_job(run).newest
    if newest is None:
        hint = f"`trainkit resume {run.word}` starts it"
        raise UsageError(f"{run.shown} was never started", hint=hint)
    attempt = run.attempt(newest.attempt)
    plan, config = LaunchPlan.read(attempt.plan_file), read_effective(attempt.config_file)
    if plan.workload.knows_run:
        refuse_finished(run, config, config, plan)
    if not plan.has_supervisor or plan.debug is not None:
        where = "a debugger" if plan.has_supervisor else "a step that srun started, or on hosts without Slurm"
        raise UsageError(f"{run.shown} ran in {where}", hint=f"`trainkit resume {run.word}` plans it anew")
    hosts = note_dead_job(run, print_note)
    if hosts and plan.slurm is not None and plan.slurm.clusters:
        print_note(f"{', '.join(hosts)} not left out: a job that may go to another cluster cannot name hosts")
    elif hosts and plan.slurm is not None:
        left_out = with_excluded(plan.slurm, excludable(hosts, plan.slurm, print_note))
        plan = replace(plan, slurm=left_out)
    return start_attempt(run, config, plan, reason)


def requeue_run(run: RunDir) -> tuple[AttemptRecord, bool]:
    """Requeue a run; returns its job.json entry and whether a new attempt was started.

    A running job is signalled to save and requeue itself. Raises UsageError for a job that is still pending,
    and for one that is being cancelled: it ends first.
    """
    refuse_by_hand(run)
    with run_lock(run):
        recover_job_id(run)
        wait_until_out_of_queue(run)
        entry = live_entry(run, "requeue")
        if entry is None:
            return start_again(run, "requeue"), True
        if entry.is_cancelled:
            raise UsageError(
                f"{run.shown} is being cancelled: {entry.job_id} saves and ends",
                hint=f"`trainkit cancel {run.word} --wait` returns once it has ended; requeue it then",
            )
        end = read_end(run.attempt(entry.attempt))
        if end is not None and end.resumes:
            # The run restarts anyway: there is nothing to signal.
            job = backend_of(entry).job(entry)
            outcome = "waiting" if job is not None and job.state.is_waiting else "restarting"
        else:
            # The signal alone can be lost: between two steps no process receives it.
            with suppress(OSError):  # on a full disk it has to do
                change_newest(run, requeue_requested_at=utc_now())
            outcome = backend_of(entry).signal(run, entry, signal.SIGUSR2)
            if outcome == "waiting":
                # Else the job would requeue itself at its start.
                change_newest(run, requeue_requested_at=None)
    if outcome == "waiting":
        raise UsageError(f"{entry.job_id} is already pending", hint="`trainkit status` shows the reason")
    return entry, False


def _submit_left(group: RunGroup) -> str:
    path = group.word
    refuse_copied_group(group, "resume")
    recover_parts(group)
    if not group.left:
        hint = f"`trainkit resume {path}/INDEX` resumes one of them"
        raise UsageError(f"all runs of {group.shown} are submitted", hint=hint)
    group.update(cancelled_at=None)
    if not submit_parts(group, print_note):
        raise UsageError(
            f"Slurm takes none of the {plural(len(group.left), 'run')} that are left of {group.shown} now",
            hint="the jobs of the group submit them as they end",
        )
    return group.job_ids[-1]
