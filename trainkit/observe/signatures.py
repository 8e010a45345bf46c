"""The signatures by which `trainkit diagnose` recognises causes: the shipped ones and the user's own."""

from __future__ import annotations

import os
import re
import signal
import string
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from trainkit.config.yamlfile import Entry, read_yaml_file
from trainkit.errors import ConfigError, Problem, UsageError
from trainkit.folders import config_folder

SHIPPED = Path(__file__).with_name("signatures.yaml")
FILE_NAME = "signatures.yaml"

Role = Literal["cause", "symptom", "cascade"]
"""A `cause` explains a failure. A `symptom` says how a rank ended, as `killed by SIGKILL`, which something
else may explain. A `cascade` is what ranks report after another one has failed."""
Where = Literal["record", "log", "agent", "srun", "slurm", "start", "end", "event"]
"""The first failure and the records of ranks, the output of ranks, the logs of agents, the output of srun,
the job's state in Slurm, a start that ended before the supervisor began, the cause that end.json names, and
the events before the failure."""
Confidence = Literal["certain", "likely"]

MAX_PATTERN_S = 2.0
"""How long the patterns of a user's signature may take for one run."""
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")


@dataclass(frozen=True)
class Signature:
    """How one cause shows in the files of a run, and what to do about it."""

    name: str
    title: str
    patterns: tuple[re.Pattern[str], ...]
    role: Role
    where: tuple[Where, ...]
    confidence: Confidence
    causes: tuple[str, ...]
    """Sentences, of which the first whose placeholders all have a value in a run is used.

    Placeholders are named groups of the pattern and the values of `observe.advice`.
    """
    advice: tuple[str, ...]
    """Sentences; one whose placeholders have no value in a run is left out."""
    doc: str
    """A paragraph for the docs."""
    origin: str
    is_shipped: bool = False

    @property
    def is_of_a_rank(self) -> bool:
        """Whether a rank has failed, and not the job as a whole."""
        names = {name for cause in self.causes for name in placeholders(cause)}
        return not names.isdisjoint({"subject", "rank"})


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
            signature = _parse(name, entry, path == SHIPPED, problems)
            if signature is not None:
                found.setdefault(name, signature)
    if problems:
        raise ConfigError(problems)
    return list(found.values())


def _parse(name: str, entry: Entry, is_shipped: bool, problems: list[Problem]) -> Signature | None:
    before = len(problems)

    def problem(key: str, message: str, hint: str = "", origin: str = entry.origin) -> None:
        problems.append(Problem(f"{name}.{key}" if key else name, message, origin, hint))

    if not entry.is_mapping:
        problem("", "a signature is a mapping", "it needs at least `title` and `pattern`")
        return None
    if not _NAME.fullmatch(name):
        problem("", "a name consists of a-z, 0-9 and -")
    known = ("title", "pattern", "role", "where", "confidence", "cause", "advice", "doc")
    values: dict[str, Any] = {}
    for key, item in entry.value.items():
        if key not in known:
            problem(key, "unknown key", f"the keys are {', '.join(known)}", item.origin)
        values[key] = item.plain()

    def origin_of(key: str) -> str:
        return entry.value[key].origin if key in entry.value else entry.origin

    def texts(key: str, *, required: bool = False) -> tuple[str, ...]:
        value = values.get(key)
        listed = [value] if isinstance(value, str) else value if isinstance(value, list) else None
        if value is None and not required:
            return ()
        if not listed or not all(isinstance(item, str) and item for item in listed):
            problem(key, "must be a text or a list of texts", origin=origin_of(key))
            return ()
        return tuple(listed)

    def choice(key: str, allowed: tuple[str, ...], default: str) -> Any:
        value = values.get(key, default)
        if value not in allowed:
            problem(key, f"is {value!r}", f"use {' or '.join(allowed)}", origin_of(key))
        return value

    patterns = []
    for text in texts("pattern", required=True):
        try:
            patterns.append(re.compile(text, re.MULTILINE))
        except (re.error, RecursionError, OverflowError) as error:
            problem("pattern", f"{text!r} is not a regular expression: {error}", origin=origin_of("pattern"))
            continue
        if patterns[-1].search(""):
            problem(
                "pattern", f"{text!r} matches an empty line", "it would match every run", origin_of("pattern")
            )
    title = values.get("title")
    if not isinstance(title, str) or not title:
        problem("title", "is missing or no text", origin=origin_of("title"))
    where = texts("where") or ("record", "log")
    for place in where:
        if place not in get_args(Where):
            problem("where", f"is {place!r}", f"use {', '.join(get_args(Where))}", origin_of("where"))
    causes = texts("cause") or (str(title),)
    advice = texts("advice")
    for key, templates in (("cause", causes), ("advice", advice)):
        for template in templates:
            try:
                placeholders(template)
            except ValueError as error:
                problem(key, f"{template!r}: {error}", "write { as {{ and } as }}", origin_of(key))
    role = choice("role", get_args(Role), "cause")
    confidence = choice("confidence", get_args(Confidence), "certain")
    if len(problems) > before:
        return None
    return Signature(
        name=name,
        title=str(title),
        patterns=tuple(patterns),
        role=role,
        where=where,  # type: ignore[arg-type]
        confidence=confidence,
        causes=causes,
        advice=advice,
        doc=" ".join(texts("doc")),
        origin=entry.origin,
        is_shipped=is_shipped,
    )


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


@contextmanager
def limited_time(signature: Signature) -> Iterator[None]:
    """Raise UsageError when the patterns of a user's signature take too long, as ``(a+)+b`` does.

    A regular expression checks for signals while it matches. Only the main thread can be interrupted.
    """
    if signature.is_shipped or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise UsageError(
            f"{signature.origin}: the patterns of {signature.name} took longer than {MAX_PATTERN_S:g} s",
            hint="simplify them: no repeated group that contains a repetition, such as (a+)+",
        )

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, MAX_PATTERN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
