"""Judges a config of a run against what the run has done: what differs, and what it cannot take."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from math import isclose

from pydantic import ValidationError

from trainkit.config import LoadedConfig, RunConfig
from trainkit.config.training import ModelConfig
from trainkit.data.checks import DataFacts
from trainkit.errors import ConfigError, Problem, UsageError
from trainkit.formats import plural
from trainkit.function import call_file
from trainkit.plan.batch import learning_rate
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.model_shape import ModelShape, resolve_model_shape
from trainkit.run.end import read_end
from trainkit.run.files import numbers
from trainkit.run.history import RunHistory, read_plan
from trainkit.run.manifest import Manifest, published
from trainkit.run.rundir import RunDir

FIXED_KEYS = ("seed", "data.seq_len", "data.shuffle")
"""The keys that determine the order of samples; the trainer also compares the data itself."""


def changes(before: RunConfig, after: RunConfig, ignored: Collection[str] = ()) -> Iterator[str]:
    """One line for each value that differs and is not `ignored`: ``optimizer.lr: 0.002 -> 0.01``."""
    old, new = flat_values(before), flat_values(after)
    for key in sorted((old.keys() | new.keys()) - {*ignored}):
        if old.get(key) != new.get(key):
            yield f"{key}: {old.get(key)} -> {new.get(key)}"


def flat_values(config: RunConfig) -> dict[str, object]:
    """The values of a config by dotted key."""
    flat: dict[str, object] = {}
    for key, value in config.model_dump(mode="json", by_alias=True).items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": item for inner, item in value.items()}
        else:
            flat[key] = value
    return flat


def learning_rate_change(
    run: RunDir, before: RunConfig, after: RunConfig, peak_before: float, peak: float
) -> str | None:
    """What the learning rate does where a run resumes, if a changed config or peak changes it."""
    found = published(run.checkpoints_dir)
    if not found or before.train.steps is None or after.train.steps is None:
        return None
    step, steps = found[-1].step, after.train.steps
    old = partial(
        learning_rate,
        total_steps=before.train.steps,
        peak_lr=peak_before,
        config=before.schedule,
    )
    now = learning_rate(step + 1, steps, peak, after.schedule)
    if isclose(now, old(step + 1), rel_tol=1e-3):
        return None
    schedule = f"{after.schedule.name} over {plural(steps, 'step')}"
    return f"{old(step):.3g} at step {step}, {now:.3g} at step {step + 1}: {schedule}"


def expected_time_s(run: RunDir, plan: LaunchPlan, steps: int | None) -> float | None:
    """Seconds for the steps up to `steps`, at the speed of the newest attempt; None if it ran otherwise."""
    shape = read_plan(run).step_shape
    measured = numbers(RunHistory(run).newest_steps(), "step_s")
    if steps is None or not measured or shape != (vars(plan.layout), vars(plan.batch), plan.device):
        return None
    saved = published(run.checkpoints_dir)
    return max(0, steps - (saved[-1].step if saved else 0)) * statistics.median(measured)


def missing_save(run: RunDir, *, is_command: bool) -> str | None:
    """What a run without a save resumes from, for people; None if one was seen.

    A command that does not save by `trainkit.loop` says it by its exit code alone.
    """
    if published(run.checkpoints_dir):
        return None
    if not is_command:
        return "none yet: training starts at step 0 again"
    ends = (read_end(run.attempt(number)) for number in run.attempt_numbers())
    if any(end is not None and end.saved for end in ends):
        return None
    return "no save was seen: it starts at the beginning, unless it finds one of its own"


def share_left(run: RunDir, steps: int | None) -> float:
    """The share of a run's steps after its newest checkpoint; 1 if their number is unknown."""
    saved = published(run.checkpoints_dir)
    return 1.0 if steps is None or not saved else max(0.0, 1 - saved[-1].step / steps)


def refuse_finished(
    run: RunDir, before: RunConfig, now: RunConfig, plan: LaunchPlan, *, new_code: bool = False
) -> None:
    """Raise UsageError if the run has finished and nothing is asked that it has not done.

    That is another number of steps, for a command any other value than `before`, or new code.
    """
    end = read_end(run.attempt(max(run.attempt_numbers(), default=0)))
    if end is None or end.state != "finished":
        return
    if plan.workload.is_command:
        if new_code or any(changes(before, now)):
            return
        hint = f"`trainkit submit {run.word}` runs it again in a new folder"
        if plan.has_supervisor and plan.attended_in is None:
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
