"""Parses the axes of a sweep, combines their values, and inserts the values into a command."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence

from trainkit.config.schema import default_values, is_known, meant, sections
from trainkit.config.suggest import accepts, has_interpolation, not_evaluated
from trainkit.config.yamlfile import VARIABLES, parse_value
from trainkit.errors import UsageError
from trainkit.formats import shown_value

MAX_TRIALS = 100_000
"""Maximum number of trials; a larger number is treated as a typo, because no known Slurm cluster accepts
larger arrays."""
NOT_SWEPT = {
    "name": "all trials share the name of their group",
    "config_version": "the key specifies the version of the config format",
}


_SPAN = re.compile(
    r"(?P<first>\d+)(?:\.\.|-|:)(?P<last>\d+)"
    r"|range\((?:(?P<start>\d+), *)?(?P<end>\d+)(?:, *(?P<step>[1-9]\d*))?\)"
)
"""Matches a range written in shell, Slurm, Hydra or Python syntax. A range with a colon excludes its last
number, as in Python."""
_WRAPPED = re.compile(r"choice\(([^()]*)\)|\(([^()]*)\)|\{([^{}:]*)\}")
_DRAWN = re.compile(r"(?:interval|uniform|log_?uniform|log|normal|tag|glob|sort|shuffle)\(.*\)")
"""Matches Hydra functions such as ``interval(…)``, whose values Hydra or its search algorithm chooses."""
_SEPARATED = re.compile(r"[-+\d.eE]+(?:[\s;]+[-+\d.eE]+)+")
MAX_LISTED = 20


def _meant_values(path: tuple[str, ...], raw: str) -> str | None:
    """Return a value in another tool's syntax as comma-separated values; None for any other value."""
    if accepts(path, raw):
        return None
    if (wrapped := _WRAPPED.fullmatch(raw)) is not None:
        parts = [part.strip() for part in next(filter(None, wrapped.groups()), "").split(",")]
        return ",".join(parts) if any(parts) else None
    if _DRAWN.fullmatch(raw):
        return "VALUE,VALUE,…"
    if (span := _SPAN.fullmatch(raw)) is not None:
        first, last = int(span["first"] or span["start"] or 0), int(span["last"] or span["end"])
        is_closed = span["last"] is not None and ":" not in raw
        numbers = range(first, last + 1 if is_closed else last, int(span["step"] or 1))
        return ",".join(map(str, numbers)) if 1 < len(numbers) < MAX_LISTED else "VALUE,VALUE,…"
    if _SEPARATED.fullmatch(raw):
        return ",".join(re.split(r"[\s;]+", raw))
    return None


def parse_axis(text: str, command: Sequence[str] = ()) -> tuple[str, list[object]]:
    """Parse an axis such as ``--sweep a.b=1,2,3`` into a key and a list of values.

    If `command` contains ``{lr}``, ``--sweep lr=1,2`` is valid too. The values are parsed as the items of a
    YAML list: ``"a,b"`` is a single string with a comma, and ``[1,2],[3,4]`` are two lists. Raises UsageError
    if `text` is not a valid axis.
    """
    origin = f"--sweep {text}"
    key, equals, raw = text.partition("=")
    key = key.strip()
    path = tuple(key.split("."))
    if not equals or not all(path):
        name, colon, values_typed = text.partition(":")
        hint = "for example --sweep optimizer.lr=1e-4,3e-4"
        if colon and is_known(tuple(name.split("."))):
            hint = f"did you mean --sweep {name}={values_typed}?"
        elif text.endswith((".yaml", ".yml")):
            hint = (
                "--sweep does not accept a file; use --sweep once for each key, such as --sweep "
                "optimizer.lr=1e-4,3e-4"
            )
        raise UsageError(f"{origin}: must have the form section.key=VALUE,VALUE,…", hint=hint)
    is_placeholder = not is_known(path) and names_key(command, key)
    if not is_placeholder and is_known(path) and (values_hint := _meant_values(path, raw)) is not None:
        raise UsageError(
            f"{origin}: {raw} is not a list of values", hint=f"list the values: --sweep {key}={values_hint}"
        )
    try:
        # The command receives the values exactly as the user wrote them.
        values = parse_value(f"[{raw}]", (*VARIABLES, key) if is_placeholder else path)
    except ValueError:
        values = None
    if not isinstance(values, list):
        hint = 'separate values with commas, and quote a value that contains a comma or bracket: "a,b"'
        if has_interpolation(raw):
            hint = not_evaluated(path, origin)
        raise UsageError(f"{origin}: {raw!r} is not a list of YAML values", hint=hint)
    if not values:
        raise UsageError(f"{origin}: there are no values", hint=f"for example --sweep {key}=1,2,3")
    own = sections().get(key)
    if own and not all(value is None or isinstance(value, dict) for value in values):
        hint = f"for example --sweep {key}.{own[0]}=…"
        if command:
            hint = f"use another name: --sweep {key}_value={raw}, and {{{key}_value}} in the COMMAND"
        raise UsageError(f"{origin}: {key} is a section of the config", hint=hint)
    is_list = len(values) == 1 and isinstance(values[0], list)
    if is_list and is_known(path) and not isinstance(default_values().get(key), list):
        hint = f"write the value without the brackets: --sweep {key}={raw.strip()[1:-1]}"
        raise UsageError(f"{origin}: {key} does not accept a list", hint=hint)
    hint = f"write {{{key}}} in the COMMAND as a placeholder for the value" if command else ""
    refuse_axis(key, values, origin, is_placeholder=is_placeholder, hint=hint)
    return key, values


def refuse_axis(
    key: str, values: Sequence[object], origin: str, *, is_placeholder: bool = False, hint: str = ""
) -> None:
    """Raise UsageError if a key cannot be swept over `values`; `hint` is used if the key is unknown."""
    if key in NOT_SWEPT:
        raise UsageError(f"{origin}: {key} cannot be swept: {NOT_SWEPT[key]}", hint="remove it")
    path = tuple(key.split("."))
    if not is_known(path) and not is_placeholder:
        match = meant(path)
        found = f"did you mean {match}?" if match else "`trainkit schema` lists the keys"
        raise UsageError(f"{origin}: unknown key {key}", hint=hint or found)
    twice = _first_twice([json.dumps(value) for value in values])
    if twice is not None:
        raise UsageError(f"{origin}: {twice} appears twice", hint="specify each value only once")


def names_key(command: Sequence[str], key: str) -> bool:
    """Return whether a command contains ``{key}``, the placeholder for a swept value."""
    return any(f"{{{key}}}" in word for word in command)


def filled_in(command: Sequence[str], values: Mapping[str, object]) -> tuple[str, ...]:
    """Return the command of a trial with each placeholder ``{key}`` replaced by the swept value."""
    words = []
    for word in command:
        for key, value in values.items():
            word = word.replace(f"{{{key}}}", shown_value(value))
        words.append(word)
    return tuple(words)


def sweep_trials(texts: Sequence[str], command: Sequence[str] = ()) -> list[dict[str, object]]:
    """Return all combinations of values from all ``--sweep`` options; the last key varies fastest.

    Raises UsageError for an invalid axis, a key that appears twice, and more than `MAX_TRIALS` combinations.
    """
    axes = [parse_axis(text, command) for text in texts]
    keys = [key for key, _ in axes]
    twice = _first_twice(keys)
    if twice is not None:
        raise UsageError(f"--sweep {twice} appears twice", hint="list all values of a key in one --sweep")
    count = math.prod(len(values) for _, values in axes)
    if count > MAX_TRIALS:
        raise UsageError(f"{count:,} combinations; the maximum is {MAX_TRIALS:,}", hint="sweep fewer values")
    combinations = itertools.product(*(values for _, values in axes))
    return [dict(zip(keys, values, strict=True)) for values in combinations]


def key_without_seed(values: Mapping[str, object]) -> str:
    """Return a trial's values as text that is the same for trials that differ only in the seed."""
    return json.dumps({key: value for key, value in values.items() if key != "seed"})


def _first_twice(items: Sequence[str]) -> str | None:
    return next((item for index, item in enumerate(items) if item in items[:index]), None)
