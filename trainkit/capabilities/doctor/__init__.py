"""``trainkit doctor``: finds problems of this machine or of cluster nodes that would prevent a run.

This module defines the requests for checks and the reports of nodes, which are exchanged as JSON.
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
    """Return a dataclass as one line of JSON, so that it can be sent to another node."""
    return json.dumps(asdict(value), default=str)


def from_json(kind: type[T], text: str) -> T:
    """Return a dataclass of type `kind` from the text that `to_json` made of it."""
    return TypeAdapter(kind).validate_json(text)


@dataclass(frozen=True)
class Request:
    """A request to check one node."""

    folder: Path
    """The run folder, or the folder where runs will be created."""
    network: str = "auto"
    """The value of `launch.network` in the config."""
    peers: tuple[str, ...] = ()
    """The other hosts of the job."""
    quick: bool = False
    python: tuple[str, ...] = (sys.executable,)
    """The Python interpreter of the ranks, with its options."""
    env: tuple[tuple[str, str], ...] = ()
    """Variables of `launch.env` that determine which packages the interpreter imports."""
    shared: tuple[str, str] | None = None
    """A file below the run folder, and the host that created it. Every node must be able to see this file."""

    @property
    def peer(self) -> str | None:
        """One of the other hosts, or None if there are none."""
        return self.peers[0] if self.peers else None


@dataclass(frozen=True)
class NodeReport:
    """The findings of a node, and its values for comparing nodes and for measuring the bandwidth."""

    host: str
    num_gpus: int
    port: int
    """A port on which rank 0 of a measurement can listen."""
    peers: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    links: dict[str, float] = field(default_factory=dict)
    """The link speeds that `link_gbit_s` returned."""
    findings: tuple[Finding, ...] = ()
    step: str = ""
    """The job step of the checks, as an argument for `scancel`."""
