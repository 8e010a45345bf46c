"""Values that are right alone and cannot hold together."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import replace

from trainkit.config.loaded import LoadedConfig
from trainkit.errors import Problem

LOOKS_SECRET = re.compile(r"(key|token|secret|password|passwd|credential)s?$", re.IGNORECASE)


_ASSIGNMENT = re.compile(r"""(?<![\w.-])(?P<name>[A-Z][A-Z0-9_]*)=(?P<value>"[^"]*"|'[^']*'|\S+)""")
MIN_SECRET_CHARS = 8
"""Shorter values are no secrets and occur anywhere: ``1``, ``yes``, ``offline``."""


def written_secrets(text: str, names: Collection[str]) -> list[str]:
    """Variables that a text sets to a value of its own and that are secrets, by their names or as they look.

    References such as ``$NAME`` are no values; of what is too short to be a secret nothing is said.
    """
    return [
        found["name"]
        for found in _ASSIGNMENT.finditer(text)
        if (found["name"] in names or LOOKS_SECRET.search(found["name"]))
        and len(value := found["value"].strip("\"'")) >= MIN_SECRET_CHARS
        and not value.startswith(("$", "`"))
    ]


def contradictions(loaded: LoadedConfig) -> Iterator[Problem]:
    """Every contradiction between values of one config."""
    yield from _length(loaded)
    yield from _decay(loaded)
    yield from _secrets(loaded)
    yield from _float8(loaded)


def _float8(loaded: LoadedConfig) -> Iterator[Problem]:
    config = loaded.config
    if not config.precision.float8:
        return
    if config.device == "cpu":
        yield loaded.problem("precision.float8", "is true, and device is cpu", "only GPUs have float8")
    if config.precision.dtype != "bf16":
        message = f"is true, and precision.dtype is {config.precision.dtype}"
        yield loaded.problem("precision.float8", message, "what is not multiplied in float8 needs bf16")
    if config.parallel.tp > 1:
        message = f"is true, and parallel.tp is {config.parallel.tp}"
        yield loaded.problem("precision.float8", message, "one of the two; they do not go together yet")


def _secrets(loaded: LoadedConfig) -> Iterator[Problem]:
    launch = loaded.config.launch
    for name in launch.env:
        if name in launch.secrets or LOOKS_SECRET.search(name):
            message = "looks like a secret, and a config is written into the run folder"
            hint = f"export {name} in the shell instead: the job inherits it"
            problem = loaded.problem(f"launch.env.{name}", message, hint)
            # What was typed holds the secret itself, and errors end up in logs.
            shown = problem.origin.replace(launch.env[name], "***") if launch.env[name] else problem.origin
            yield replace(problem, origin=shown)
    for line in launch.setup:
        for name in written_secrets(line, launch.secrets):
            message = f"sets {name}, which looks like a secret, and a script is written into the run folder"
            hint = f"export {name} in the shell instead, or read it there: {name}=$(cat FILE)"
            problem = loaded.problem("launch.setup", message, hint)
            yield replace(problem, origin="--set launch.setup") if name in problem.origin else problem


def _length(loaded: LoadedConfig) -> Iterator[Problem]:
    train = loaded.config.train
    if train.steps is None and train.epochs is None:
        yield loaded.problem("train.steps", "is null and so is train.epochs", "give one of them")
    if train.steps is not None and train.epochs is not None:
        message = f"is {train.epochs:g} while train.steps is {train.steps}: only one can end the run"
        hint = f"train.steps was set by {loaded.origins['train.steps']}; set one of them to null"
        yield loaded.problem("train.epochs", message, hint)


def _decay(loaded: LoadedConfig) -> Iterator[Problem]:
    schedule, steps = loaded.config.schedule, loaded.config.train.steps
    if schedule.decay_steps is None:
        return
    if schedule.name != "wsd":
        message = f"is {schedule.decay_steps}, which the schedule {schedule.name} does not know"
        yield loaded.problem("schedule.decay_steps", message, "only schedule.name wsd has a decay of its own")
    elif steps is not None and schedule.warmup_steps + schedule.decay_steps > steps:
        message = (
            f"is {schedule.decay_steps}: with schedule.warmup_steps {schedule.warmup_steps} "
            f"that is more than train.steps {steps}"
        )
        yield loaded.problem("schedule.decay_steps", message, "null decays over a fifth of the run")
