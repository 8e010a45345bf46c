"""The signatures by which `trainkit diagnose` recognises causes: the shipped ones and the user's own."""

from __future__ import annotations

import os
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from trainkit.config.section import Section
from trainkit.config.yamlfile import Entry, read_yaml_file
from trainkit.errors import ConfigError, Problem
from trainkit.folders import config_folder

SHIPPED = Path(__file__).with_name("signatures.yaml")
FILE_NAME = "signatures.yaml"

Role = Literal["cause", "symptom", "cascade", "fallback"]
"""A `cause` explains a failure. A `symptom` says how a rank ended, as `killed by SIGKILL`, which something
else may explain. A `cascade` is what ranks report after another one has failed. A `fallback` is for an
exception of the user's code that nothing else explains."""
Where = Literal["record", "log", "agent", "srun", "slurm", "start", "end", "event"]
"""The first failure and the records of ranks, the output of ranks, the logs of agents, the output of srun,
the job's state in Slurm, a start that ended before the supervisor began, the cause that end.json names, and
the events before the failure."""
Confidence = Literal["certain", "likely"]

_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _expression(text: object) -> object:
    if not isinstance(text, str):
        return text
    try:
        pattern = re.compile(text, re.MULTILINE)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from None
    if pattern.search(""):
        raise ValueError(f"{text!r} matches an empty line: it would match every run")
    return pattern


def _sentence(template: str) -> str:
    try:
        placeholders(template)
    except ValueError as error:
        raise ValueError(f"{template!r}: {error}; write {{ as {{{{ and }} as }}}}") from None
    return template


Text = Annotated[str, Field(min_length=1)]
Sentences = Annotated[tuple[Annotated[Text, AfterValidator(_sentence)], ...], BeforeValidator(_as_tuple)]
Pattern = Annotated[re.Pattern[str], BeforeValidator(_expression)]


class Signature(Section):
    """How one cause shows in the files of a run, and what to do about it, as it is written in a file."""

    name: str = ""
    """Its key in the file."""
    title: Text
    patterns: Annotated[tuple[Pattern, ...], BeforeValidator(_as_tuple), Field(alias="pattern", min_length=1)]
    role: Role = "cause"
    where: Annotated[tuple[Where, ...], BeforeValidator(_as_tuple)] = ("record", "log")
    confidence: Confidence = "certain"
    causes: Annotated[Sentences, Field(alias="cause")] = ()
    """Sentences, of which the first whose placeholders all have a value in a run is used.

    Placeholders are named groups of the pattern and the values of `observe.advice`.
    """
    advice: Sentences = ()
    """Sentences; one whose placeholders have no value in a run is left out."""
    doc: Annotated[str, BeforeValidator(lambda text: " ".join(text) if isinstance(text, list) else text)] = ""
    """A paragraph for the docs."""

    @property
    def is_of_a_rank(self) -> bool:
        """Whether a rank has failed, and not the job as a whole."""
        names = {name for cause in self.causes for name in placeholders(cause)}
        return not names.isdisjoint({"subject", "rank"})


_KEYS = ", ".join(info.alias or name for name, info in Signature.model_fields.items() if name != "name")
KEYS_HINT = f"the keys are {_KEYS}"


def user_files(cwd: Path, environ: Mapping[str, str] = os.environ) -> list[tuple[Path, str]]:
    """The signature files of the project and of the user that exist, each with its name in messages."""
    files = [(cwd / FILE_NAME, FILE_NAME)]
    in_home = config_folder(environ) / FILE_NAME
    files.append((in_home, str(in_home)))
    return [(path, shown) for path, shown in files if path.is_file()]


def load_signatures(files: Sequence[tuple[Path, str]] = ()) -> list[Signature]:
    """The signatures of these files, then the shipped ones; a name counts where it appears first.

    Raises ConfigError with every problem of the files, each with its line.
    """
    found: dict[str, Signature] = {}
    problems: list[Problem] = []
    for path, shown in [*files, (SHIPPED, SHIPPED.name)]:
        try:
            content = read_yaml_file(path, shown)
        except ConfigError as error:
            problems += error.problems
            continue
        for name, entry in content.value.items():
            signature = _parse(name, entry, problems)
            if signature is not None:
                found.setdefault(name, signature)
    if problems:
        raise ConfigError(problems)
    return list(found.values())


def _parse(name: str, entry: Entry, problems: list[Problem]) -> Signature | None:
    if not _NAME.fullmatch(name):
        problems.append(Problem(name, "a name consists of a-z, 0-9 and -", entry.origin))
    if entry.is_mapping and "name" in entry.value:
        problems.append(Problem(f"{name}.name", "unknown key", entry.value["name"].origin, KEYS_HINT))
    try:
        found = Signature.model_validate(entry.plain())
    except ValidationError as error:
        for item in error.errors(include_url=False):
            key = str(item["loc"][0]) if item["loc"] else ""
            place = entry.value[key] if entry.is_mapping and key in entry.value else entry
            message = item["msg"].removeprefix("Value error, ")
            if item["type"] == "extra_forbidden":
                problems.append(Problem(f"{name}.{key}", "unknown key", place.origin, KEYS_HINT))
                continue
            if item["type"] not in ("value_error", "missing"):
                message = f"is {item['input']!r}: {message}"
            problems.append(Problem(f"{name}.{key}".rstrip("."), message, place.origin))
        return None
    return found.model_copy(update={"name": name, "causes": found.causes or (found.title,)})


def placeholders(template: str) -> list[str]:
    """The names in the braces of a template. Raises ValueError for anything but plain names."""
    names = []
    for _, name, spec, conversion in string.Formatter().parse(template):
        if name is not None:
            if not name.isidentifier() or spec or conversion:
                raise ValueError(f"{{{name}}} is not a placeholder")
            names.append(name)
    return names


def fill(template: str, values: Mapping[str, str]) -> str | None:
    """The text of a template; None when one of its placeholders has no value."""
    if any(not values.get(name) for name in placeholders(template)):
        return None
    return template.format_map(values)
