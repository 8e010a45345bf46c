"""``trainkit doctor``: what on this machine, or on the nodes of a job, would keep a run from training.

This file has what a check asks and what it finds, which travel between nodes as JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from trainkit.job.preflight import Finding

T = TypeVar("T")


def to_json(value: Any) -> str:
    """One of the dataclasses that travel between nodes as one line of JSON."""
    return json.dumps(asdict(value), default=str)


def from_json(kind: type[T], text: str) -> T:
    """What `to_json` has made of a dataclass of this kind."""
    return TypeAdapter(kind).validate_json(text)


@dataclass(frozen=True)
class Request:
    """What to check."""

    folder: Path
    """The run folder, or where run folders will be."""
    network: str = "auto"
    """As `launch.network`."""
    peers: tuple[str, ...] = ()
    """The other hosts of the job."""
    quick: bool = False
    python: tuple[str, ...] = (sys.executable,)
    """The interpreter of the ranks, with its options."""
    env: tuple[tuple[str, str], ...] = ()
    """Variables of `launch.env` that decide which packages it imports."""
    shared: tuple[str, str] | None = None
    """(file, host): a file that the host has created below the run folder, and every node must see."""

    @property
    def peer(self) -> str | None:
        """One of the other hosts; None without any."""
        return self.peers[0] if self.peers else None


@dataclass(frozen=True)
class NodeReport:
    """What a node has found, what must be the same on all, and what a measurement needs to know of it."""

    host: str
    num_gpus: int
    port: int
    """At which rank 0 of a measurement can listen."""
    peers: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    links: dict[str, float] = field(default_factory=dict)
    """As `link_gbit_s` returns them."""
    findings: tuple[Finding, ...] = ()
    step: str = ""
    """What `scancel` takes to end its step."""
