"""What a check asks and what it found."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

State = Literal["ok", "warning", "failure"]


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    state: State
    value: str
    hint: str = ""
    host: str | None = None
    """None for what concerns no single host."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Request:
    """What to check."""

    folder: Path
    """The run folder, or where run folders will be."""
    network: str = "auto"
    """As `launch.network`."""
    peers: tuple[str, ...] = ()
    """The other hosts of the job."""
    port: int | None = None
    """A port that must be free on this host; None to find one."""
    quick: bool = False
    python: tuple[str, ...] = (sys.executable,)
    """The interpreter of the ranks, with its options."""
    env: tuple[tuple[str, str], ...] = ()
    """Variables of `launch.env` that decide which packages it imports."""
    code: Path | None = None
    """The folder whose code the ranks import; None if each run gets a copy."""
    shared: tuple[str, str] | None = None
    """(file, host): a file that the host has created below the run folder, and every node must see."""

    def to_json(self) -> str:
        paths = {"folder": str(self.folder), "code": None if self.code is None else str(self.code)}
        return json.dumps({**asdict(self), **paths})

    @classmethod
    def from_json(cls, text: str) -> Request:
        values = json.loads(text)
        values["folder"] = Path(values["folder"])
        values["code"] = None if values["code"] is None else Path(values["code"])
        for name in ("peers", "python"):
            values[name] = tuple(values[name])
        values["env"] = tuple((name, value) for name, value in values["env"])
        values["shared"] = None if values["shared"] is None else tuple(values["shared"])
        return cls(**values)


def plural(count: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
