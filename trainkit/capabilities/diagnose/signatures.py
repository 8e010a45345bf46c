"""Loads the signatures in ``signatures.yaml``, which describe how `trainkit diagnose` recognizes causes."""

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
"""The role of a signature in a diagnosis. A `cause` explains a failure. A `symptom`, such as `killed by
SIGKILL`, says how a rank exited and needs an explanation. A `cascade` is an error that ranks report because a
different rank failed. A `fallback` is an exception in the user's code that no other signature explains."""
Where = Literal["record", "log", "agent", "srun", "slurm", "start", "end", "event"]
"""The kind of text that a signature searches. `record` is the failure record of a rank, or the root cause.
`log` is the output of a rank. `agent` is the log of an agent. `srun` is the output of srun. `slurm` is the
job's state in Slurm. `start` is a start that failed before the supervisor began. `end` is the cause in
end.json. `event` is an event before the failure."""
Confidence = Literal["certain", "likely"]


@dataclass(frozen=True)
class Signature:
    """Describes how to recognize a cause in the files of a run, and what to do about it."""

    name: str
    title: str
    patterns: tuple[re.Pattern[str], ...]
    """Regular expressions, each matched against single lines."""
    causes: tuple[str, ...]
    """Sentences that describe the cause. The diagnosis uses the first sentence for which all placeholders
    have values.

    A placeholder is a named group of the pattern or a value from `advice.py`.
    """
    advice: tuple[Mapping[str, str], ...]
    """Sentences of advice, keyed by ``trainer`` for the built-in trainer and ``command`` for a COMMAND. A
    sentence is omitted if one of its placeholders has no value."""
    role: Role
    where: tuple[Where, ...]
    confidence: Confidence
    doc: str
    """A paragraph about the cause, which is shown in the documentation."""

    def advice_for(self, *, is_command: bool) -> tuple[str, ...]:
        """Return the advice for a COMMAND or for the built-in trainer."""
        kind = "command" if is_command else "trainer"
        return tuple(sentence[kind] for sentence in self.advice if kind in sentence)

    @property
    def is_of_a_rank(self) -> bool:
        """Return whether the signature describes a failure of one rank instead of the whole job."""
        names = {name for cause in self.causes for name in placeholders(cause)}
        return not names.isdisjoint({"subject", "rank"})


@cache
def load_signatures() -> tuple[Signature, ...]:
    """Return all signatures in the order in which they are tried."""
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
    """Return the names of the placeholders in a template."""
    return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]


def fill(template: str, values: Mapping[str, str]) -> str | None:
    """Fill in a template, or return None if a placeholder has no value."""
    if any(not values.get(name) for name in placeholders(template)):
        return None
    return template.format_map(values)
