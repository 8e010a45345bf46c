"""``trainkit doctor``: what on this machine, or on the nodes of a job, would keep a run from training.

This file has what a check asks and what it finds, which travel between nodes as JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    state: Literal["ok", "warning", "failure"]
    value: str
    hint: str = ""
    host: str | None = None
    """None for what concerns no single host."""


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

    @property
    def peer(self) -> str | None:
        """One of the other hosts; None without any."""
        return self.peers[0] if self.peers else None

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Request:
        values = json.loads(text)
        for name in ("folder", "code"):
            values[name] = None if values[name] is None else Path(values[name])
        return cls(**{name: _with_tuples(value) for name, value in values.items()})


def _with_tuples(value: Any) -> Any:
    """JSON knows lists only, which cannot be hashed."""
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class NodeReport:
    """What a node has found, what must be the same on all, and what a measurement needs to know of it."""

    host: str
    num_gpus: int
    ports: list[int]
    """At which rank 0 of a measurement can listen."""
    peers: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    links: dict[str, float] = field(default_factory=dict)
    """As `link_gbit_s` returns them."""
    file_server_offset_s: float | None = None
    """Seconds by which its clock is ahead of that of the run folder's file server."""
    findings: list[Finding] = field(default_factory=list)
    step: str = ""
    """What `scancel` takes to end its step."""
    time_s: float = 0.0
    """Its clock when it sent this, which the reader compares with its own."""
    arrived_s: float = 0.0
    """The reader's clock then."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str, arrived_s: float) -> NodeReport:
        values = json.loads(text)
        findings = [Finding(**item) for item in values["findings"]]
        return cls(**{**values, "findings": findings, "arrived_s": arrived_s})


def plural(count: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
