"""Reports unknown keys and invalid values, with hints about what the user probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from decimal import Decimal
from shlex import quote
from typing import Any
from unicodedata import combining, normalize

from pydantic import ValidationError

from trainkit.config.foreign import LIGHTNING, SWEEPS
from trainkit.config.optimizers import OPTIMIZERS
from trainkit.config.schema import (
    all_keys,
    allowed_values,
    config_class,
    default_values,
    entry_schemas,
    field_schema,
    is_known,
    meant,
    schema_words,
    sections,
    show_value,
)
from trainkit.config.training import SCHEDULES
from trainkit.config.yamlfile import WHOLE, Entry, parse_value
from trainkit.errors import Problem
from trainkit.folders import INTERPOLATION, NOT_EVALUATED
from trainkit.formats import JsonObject, near, plural, time_limit_s, time_text
from trainkit.shipped import load, shipped_classes

WORDS = {
    **{"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"},
    **{"gpu": "cuda", "slurm": "sbatch", "7": "7b", "8": "8b", "13": "13b", "70": "70b"},
    **{"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"},
    **{"bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16", "16-true": "fp16", "16": "fp16"},
    **{"32-true": "fp32", "32": "fp32"},
    **dict.fromkeys(("never", "none", "nil"), "null"),
    **dict.fromkeys(("pytorch", "torch", "torch.distributed.run", "torch.distributed.launch"), "torchrun"),
}
"""Maps other spellings of values, in lower case, to the values that trainkit accepts."""
_QUOTES = "\"'`“”„‘’‚«»"
_THOUSANDS = re.compile(r"[-+]?\d{1,3}([,_]\d{3})+")
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+([eE][-+]?\d+)?")
_RANGE = re.compile(r"(\d+) *(?:-|:|\.{2,3}|\N{EN DASH}) *(\d+)")
_WHOLE = re.compile(r"[-+]?\d+\.0*|[-+]?\d+(\.\d+)?[eE]\+?\d+")
_DURATION = re.compile(
    r"(?=\d)(?:(?P<w>[\d.]+)\s*w(?:eeks?)?)?\s*(?:(?P<d>[\d.]+)\s*d(?:ays?)?)?\s*(?:(?P<h>[\d.]+)\s*h(?:(?:ou)?rs?)?)?\s*"
    r"(?:(?P<m>\d+)\s*m(?:in(?:ute)?s?)?)?\s*(?:(?P<s>\d+)\s*s(?:ec(?:ond)?s?)?)?"
)
_CLOCK = re.compile(r"(?:(?:(\d+)[-:])?(\d+):)?(\d+):(\d+)")
"""Matches a duration written as days, hours, minutes and seconds. Slurm allows at most 59 minutes and 59
seconds, and requires a dash after the days."""
_TIMES = re.compile(r"(.*\d.*?)\s*(?:-|\.\.|\bto\b|\N{EN DASH})\s*(.*\d.*)")
"""Matches a range of time limits, such as 1h-2h."""
_THOUSAND = re.compile(r"(\d+(?:\.\d+)?)\s*([km])")
_SETTINGS = re.compile(r"[,;]\s*(?=[a-z_]+(?:\.[a-z_]+)*=)")
"""Matches the separator between two settings that were typed in one argument."""
_FACTORS = {"k": 1000, "m": 10**6}
MAX_WHOLE = 10**18
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
MEMORY = ("resources", "mem")
GPU_TYPE = ("resources", "gpu_type")
TIME = ("resources", "time")
TIMES = (TIME, ("resources", "slice"), ("resources", "time_min"))
OPTIMIZER = ("optimizer", "name")
SCHEDULE = ("schedule", "name")
NAMES: dict[tuple[str, ...], tuple[str, ...]] = {OPTIMIZER: tuple(OPTIMIZERS), SCHEDULE: SCHEDULES}
"""Maps keys to the words that are valid values, besides FILE.py:NAME."""
_MEMORY = re.compile(r"(\d+)(?:[.,](\d+))?\s*([kmgtp])(?:[a-z]*ytes?|ig[as]?|b)?")
GRES = re.compile(r"(?:gpus?:)?(?!gpus?\b)([A-Za-z][\w.-]*?)(?::(\d+))?", re.ASCII)
"""Matches a GPU type and count in the syntax of sbatch's --gres and --gpus-per-node."""
_MEMORY_PER_CPU = re.compile(r"(\d+[KMGT])c")


_BATCH = (
    "did you mean train.device_batch_size, the number of samples per process and accumulation step, or "
    "train.global_batch_size, the number of samples per optimizer step?"
)
_ACCUMULATES = (
    "set train.global_batch_size: each optimizer step accumulates gradients until it has processed this "
    "number of samples"
)
_SHARDS = "the default, parallel.dp_shard: -1, shards the model over all processes, as FSDP does"
_OPTIMIZER = "for another optimizer, set optimizer.name to FILE.py:CLASS; see docs/optimizers.md"
_SCHEDULE = "for another schedule, set schedule.name to FILE.py:FUNCTION; see docs/optimizers.md"
_LAUNCHES = "trainkit sets this value; `--launcher accelerate` writes a config for accelerate"
_FOLDER = "`--run-dir DIR` sets the run folder, which contains all output of the run"
_HYDRA = "`python app.py -m hydra/launcher=trainkit KEY=VALUE,VALUE` submits a Hydra application"
_TRAINER = (
    "did you mean train? The devices, num_nodes, max_epochs and precision of Lightning's Trainer are"
    " resources.gpus_per_node, resources.nodes, train.epochs and precision.dtype"
)
OTHER_KEYS_SAY = {
    **dict.fromkeys(("batch_size", "batchsize", "bs", "batch"), _BATCH),
    **dict.fromkeys(("fsdp", "strategy", "fsdp_config", "sharding_strategy", "ddp"), _SHARDS),
    "fsdp_sharding_strategy": _SHARDS,
    **dict.fromkeys(("program", "method", "parameters", "metric", "early_terminate", "run_cap"), SWEEPS),
    **dict.fromkeys(("compute_environment", "distributed_type", "main_training_function"), _LAUNCHES),
    **dict.fromkeys(("machine_rank", "main_process_ip", "main_process_port", "rdzv_backend"), _LAUNCHES),
    **dict.fromkeys(("config_file", "multi_gpu", "dynamo_backend", "deepspeed_config_file"), _LAUNCHES),
    **dict.fromkeys(("class_path", "init_args", "dict_kwargs"), LIGHTNING.format(file="FILE")),
    "trainer": _TRAINER,
    **dict.fromkeys(("output_dir", "save_dir", "log_dir", "logging_dir", "default_root_dir"), _FOLDER),
    **dict.fromkeys(("hydra", "_target_", "_partial_", "_recursive_", "_self_"), _HYDRA),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum", "accumulate_grad_batches"), _ACCUMULATES),
    "defaults": "extends: [FILE, …] lists the configs to merge before this file",
    "gres": "did you mean resources.gpus_per_node? resources.extra takes other options of sbatch",
}
"""Hints for keys of other programs that have no single trainkit equivalent, by key."""


def unknown_keys(entry: Entry) -> Iterator[tuple[tuple[str, ...], Entry]]:
    """Yield the unknown sections and keys of a tree."""
    for name, inner in entry.value.items():
        if not is_known((name,)):
            yield (name,), inner
        elif name in sections() and inner.is_mapping:
            for key, value in inner.value.items():
                if not is_known((name, key)):
                    yield (name, key), value


def other_key_says(key: str) -> str | None:
    """Return a hint for another program's key without a single trainkit equivalent; None for other keys."""
    of_capabilities = (load(name).other_keys.get(key) for name in shipped_classes())
    return OTHER_KEYS_SAY.get(key) or next(filter(None, of_capabilities), None)


def unknown_problem(path: tuple[str, ...], entry: Entry) -> Problem:
    """Return the problem for an unknown key, with the closest known key as a hint."""
    if (other := other_key_says(path[-1])) is not None:
        return Problem(".".join(path), "unknown key", entry.origin, other)
    match = meant(path)
    own = ", ".join(sections()[path[0]]) if len(path) > 1 else ""
    other = f"{path[0]} has {own}" if own else "`trainkit schema` prints every key"
    hint = f"did you mean {match}?" if match else other
    if "." in path[-1] and path[-1] in all_keys():
        section, _, leaf = path[-1].partition(".")
        hint = f'write "{section}:" and, indented on the next line, "{leaf}:"'
    if match and entry.origin.startswith("TRAINKIT_"):
        hint = f"did you mean TRAINKIT_{match.upper().replace('.', '__')}?"
    return Problem(".".join(path), "unknown key", entry.origin, hint)


def validation_problems(error: ValidationError, entry: Entry) -> list[Problem]:
    """Return one problem for each key whose value is invalid."""
    problems: dict[tuple[str, ...], Problem] = {}
    for item in error.errors(include_url=False, include_context=False):
        location = tuple(str(part) for part in item["loc"])
        path = location[:2] if location[0] in sections() else location[:1]
        if path in problems:
            continue
        found = entry.find(path)
        if not is_known(path) or found is None:
            problems[path] = unknown_problem(path, found or entry)
            continue
        origin = _origin(found, location[len(path) :])
        value = found.plain()
        is_number = item["type"] == "string_type" and isinstance(value, int | float)
        shown = found.typed if is_number and found.typed else show_value(value)
        message = f"must be {allowed_values(path)}, not {shown}"
        entry_name, entries = location[-1], entry_schemas(path)
        if isinstance(value, dict) and entries and len(location) > len(path) and entry_name in value:
            problems[path] = _entry_problem(path, entry_name, value[entry_name], entries, origin)
            continue
        problems[path] = Problem(".".join(path), message, origin, value_hint(path, found, origin))
    return list(problems.values())


def _entry_problem(path: tuple[str, ...], name: str, value: Any, schemas: JsonObject, origin: str) -> Problem:
    """Return the problem with one entry of a key whose value is a mapping with fixed entries."""
    if name in schemas:
        message = f"has {show_value(value)} as {name}, which must be {schema_words(schemas[name])}"
        return Problem(
            ".".join(path), message, origin, f"the default is {show_value(schemas[name]['default'])}"
        )
    match = near(name, schemas)
    hint = f"did you mean {match}?" if match else f"use {', '.join(schemas)}"
    return Problem(".".join(path), f"has the unknown entry {name}", origin, hint)


def _origin(found: Entry, rest: tuple[str, ...]) -> str:
    """Return the origin of the invalid item at position `rest` within a value.

    If the item has several origins, a flag takes precedence over a file.
    """
    for part in rest:
        found = (
            found.find((part,)) or found
        )  # pydantic's location also includes the types of a union, which are not part of the path.
    origins = [leaf.origin for _, leaf in found.leaves()] or [found.origin]
    return next((one for one in origins if one.startswith("--")), origins[0])


def readings(text: str, words: Iterable[str] = ()) -> Iterator[str]:
    """Yield possible meanings of the user's `text`, closest first; `words` are the allowed values."""
    bare = text.strip().strip(_QUOTES).strip()
    small = bare.lower()
    yield from (bare, small)
    if _THOUSANDS.fullmatch(bare):
        yield re.sub("[,_]", "", bare)
    if _DECIMAL_COMMA.fullmatch(bare):
        yield bare.replace(",", ".")
    if _WHOLE.fullmatch(bare) and abs(Decimal(bare)) < MAX_WHOLE:
        yield str(int(Decimal(bare)))
    if (ends := _RANGE.fullmatch(bare)) is not None:
        yield "-".join(sorted(ends.groups(), key=int))
    if small in WORDS:
        yield WORDS[small]
    if (match := near(small, words)) is not None:
        yield match
    if (short := _THOUSAND.fullmatch(small)) is not None:
        yield str(int(Decimal(short[1]) * _FACTORS[short[2]]))
    if (memory := _MEMORY.fullmatch(re.sub(r",(?=\d{3}\D)", "", small))) is not None:
        yield memory[1] + (f".{memory[2]}" if memory[2] else "") + memory[3].upper()
    yield f"[{bare}]"


def times(text: str) -> Iterator[str]:
    """Yield possible meanings of the user's text as times in Slurm's format."""
    bare = text.strip().strip(_QUOTES).strip().lower()
    yield bare
    if (duration := _DURATION.fullmatch(bare)) is not None:
        with suppress(ValueError):  # float() raises ValueError for a text such as 1.2.3h.
            yield time_text(round(sum(float(duration[unit] or 0) * s for unit, s in _UNIT_S.items())))
    if (clock := _CLOCK.fullmatch(bare)) is not None:
        days, *rest = (int(part or 0) for part in clock.groups())
        yield time_text(
            days * _UNIT_S["d"] + sum(part * s for part, s in zip(rest, (3600, 60, 1), strict=True))
        )


def _time_range(text: str) -> tuple[str, str] | None:
    """Return the two bounds of a time range in order, or None if the text is not a time range."""
    found = _TIMES.fullmatch(text.strip().strip(_QUOTES).lower())
    if found is None:
        return None
    first, last = found.groups()
    if (unit := re.search("[a-z]+$", last)) is not None and first.isdigit():
        first += unit[0]  # 1-2h means 1h to 2h.
    ends = [
        next((one for one in times(end) if ":" in one and accepts(TIME, one)), None) for end in (first, last)
    ]
    known = sorted(filter(None, ends), key=lambda end: time_limit_s(end) or 0)
    return (known[0], known[1]) if len(known) == 2 else None


def value_hint(path: tuple[str, ...], found: Entry, origin: str) -> str:
    """Return a hint about how to write a key's value, given the value that was rejected."""
    value = found.plain()
    # The values of a mapping such as launch.env may contain a literal ${…}.
    is_text_allowed = isinstance(value, dict) and path != WHOLE
    if not is_text_allowed and has_interpolation(value if isinstance(value, str) else show_value(value)):
        return not_evaluated(path, origin)
    if path == WHOLE and isinstance(value, dict):
        return "give each source a weight, such as {web: 0.7, code: 0.3}; the weights need not sum to 1"
    if len(path) == 1 and isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        return "write the keys without leading dashes"
    if isinstance(value, list | dict):
        return _default_hint(path)
    typed = value if isinstance(value, str) else found.typed or show_value(value)
    if path == MEMORY and (of_cpu := _MEMORY_PER_CPU.fullmatch(typed)):
        return f"to request memory per CPU, use resources.extra: {{mem-per-cpu: {of_cpu[1]}}}"
    if path == TIME and typed.lower() in ("unlimited", "infinite"):
        return 'use "0" to set no time limit'
    if path == TIME and (ends := _time_range(typed)) is not None:
        if origin.startswith("--time "):
            return (
                f"did you mean --time-min {ends[0]} --time {ends[1]}? Slurm then chooses a time limit "
                "between the two"
            )
        return (
            f"did you mean time: {ends[1]} with time_min: {ends[0]}? Slurm then chooses a time limit "
            "between the two"
        )
    if path == GPU_TYPE and (gres := GRES.fullmatch(typed)):
        count = f" Set the number of GPUs, {gres[2]}, with resources.gpus_per_node" if gres[2] else ""
        return f"did you mean {_written(path, gres[1], origin)}?{count}"
    if typed == "???":
        return "??? marks a missing value in Hydra: specify a value, or omit the key to use the default"
    if path[0] in sections() and len(path) == 1:
        return _section_hint(path[0], typed, origin)
    if path == ("name",):
        letters = normalize("NFKD", typed.replace("ß", "ss"))
        # Remove accents, so that é becomes e.
        plain = "".join(one for one in letters if not combining(one))
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", plain).strip("-._")[:100]
        if name.isdigit():
            return f"a number would be interpreted as a job id; add letters, as in run-{name}"
        if not accepts(path, name):  # Without quotes, YAML would parse such a name as a number or boolean.
            name = name and f'"{name}"'
        begins = "" if letters[:1].isalnum() else " A name begins with a letter or a digit"
        return f"did you mean {_written(path, name, origin)}?{begins}" if name else _default_hint(path)
    meant = nearest(path, typed)
    if meant is not None:
        unit = " Without a unit, Slurm reads the number as MB" if path == MEMORY and typed.isdigit() else ""
        return f"did you mean {_written(path, meant, origin)}?{unit}"
    if isinstance(value, int | float) and accepts(path, quoted := f'"{typed}"'):
        more = ""
        if path == TIME and isinstance(value, int):
            more = f', {plural(value, "minute")}; "{typed}:00:00" is {plural(value, "hour")}'
        return f"put the value in quotes: {_written(path, quoted, origin)}{more}"
    if origin.startswith("--set ") and len(settings := _SETTINGS.split(f"{'.'.join(path)}={typed}")) > 1:
        return f"use a separate --set for each key: {' '.join(f'--set {quote(one)}' for one in settings)}"
    if origin.startswith("--set ") and "," in typed and all(accepts(path, it) for it in typed.split(",")):
        return f"to start one run for each value: `trainkit submit --sweep {'.'.join(path)}={typed}`"
    return _default_hint(path)


def has_interpolation(text: str) -> bool:
    """Return whether a string contains a Hydra interpolation, such as ``${oc.env:USER}``."""
    return INTERPOLATION.search(text) is not None


def not_evaluated(path: tuple[str, ...], origin: str = "") -> str:
    """Return a hint for a value that contains a Hydra interpolation."""
    if len(path) == 1 and path[0] in sections():
        return f"{NOT_EVALUATED}: specify the keys of the section"
    other = "" if origin.startswith("--") else f", or set the environment variable {variable_of(path)}"
    return f"{NOT_EVALUATED}: specify the value itself{other}"


def variable_of(path: tuple[str, ...]) -> str:
    """Return the name of the environment variable that sets a key."""
    return f"TRAINKIT_{'__'.join(path).upper()}"


def nearest(path: tuple[str, ...], typed: str) -> str | None:
    """Return the valid value for the key that is closest to the user's text, or None if none is close."""
    found = times(typed) if path in TIMES else readings(typed, _words(path))
    if path == MEMORY and re.fullmatch(r"\d+(\.\d+)?", typed):
        # Slurm users who write a number below 1000 rarely mean megabytes.
        found = iter((f"{typed}{'G' if float(typed) < 1000 else 'M'}",) if float(typed) else ())
    return next((text for text in found if accepts(path, text)), None)


def _section_hint(section: str, typed: str, origin: str) -> str:
    """Return a hint for text that was given instead of a section.

    The text is either a value, such as ``7b`` in ``model: 7b``, or a key and its value without a space after
    the colon.
    """
    key, sign, rest = re.match(r"([^:=\s]*)\s*([:=]?)\s*(.*)", typed, re.DOTALL).groups()  # type: ignore[union-attr]
    if rest and key in sections()[section]:
        return (
            f"write the setting with a {'space after the colon' if sign == ':' else 'colon'}: {key}: {rest}"
        )
    for key in sections()[section]:
        path = (section, key)
        if (meant := nearest(path, typed)) is not None:
            if origin.startswith("--"):
                return f"did you mean {_written(path, meant, origin)}?"
            return f'write "{section}:" and, indented on the next line, "{key}: {meant}"'
    return _default_hint((section,))


def _words(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words that are valid values for the key."""
    if path in NAMES:
        return NAMES[path]
    field = field_schema(path)
    options = field.get("anyOf", [field])
    return tuple(str(word) for option in options for word in option.get("enum", ()))


def accepts(path: tuple[str, ...], text: str) -> bool:
    """Return whether `text`, parsed as YAML, is a valid value for a key."""
    try:
        content = parse_value(text, path)
        for name in reversed(path):
            content = {name: content}
        config_class(content).model_validate(content)
    except (ValueError, ValidationError):
        return False
    return True


def _written(path: tuple[str, ...], text: str, origin: str) -> str:
    """Return a corrected value in the form that the user must type."""
    if origin.startswith("--set "):
        return "--set " + quote(f"{'.'.join(path)}={text}")
    return f"{origin.split(' ')[0]} {quote(text)}" if origin.startswith("--") else text


def _default_hint(path: tuple[str, ...]) -> str:
    if len(path) == 1 and path[0] in sections():
        key = sections()[path[0]][0]
        return f"for example {path[0]}: {{{key}: {show_value(default_values()[f'{path[0]}.{key}'])}}}"
    if path == OPTIMIZER:
        return _OPTIMIZER
    if path == SCHEDULE:
        return _SCHEDULE
    if path == MEMORY:
        return "for example 64G, 3.5G or 512M; 0 means all memory of a node"
    default = default_values().get(".".join(path))
    if default in ({}, []):
        return f"write the value as {'{NAME: VALUE}' if default == {} else '[VALUE, VALUE]'}"
    return f"the default is {show_value(default)}"
