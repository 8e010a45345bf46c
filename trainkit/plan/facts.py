"""What is true where a run would start: gathered once per command, then passed."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.cluster.machine import Machine
from trainkit.cluster.target import LOCAL, Target
from trainkit.data.checks import DataFacts


@dataclass(frozen=True)
class Facts:
    """The machine, the cluster and the data of a config, as `trainkit.submit.gather` finds them."""

    machine: Machine
    """The one on which the command runs."""
    target: Target = LOCAL
    data: DataFacts | None = None
    """None for what trains no model of trainkit: neither model nor data is then checked."""
    missing: frozenset[str] = frozenset()
    """The keys that name a file or run which does not exist: task, model.architecture, model.init_from."""
