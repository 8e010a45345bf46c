"""Determine the values of a trial, which tell it from other runs, for all ways to define a sweep.

`--sweep` and `--array` set config keys and arguments of a COMMAND; `trainkit.submit`, `sweep` and `map_array`
set the parameters of a function; Hydra and Optuna set the values of their trials. A group stores the values
of its runs in sweep.json, and a separate run stores its values in values.json. The values are stored as they
were written.
"""

from __future__ import annotations

import math
import os
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import islice
from pathlib import PurePath
from types import SimpleNamespace
from typing import Protocol, runtime_checkable

from trainkit.formats import mask_secrets
from trainkit.run.files import read_object
from trainkit.run.group import group_of
from trainkit.run.rundir import RunDir

MAX_TEXT = 100
MAX_MASKED = 2**16
"""Number of characters of a text that are searched for secrets before the text is shortened."""
MAX_DEPTH = 8
MAX_BITS = 128
"""A larger integer is shortened. `MAX_ITEMS` and `LIST_DEPTH` limit lists and their nesting in the same
way."""
MAX_ITEMS, LIST_DEPTH = 20, 2
MAX_PARTS = 1000
"""An argument with more items becomes one value."""
LONGEST_NUMBER = 40
_NUMBER = re.compile(r"[-+]?(?:(?:0|[1-9]\d*)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII)
"""Matches a number without leading zeros, because 007 is a name."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+", re.IGNORECASE)


@runtime_checkable
class SweeperTrial(Protocol):
    """A sweeper's trial, such as a trial of Optuna or a job of Hydra; its values are its `params`."""

    @property
    def number(self) -> int: ...
    @property
    def params(self) -> Mapping[str, object]: ...


def as_number(value: object) -> object:
    """Convert a text that is a number to this number; return any other value unchanged."""
    if not isinstance(value, str) or len(value) > LONGEST_NUMBER or not _NUMBER.fullmatch(value):
        return value
    if value.lstrip("+-").isdigit():
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else value


def as_numbers(values: Mapping[str, object]) -> dict[str, object]:
    """Convert the values that are texts of numbers to numbers."""
    return {key: as_number(value) for key, value in values.items()}


def values_of(run: RunDir) -> dict[str, object]:
    """Return the values of a run's trial by key, as they were written; an empty dictionary without a trial.

    Raises UsageError for a run of a group whose sweep.json cannot be read.
    """
    found = group_of(run)
    if found is None:
        return read_object(run.values_file)
    trial = found[0].trials.get(found[1])
    return {} if trial is None else trial.values


def trial_values(arguments: Mapping[str, object]) -> dict[str, object]:
    """Convert the arguments of a call to JSON values, one for each argument and each item of a mapping.

    An item of ``config`` is named ``config.lr``; an item of a `SweeperTrial` keeps its own name. A value that
    looks like a secret is masked, and a value that JSON cannot represent becomes its shortened `repr`.
    """
    found: dict[str, object] = {}
    for name, value in _named(arguments):
        try:
            parts = dict(islice(_leaves(name, value, MAX_DEPTH), MAX_PARTS + 1))
        except Exception:  # the user's object may raise anything, and its text can still be shown
            parts = {name: _text(name, value)}
        found |= parts if len(parts) <= MAX_PARTS else {name: _text(name, value)}
    return found


def group_values(trials: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return the `trial_values` of each trial of a group, of nested values only those that differ."""
    found = list(map(trial_values, trials))
    first, *others = found or [{}]
    same = {key for key, value in first.items() if others and all(own.get(key) == value for own in others)}
    whole = (
        {name for name, value in _named(trial) if isinstance(value, str | int | float | list | tuple | None)}
        for trial in trials
    )
    return [
        {key: value for key, value in own.items() if key not in same or key in names}
        for own, names in zip(found, whole, strict=True)
    ]


def _named(arguments: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the arguments by name, and the values of a `SweeperTrial` in its place."""
    for name, value in arguments.items():
        params = _params(value)
        yield from [(name, value)] if params is None else params.items()


def _params(value: object) -> Mapping[str, object] | None:
    """Return the values of a `SweeperTrial`, or None for any other object, such as a module of parameters."""
    try:
        params = value.params if isinstance(value, SweeperTrial) else None
        return dict(params) if isinstance(params, Mapping) else None
    except Exception:  # whatever the user's object raises
        return None


def _leaves(name: str, value: object, depth: int) -> Iterator[tuple[str, object]]:
    parts = _parts(value) if depth else None
    if parts is None:
        yield name, _json(name, value)
        return
    for key, inner in parts.items():
        yield from _leaves(f"{name}.{key}", inner, depth - 1)


def _parts(value: object) -> Mapping[object, object] | None:
    """Return the named items of a value; None for a value without named items."""
    if type(value).__module__.startswith("omegaconf."):
        from omegaconf import OmegaConf

        value = OmegaConf.to_container(value)  # leave interpolations as they are written
    found: object = None
    if isinstance(value, Mapping):
        found = None if value is os.environ else value
    elif isinstance(value, SimpleNamespace) or type(value).__module__ == "argparse":
        found = vars(value)
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        found = value._asdict()
    elif is_dataclass(value) and not isinstance(value, type):
        found = {field.name: getattr(value, field.name, None) for field in fields(value)}
    return found if isinstance(found, Mapping) else None


def _json(key: str, value: object, depth: int = LIST_DEPTH) -> object:
    """Convert a plain value or a short list of such values to JSON, and any other value to its text."""
    if isinstance(value, Enum):
        return value.name
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = as_number(str(value))  # the text of a 32-bit 0.1 is 0.1
    if isinstance(value, bool | None):
        return value
    if isinstance(value, int) and value.bit_length() <= MAX_BITS:
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, str | PurePath):
        return _masked(key, str(value))
    if isinstance(value, list | tuple) and len(value) <= MAX_ITEMS and depth:
        return [_json(key, item, depth - 1) for item in value]
    return _text(key, value)


_REPR = reprlib.Repr()
_REPR.maxother = _REPR.maxstring = MAX_MASKED
_REPR.maxdict = _REPR.maxlist = _REPR.maxtuple = MAX_ITEMS


def _text(key: str, value: object) -> str:
    try:
        name = getattr(value, "__qualname__", None)  # a function or class has this attribute
    except Exception:  # whatever the user's object raises
        name = None
    return _masked(key, _ADDRESS.sub("", name if isinstance(name, str) else _REPR.repr(value)))


def _masked(key: str, text: str) -> str:
    """Mask secrets in a text, also because of the name of its key, and then shorten the text."""
    before = f"{key}: "
    text = mask_secrets(before + text[:MAX_MASKED]).removeprefix(before)
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"
