"""Implements ``trainkit doctor``, which finds problems on this machine or on cluster nodes.

This module defines the check requests that are sent to nodes and the reports that nodes return, both as JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from pydantic import TypeAdapter

from trainkit.job.preflight import Finding

T = TypeVar("T")


def to_json(value: Any) -> str:
    """Return a dataclass instance as one line of JSON, so that it can be sent to another node."""
    return json.dumps(asdict(value), default=str)


def from_json(kind: type[T], text: str) -> T:
    """Return the instance of the dataclass `kind` from the JSON text that `to_json` returned."""
    return TypeAdapter(kind).validate_json(text)


class CheckedJson(TypedDict):
    """The results of all checks, and the number of checks with each result."""

    checks: list[Finding]
    ok: int
    warning: int
    failure: int


@dataclass(frozen=True)
class Request:
    """A request to check one node."""

    folder: Path
    """The run folder, or the folder where runs will be created."""
    network: str = "auto"
    """The value of `launch.network` in the config."""
    peers: tuple[str, ...] = ()
    """The hosts of the job, excluding this host."""
    quick: bool = False
    python: tuple[str, ...] = (sys.executable,)
    """The command that starts the ranks' Python interpreter, including interpreter options."""
    env: tuple[tuple[str, str], ...] = ()
    """Variables in `launch.env` that determine which packages the interpreter imports."""
    shared: tuple[str, str] | None = None
    """The path of a file below the run folder, and the host that created the file. The check fails on a node
    where the file is not visible."""

    @property
    def peer(self) -> str | None:
        """The first host in `peers`, or None if `peers` is empty."""
        return self.peers[0] if self.peers else None


@dataclass(frozen=True)
class NodeReport:
    """The findings of one node, and the values needed to compare nodes and to measure the bandwidth."""

    host: str
    num_gpus: int
    port: int
    """A free port on which rank 0 of a bandwidth measurement can listen."""
    peers: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    links: dict[str, float] = field(default_factory=dict)
    """The link speeds that `link_gbit_s` returned."""
    findings: tuple[Finding, ...] = ()
    step: str = ""
    """The Slurm job step that runs the checks, as an argument for `scancel`."""
