"""The launch plan: everything that is decided before a job starts, as plain numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trainkit.errors import UsageError

PLAN_VERSION = 1


@dataclass(frozen=True)
class Layout:
    """How the ranks of a job are split between the kinds of parallelism."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1

    @property
    def dp(self) -> int:
        """Data-parallel size: how many different batches are read at once."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.cp


@dataclass(frozen=True)
class Batch:
    """What one optimizer step reads: ``global = device x data parallel x accumulation`` samples."""

    device_batch_size: int
    accumulation_steps: int
    global_batch_size: int
    tokens_per_step: int


@dataclass(frozen=True)
class LaunchPlan:
    """What will run, and why the derived values are what they are."""

    backend: str
    num_nodes: int
    workers_per_node: int
    device: str
    """``cpu`` (gloo) or ``cuda`` (nccl)."""
    layout: Layout
    batch: Batch
    lr: float
    """Peak learning rate after scaling."""
    threads_per_worker: int
    grace_s: float
    """Seconds between a stop signal and the moment when the job must be gone."""
    reasons: dict[str, str]
    """For each derived value, one sentence that says where it came from."""
    command: tuple[str, ...] | None = None
    """The argv of a worker; None is the built-in trainer."""
    version: int = PLAN_VERSION

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.workers_per_node

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "world_size": self.world_size}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> LaunchPlan:
        """The plan that `to_dict` wrote.

        Raises UsageError when a newer trainkit wrote it.
        """
        fields = dict(value)
        fields.pop("world_size", None)
        if fields.get("version", 0) > PLAN_VERSION:
            raise UsageError(
                f"plan.json has version {fields['version']}; this trainkit knows {PLAN_VERSION}",
                hint="use the trainkit that submitted the run, or a newer one",
            )
        fields["layout"] = Layout(**fields["layout"])
        fields["batch"] = Batch(**fields["batch"])
        if fields.get("command") is not None:
            fields["command"] = tuple(fields["command"])
        return cls(**fields)
