"""The signatures by which `trainkit diagnose` recognises causes; they are in ``signatures.yaml``."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from trainkit.config.yamlfile import read_yaml_file
from trainkit.formats import JsonObject

FILE = Path(__file__).with_name("signatures.yaml")

Role = Literal["cause", "symptom", "cascade", "fallback"]
"""A `cause` explains a failure. A `symptom` says how a rank ended, as `killed by SIGKILL`, which something
else may explain. A `cascade` is what ranks report after another one has failed. A `fallback` is for an
exception of the user's code that nothing else explains."""
Where = Literal["record", "log", "agent", "srun", "slurm", "start", "end", "event"]
"""The first failure and the records of ranks, the output of ranks, the logs of agents, the output of srun,
the job's state in Slurm, a start that ended before the supervisor began, the cause that end.json names, and
the events before the failure."""
Confidence = Literal["certain", "likely"]


@dataclass(frozen=True)
class Signature:
    """How one cause shows in the files of a run, and what to do about it."""

    name: str
    title: str
    patterns: tuple[re.Pattern[str], ...]
    """Each sees one line at a time."""
    causes: tuple[str, ...]
    """Sentences, of which the first whose placeholders all have a value in a run is used.

    Placeholders are named groups of the pattern and the values of `advice.py`.
    """
    advice: tuple[Mapping[str, str], ...]
    """Sentences for the ``trainer`` and a ``command``; one without a value for a placeholder is left out."""
    role: Role
    where: tuple[Where, ...]
    confidence: Confidence
    doc: str
    """A paragraph for the docs."""

    def advice_for(self, *, is_command: bool) -> tuple[str, ...]:
        """The sentences for a run of a COMMAND, or of the built-in trainer."""
        kind = "command" if is_command else "trainer"
        return tuple(sentence[kind] for sentence in self.advice if kind in sentence)

    @property
    def is_of_a_rank(self) -> bool:
        """Whether a rank has failed, and not the job as a whole."""
        names = {name for cause in self.causes for name in placeholders(cause)}
        return not names.isdisjoint({"subject", "rank"})


@cache
def load_signatures() -> tuple[Signature, ...]:
    """All signatures, in the order in which they are tried."""
    entries = read_yaml_file(FILE, FILE.name).plain()
    return tuple(_signature(name, entry) for name, entry in entries.items())


def _signature(name: str, entry: JsonObject) -> Signature:
    return Signature(
        name=name,
        title=entry["title"],
        patterns=tuple(re.compile(text, re.MULTILINE) for text in _several(entry["pattern"])),
        causes=_several(entry.get("cause") or entry["title"]),
        advice=tuple(
            dict.fromkeys(("trainer", "command"), item) if isinstance(item, str) else item
            for item in entry.get("advice", ())
        ),
        role=entry.get("role", "cause"),
        where=tuple(entry.get("where", ("record", "log"))),
        confidence=entry.get("confidence", "certain"),
        doc=entry["doc"],
    )


def _several(value: str | list[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def placeholders(template: str) -> list[str]:
    """The names in the braces of a template."""
    return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]


def fill(template: str, values: Mapping[str, str]) -> str | None:
    """The text of a template; None when one of its placeholders has no value."""
    if any(not values.get(name) for name in placeholders(template)):
        return None
    return template.format_map(values)
