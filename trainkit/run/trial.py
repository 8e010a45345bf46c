"""Determine the values that distinguish a trial from other runs, for every way to define a sweep.

`--sweep` and `--array` set config keys and arguments of a COMMAND; `trainkit.submit`, `sweep` and `map_array`
set parameters of a function; Hydra and Optuna set the values of their own trials. The values of a group's
trials are stored in sweep.json, and the values of a separate run in values.json. The values are stored
exactly as the user wrote them.
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
"""Number of leading characters that are checked for secrets before a longer text is truncated."""
MAX_DEPTH = 8
MAX_BITS = 128
"""Maximum number of bits in an integer; larger integers are abbreviated. `MAX_ITEMS` limits the length of
lists, and `LIST_DEPTH` limits their nesting."""
MAX_ITEMS, LIST_DEPTH = 20, 2
MAX_PARTS = 1000
"""Maximum number of items in an argument whose items are stored separately; a larger argument is stored as
one value."""
LONGEST_NUMBER = 40
_NUMBER = re.compile(r"[-+]?(?:(?:0|[1-9]\d*)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII)
"""Matches a number without leading zeros, because a text such as 007 is considered a name."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+", re.IGNORECASE)


@runtime_checkable
class SweeperTrial(Protocol):
    """A trial from a sweeper such as Optuna; `params` maps parameter names to the trial's values."""

    @property
    def number(self) -> int: ...
    @property
    def params(self) -> Mapping[str, object]: ...


def as_number(value: object) -> object:
    """Convert a text that represents a number to that number; return any other value unchanged."""
    if not isinstance(value, str) or len(value) > LONGEST_NUMBER or not _NUMBER.fullmatch(value):
        return value
    if value.lstrip("+-").isdigit():
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else value


def as_numbers(values: Mapping[str, object]) -> dict[str, object]:
    """Convert each text in a mapping that represents a number to that number."""
    return {key: as_number(value) for key, value in values.items()}


def values_of(run: RunDir) -> dict[str, object]:
    """Return a run's trial values by key, as the user wrote them; {} if there are none.

    Raises UsageError if the run belongs to a group whose sweep.json cannot be read.
    """
    found = group_of(run)
    if found is None:
        return read_object(run.values_file)
    trial = found[0].trials.get(found[1])
    return {} if trial is None else trial.values


def trial_values(arguments: Mapping[str, object]) -> dict[str, object]:
    """Convert the arguments of a call to JSON values, one per argument or per item of a mapping.

    The item `lr` of the argument `config` is named ``config.lr``; the items of a `SweeperTrial` keep their
    names. A value that looks like a secret is masked; a value without a JSON equivalent becomes its shortened
    `repr`.
    """
    found: dict[str, object] = {}
    for name, value in _named(arguments):
        try:
            parts = dict(islice(_leaves(name, value, MAX_DEPTH), MAX_PARTS + 1))
        except Exception:  # The user's object may raise any exception; its text can still be stored.
            parts = {name: _text(name, value)}
        found |= parts if len(parts) <= MAX_PARTS else {name: _text(name, value)}
    return found


def group_values(trials: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return the `trial_values` for each trial in a group; keep nested values only if they differ."""
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
    """Yield the arguments by name; replace a `SweeperTrial` with its values."""
    for name, value in arguments.items():
        params = _params(value)
        yield from [(name, value)] if params is None else params.items()


def _params(value: object) -> Mapping[str, object] | None:
    """Return the values of a `SweeperTrial`; None for any other object, even one with `params`."""
    try:
        params = value.params if isinstance(value, SweeperTrial) else None
        return dict(params) if isinstance(params, Mapping) else None
    except Exception:  # The user's object may raise any exception.
        return None


def _leaves(name: str, value: object, depth: int) -> Iterator[tuple[str, object]]:
    parts = _parts(value) if depth else None
    if parts is None:
        yield name, _json(name, value)
        return
    for key, inner in parts.items():
        yield from _leaves(f"{name}.{key}", inner, depth - 1)


def _parts(value: object) -> Mapping[object, object] | None:
    """Return the named items of a value; None if it has no named items."""
    if type(value).__module__.startswith("omegaconf."):
        from omegaconf import OmegaConf

        value = OmegaConf.to_container(value)  # Leave OmegaConf's interpolations unresolved.
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
    """Convert a simple value or a short list to JSON, and any other value to text."""
    if isinstance(value, Enum):
        return value.name
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        # Convert to a string first, so that 0.1 in float32 becomes 0.1 instead of 0.10000000149.
        value = as_number(str(value))
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
        name = getattr(value, "__qualname__", None)  # Functions and classes have `__qualname__`.
    except Exception:  # The user's object may raise any exception.
        name = None
    return _masked(key, _ADDRESS.sub("", name if isinstance(name, str) else _REPR.repr(value)))


def _masked(key: str, text: str) -> str:
    """Mask secrets in a text, or the whole text if its key looks like a secret's name; then truncate it."""
    before = f"{key}: "
    text = mask_secrets(before + text[:MAX_MASKED]).removeprefix(before)
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"
