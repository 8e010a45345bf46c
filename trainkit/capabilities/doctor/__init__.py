"""``trainkit doctor``: finds problems of this machine or of cluster nodes that would stop a run.

This module defines the requests and the reports of a check, which travel between nodes as JSON.
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
    """Return a dataclass that travels between nodes as one line of JSON."""
    return json.dumps(asdict(value), default=str)


def from_json(kind: type[T], text: str) -> T:
    """Return the dataclass of this kind from a text that `to_json` returned."""
    return TypeAdapter(kind).validate_json(text)


@dataclass(frozen=True)
class Request:
    """The request for the checks of a node."""

    folder: Path
    """The run folder, or the folder in which runs will be created."""
    network: str = "auto"
    """The value of `launch.network`."""
    peers: tuple[str, ...] = ()
    """The other hosts of the job."""
    quick: bool = False
    python: tuple[str, ...] = (sys.executable,)
    """The interpreter of the ranks with its options."""
    env: tuple[tuple[str, str], ...] = ()
    """The variables of `launch.env` that decide which packages the interpreter imports."""
    shared: tuple[str, str] | None = None
    """A file below the run folder and the host that created it. Every node must see the file."""

    @property
    def peer(self) -> str | None:
        """Return one of the other hosts, or None if there are no other hosts."""
        return self.peers[0] if self.peers else None


@dataclass(frozen=True)
class NodeReport:
    """The findings of a node, and its values for the comparison of nodes and for the measurement."""

    host: str
    num_gpus: int
    port: int
    """The port at which rank 0 of a measurement can listen."""
    peers: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    links: dict[str, float] = field(default_factory=dict)
    """The result of `link_gbit_s`."""
    findings: tuple[Finding, ...] = ()
    step: str = ""
    """The argument of `scancel` that ends the Slurm step of the checks."""
