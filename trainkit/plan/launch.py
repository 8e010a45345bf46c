"""The launch plan: everything that is decided before a job starts, as plain numbers."""

from __future__ import annotations

import json
from dataclasses import asdict, field
from typing import Any

from trainkit.errors import UsageError
from trainkit.frozen import dataclass
from trainkit.plan.slurm_request import SlurmRequest

PLAN_VERSION = 1


@dataclass(frozen=True)
class Place:
    """Where a rank stands in each dimension of a layout."""

    pp: int = 0
    dp_replicate: int = 0
    dp_shard: int = 0
    cp: int = 0
    tp: int = 0


@dataclass(frozen=True)
class Layout:
    """How the ranks of a job are split between the kinds of parallelism.

    From the outermost dimension to the innermost: pp, dp_replicate, dp_shard, cp, tp. So the ranks of a
    tensor-parallel group, which talk most, are neighbours on a node.
    """

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

    @property
    def splits_model(self) -> bool:
        """Whether ranks share the work on one sample."""
        return self.tp * self.pp * self.cp > 1

    def place(self, rank: int) -> Place:
        """Where a rank stands."""
        rank, tp = divmod(rank, self.tp)
        rank, cp = divmod(rank, self.cp)
        rank, dp_shard = divmod(rank, self.dp_shard)
        pp, dp_replicate = divmod(rank, self.dp_replicate)
        return Place(pp, dp_replicate, dp_shard, cp, tp)

    def dp_rank(self, rank: int) -> int:
        """Which of the batches that are read at once a rank works on."""
        place = self.place(rank)
        return place.dp_replicate * self.dp_shard + place.dp_shard


@dataclass(frozen=True)
class Batch:
    """What one optimizer step reads: ``global = device x data parallel x accumulation`` samples."""

    device_batch_size: int
    accumulation_steps: int
    global_batch_size: int
    tokens_per_step: int


@dataclass(frozen=True)
class RequeuePolicy:
    """When the run may start again by itself."""

    on: tuple[str, ...] = ("preempted", "timeout", "node_fail", "crash", "hang")
    max: int = 100
    max_crashes: int = 3
    hang_factor: float | None = 20.0
    """A step hangs when it takes so many times as long as the median step; None for never."""
    hang_min_s: float = 300.0


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
    threads_per_worker: int | None
    """None leaves it to the node: the cores that a worker finds there."""
    grace_s: float
    """Seconds between a stop signal and the moment when the job must be gone."""
    reasons: dict[str, str]
    """For each derived value, one sentence that says where it came from."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables of every worker."""
    network: str = "auto"
    """A preset, or the name of an interface."""
    requeue: RequeuePolicy = RequeuePolicy()
    spare_nodes: int = 0
    """Nodes that Slurm gives beyond `num_nodes`, to stand in for those that fail."""
    per: str = "node"
    """What a Slurm task stands for: ``gpu`` (one worker) or ``node`` (all workers of a node)."""
    command: tuple[str, ...] | None = None
    """What takes the place of the built-in trainer."""
    launcher: str = "python"
    """What starts the processes of `command`: ``python`` one a rank, ``torchrun`` and others one a node."""
    python: tuple[str, ...] | None = None
    """The interpreter that `launcher` runs with; None is that of the agent."""
    container_program: str | None = None
    """What runs `launch.container`: ``apptainer``, ``singularity`` or ``pyxis``."""
    slurm: SlurmRequest | None = None
    """What is asked of Slurm; None for a local job."""
    node_sizes: tuple[int, ...] | None = None
    """Workers of each node where they differ; `workers_per_node` is then the largest."""
    version: int = PLAN_VERSION

    @property
    def world_size(self) -> int:
        if self.node_sizes is not None:
            return sum(self.node_sizes)
        return self.num_nodes * self.workers_per_node

    def workers_of(self, node_rank: int) -> int:
        """How many workers a node has."""
        return self.workers_per_node if self.node_sizes is None else self.node_sizes[node_rank]

    def first_rank_of(self, node_rank: int) -> int:
        """The lowest rank of a node."""
        if self.node_sizes is not None:
            return sum(self.node_sizes[:node_rank])
        return node_rank * self.workers_per_node

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "world_size": self.world_size}

    def to_text(self) -> str:
        """The bytes of plan.json."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> LaunchPlan:
        """The plan that `to_dict` wrote.

        Raises UsageError when a newer trainkit wrote it.
        """
        fields = dict(value)
        for derived_or_old in ("world_size", "max_requeues"):
            fields.pop(derived_or_old, None)
        if fields.get("version", 0) > PLAN_VERSION:
            raise UsageError(
                f"plan.json has version {fields['version']}; this trainkit knows {PLAN_VERSION}",
                hint="use the trainkit that submitted the run, or a newer one",
            )
        fields["layout"] = Layout(**fields["layout"])
        fields["batch"] = Batch(**fields["batch"])
        requeue = fields.get("requeue", {})
        fields["requeue"] = RequeuePolicy(**{**requeue, "on": tuple(requeue.get("on", RequeuePolicy.on))})
        for name in ("command", "python", "node_sizes"):
            if fields.get(name) is not None:
                fields[name] = tuple(fields[name])
        if fields.get("slurm") is not None:
            fields["slurm"] = SlurmRequest.from_dict(fields["slurm"])
        return cls(**fields)
