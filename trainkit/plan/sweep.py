"""Sweep axes: the values of each key, their combinations, and the differences between configs and plans."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainkit.config.names import is_known, meant
from trainkit.config.yamlfile import parse_value
from trainkit.errors import UsageError

MAX_POINTS = 100_000
"""More is a typing error: no known Slurm takes more tasks at once."""
NOT_SWEPT = {"name": "every point has the name of its group", "config_version": "it says how a file is read"}


@dataclass(frozen=True)
class Axis:
    """One key and what is tried for it."""

    key: str
    """Dotted, for example ``optimizer.lr``."""
    values: tuple[Any, ...]


def parse_axis(text: str) -> Axis:
    """The axis of ``--sweep a.b=1,2,3``.

    The values are what YAML reads between ``[`` and ``]``: numbers and words as in a config, ``"a,b"`` for a
    text with a comma, ``[1,2],[3,4]`` for lists. Raises UsageError.
    """
    origin = f"--sweep {text}"
    key, equals, raw = text.partition("=")
    key = key.strip()
    path = tuple(key.split("."))
    if not equals or not all(path):
        raise UsageError(
            f"{origin}: must look like section.key=VALUE,VALUE,…",
            hint="for example --sweep optimizer.lr=1e-4,3e-4",
        )
    try:
        values = parse_value(f"[{raw}]")
    except ValueError:
        values = None
    if not isinstance(values, list):
        raise UsageError(
            f"{origin}: {raw!r} is no list of YAML values",
            hint='values are separated by commas; one with a comma or a bracket in it is quoted: "a,b"',
        )
    if not values:
        raise UsageError(f"{origin}: there are no values", hint=f"for example --sweep {key}=1,2,3")
    if key in NOT_SWEPT:
        raise UsageError(f"{origin}: {key} cannot be swept: {NOT_SWEPT[key]}", hint="leave it out")
    if not is_known(path):
        match = meant(path)
        hint = f"did you mean {match}?" if match else "`trainkit schema` lists the keys"
        raise UsageError(f"{origin}: there is no key {key}", hint=hint)
    twice = _first_twice([json.dumps(value) for value in values])
    if twice is not None:
        raise UsageError(f"{origin}: {twice} stands there twice", hint="every point is a run of its own")
    return Axis(key, tuple(values))


def parse_axes(texts: Sequence[str]) -> tuple[Axis, ...]:
    """The axes of all ``--sweep``, in their order.

    Raises UsageError, also for a key that stands there twice and for more than `MAX_POINTS` combinations.
    """
    axes = tuple(parse_axis(text) for text in texts)
    twice = _first_twice([axis.key for axis in axes])
    if twice is not None:
        raise UsageError(f"--sweep {twice} stands there twice", hint="write all of its values into one")
    count = math.prod(len(axis.values) for axis in axes)
    if count > MAX_POINTS:
        raise UsageError(f"{count:,} combinations; the maximum is {MAX_POINTS:,}", hint="sweep fewer values")
    return axes


def combinations(axes: Sequence[Axis]) -> list[dict[str, Any]]:
    """The values of every point by key; the last key changes fastest."""
    keys = [axis.key for axis in axes]
    return [
        dict(zip(keys, values, strict=True)) for values in itertools.product(*(axis.values for axis in axes))
    ]


def shown(values: Mapping[str, Any]) -> str:
    """Values as a person reads them: ``optimizer.lr=0.1, seed=1``."""
    return ", ".join(f"{key}={shown_value(value)}" for key, value in values.items())


def shown_value(value: Any) -> str:
    """One value as it would be typed."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def short_keys(keys: Sequence[str]) -> list[str]:
    """The last part of every key, or the whole key where two end alike."""
    last = [key.rpartition(".")[2] for key in keys]
    return [key if last.count(part) > 1 else part for key, part in zip(keys, last, strict=True)]


def difference(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """What has to be changed in `base` to make it `other`, by dotted paths; for JSON objects.

    A mapping that has lost a key is replaced as a whole. Names with a dot stand in no path: the mapping
    around them is replaced.
    """
    return dict(_differences(base, other, ()))


def _differences(
    base: Mapping[str, Any], other: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[str, Any]]:
    for key, value in other.items():
        before = base.get(key)
        if key in base and before == value and type(before) is type(value):
            continue
        if isinstance(before, dict) and isinstance(value, dict) and _fits_in(before, value):
            yield from _differences(before, value, (*path, key))
        else:
            yield ".".join((*path, key)), value


def _fits_in(before: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    """Whether paths can tell how a mapping has changed."""
    return before.keys() <= value.keys() and not any("." in name for name in value)


def changed(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `base` with the changes that `difference` gave."""
    result = dict(base)
    for path, value in changes.items():
        head, dot, rest = path.partition(".")
        result[head] = changed(result[head], {rest: value}) if dot else value
    return result


def _first_twice(items: Sequence[str]) -> str | None:
    return next((item for index, item in enumerate(items) if item in items[:index]), None)
