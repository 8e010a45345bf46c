"""Describes a run before its next attempt, and rejects config changes that are incompatible with the run."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isclose

from pydantic import ValidationError

from trainkit.config import LoadedConfig, RunConfig
from trainkit.config.training import ModelConfig
from trainkit.data.checks import DataFacts
from trainkit.errors import ConfigError, Problem, UsageError
from trainkit.formats import plural
from trainkit.function import call_file
from trainkit.launch.repeat import config_and_plan
from trainkit.plan.batch import learning_rate
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.model_shape import ModelShape, resolve_model_shape
from trainkit.run.end import AttemptEnd, read_end
from trainkit.run.files import numbers
from trainkit.run.history import RunHistory
from trainkit.run.manifest import Checkpoint, Manifest
from trainkit.run.record import JobRecord
from trainkit.run.rollbacks import checkpoints_in_line
from trainkit.run.rundir import AttemptDir, RunDir

FIXED_KEYS = ("seed", "data.seq_len", "data.shuffle")
"""The keys that determine the order of the samples. The trainer additionally compares the data itself."""


@dataclass(frozen=True)
class RunSoFar:
    """The state of a run before its next attempt, as collected by `run_so_far`."""

    run: RunDir
    job: JobRecord
    config: RunConfig
    plan: LaunchPlan
    end: AttemptEnd | None
    """The recorded end of the newest attempt, or None if the attempt did not record one."""
    saved: Sequence[Checkpoint]
    """The checkpoints of the run, oldest first, without those from which the run went back."""

    @property
    def step(self) -> int:
        """Return the step of the newest checkpoint, or 0 if there is no checkpoint."""
        return self.saved[-1].step if self.saved else 0


def run_so_far(run: RunDir, job: JobRecord, source: RunDir | AttemptDir) -> RunSoFar:
    """Return the `RunSoFar` of a run, with the config and plan from `source`.

    `source` is either the run itself or one of its attempts.
    """
    end = read_end(run.attempt(max(run.attempt_numbers(), default=0)))
    saved = checkpoints_in_line(run)
    return RunSoFar(run, job, *config_and_plan(source), end, saved)


def changes(before: RunConfig, after: RunConfig, ignored: Collection[str] = ()) -> Iterator[str]:
    """Yield a line such as ``optimizer.lr: 0.002 -> 0.01`` for each changed key that is not in `ignored`."""
    old, new = flat_values(before), flat_values(after)
    for key in sorted((old.keys() | new.keys()) - {*ignored}):
        if old.get(key) != new.get(key):
            yield f"{key}: {old.get(key)} -> {new.get(key)}"


def flat_values(config: RunConfig) -> dict[str, object]:
    """Return a config's values, keyed by dotted name such as ``optimizer.lr``."""
    flat: dict[str, object] = {}
    for key, value in config.model_dump(mode="json", by_alias=True).items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": item for inner, item in value.items()}
        else:
            flat[key] = value
    return flat


def learning_rate_change(so_far: RunSoFar, after: RunConfig, peak: float) -> str | None:
    """Describe how the learning rate changes at the step where a run resumes.

    Returns None if the learning rate does not change.
    """
    before, step, steps = so_far.config, so_far.step, after.train.steps
    if not so_far.saved or before.train.steps is None or steps is None:
        return None
    schedule = f"{after.schedule.name} over {plural(steps, 'step')}"
    if before.schedule.is_own or after.schedule.is_own:
        # Only the trainer executes a user's schedule.
        old_schedule = f"{before.schedule.name} over {plural(before.train.steps, 'step')}"
        return None if schedule == old_schedule else f"{old_schedule} before, now {schedule}"
    old = partial(
        learning_rate,
        total_steps=before.train.steps,
        peak_lr=so_far.plan.lr,
        config=before.schedule,
    )
    now = learning_rate(step + 1, steps, peak, after.schedule)
    if isclose(now, old(step + 1), rel_tol=1e-3):
        return None
    return f"{old(step):.3g} at step {step}, {now:.3g} at step {step + 1}: {schedule}"


def expected_time_s(so_far: RunSoFar, plan: LaunchPlan, steps: int | None) -> float | None:
    """Return how many seconds the run takes until step `steps` at the newest attempt's speed.

    Returns None if the speed is unknown or the plan changes the speed.
    """
    names = ("layout", "batch", "device")  # the parts of a plan that affect the duration of a training step
    if steps is None or any(getattr(plan, name) != getattr(so_far.plan, name) for name in names):
        return None
    measured = numbers(RunHistory(so_far.run).newest_steps(), "step_s")
    return max(0, steps - so_far.step) * statistics.median(measured) if measured else None


def starting_point(so_far: RunSoFar) -> str:
    """Describe the checkpoint from which a run resumes, or where a run without a checkpoint starts.

    A command that does not use `trainkit.loop` reports a save only through its exit code.
    """
    if so_far.saved:
        return f"{so_far.saved[-1].path.name} or, if its files are damaged, the one before"
    if not so_far.plan.workload.is_command:
        return "no checkpoint yet, so training restarts at step 0"
    ends = (read_end(so_far.run.attempt(number)) for number in so_far.run.attempt_numbers())
    if any(end is not None and end.saved for end in ends):
        return "saved by the command, which finds it itself"
    return (
        "the command reported no saved checkpoint, so it starts from the beginning unless it finds a "
        "checkpoint itself"
    )


def share_left(so_far: RunSoFar, steps: int | None) -> float:
    """Return the fraction of a run's steps that remain after its newest checkpoint; 1 if unknown."""
    return 1.0 if steps is None else max(0.0, 1 - so_far.step / steps)


def refuse_finished(so_far: RunSoFar, now: RunConfig, *, new_code: bool = False) -> None:
    """Raise UsageError if the run has finished and the new config does not request further work.

    For the trainer, a different number of steps or epochs is considered further work. For a command, any
    changed value or new code is considered further work.
    """
    run, before, plan = so_far.run, so_far.config, so_far.plan
    if so_far.end is None or so_far.end.state != "finished":
        return
    if plan.workload.is_command:
        if new_code or any(changes(before, now)):
            return
        hint = f"`trainkit submit {run.quoted}` repeats the run in a new folder"
        if plan.has_supervisor and plan.attended_in is None:
            hint += f", `trainkit requeue {run.quoted}` in the same folder"
        if call_file(run).exists():
            hint = "call trainkit.submit(…) again"
        raise UsageError(f"{run.shown} has finished: the command exited with code 0", hint=hint)
    length = (now.train.steps, now.train.epochs)
    if not so_far.saved or (before.train.steps, before.train.epochs) != length:
        return
    key, number = ("steps", f"{length[0]}") if length[1] is None else ("epochs", f"{length[1]:g}")
    raise UsageError(
        f"{run.shown} has finished: training has completed all {number} {key}",
        hint=f"`trainkit resume {run.quoted} --set train.{key}=N` with a larger N extends the run",
    )


def refuse_incompatible(so_far: RunSoFar, loaded: LoadedConfig, data: DataFacts | None) -> None:
    """Raise a ConfigError that lists all config values that are incompatible with the newest checkpoint.

    `data` is None if the run trains a custom task.
    """
    if not so_far.saved:
        return
    newest = so_far.saved[-1]
    try:
        manifest = newest.manifest()
    except (OSError, ValueError):
        return  # the trainer will skip the damaged checkpoint and check the config against an older one
    problems = list(_problems(manifest, loaded, data, newest.path.name))
    if problems:
        raise ConfigError(problems)


def _problems(
    manifest: Manifest, loaded: LoadedConfig, data: DataFacts | None, name: str
) -> Iterator[Problem]:
    config, now = loaded.config, flat_values(loaded.config)
    hint = "use the old value, or start a new run"
    before: dict[str, object] = {"task": manifest.task, "optimizer.name": manifest.optimizer}
    before |= {key: manifest.data.get(key) for key in FIXED_KEYS}
    if data is not None:  # the trainer itself compares the parameters of a custom task
        before["model.architecture"] = (manifest.model or {}).get("architecture")
    for key, old in before.items():
        # For a task or an architecture, compare only the class name, because the path may have changed.
        if old is not None and str(old).rpartition(":")[2] != str(now[key]).rpartition(":")[2]:
            yield loaded.problem(key, f"is {now[key]}, but {name} was trained with {old}", hint)
    if config.train.steps is not None and config.train.steps < manifest.step:
        message = f"is {config.train.steps}, but the run is already at {name}"
        yield loaded.problem("train.steps", message, "train.steps counts all steps from the start of the run")
    if data is not None and manifest.model is not None and not config.uses_transformers:
        try:
            trained = ModelConfig.model_validate(manifest.model)
        except ValidationError as error:
            key = ".".join(map(str, error.errors()[0]["loc"]))
            message = (
                f"cannot be compared with the model of {name}: the {key} of that model is not valid in this "
                "trainkit version"
            )
            yield loaded.problem("model", message, "use the trainkit version that saved the checkpoint")
            return
        if _shape(trained, data.vocab_size) != _shape(config.model, data.vocab_size):
            yield loaded.problem("model", f"has different dimensions from the model of {name}", hint)


def _shape(model: ModelConfig, vocab_size: int) -> ModelShape:
    """Return the dimensions that determine the model's parameters.

    The dropout, which may change, is set to 0.
    """
    return replace(resolve_model_shape(model, vocab_size), dropout=0.0)
