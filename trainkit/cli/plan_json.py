"""Describes the JSON objects that ``trainkit check`` and ``trainkit submit`` print about a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from trainkit.plan.launch import Batch, Layout, RequeuePolicy, SlurmRequest


class _PlanJson(TypedDict):
    backend: str
    num_nodes: int
    workers_per_node: int
    device: str
    """`cpu` (with gloo) or `cuda` (with nccl)."""
    layout: Layout
    batch: Batch
    lr: float
    """The peak learning rate after scaling to the number of data-parallel processes."""
    threads_per_worker: int | None
    """The number of threads per worker; if None, the workers use the cores available on their node."""
    grace_s: float
    """Seconds from a stop signal until the job is killed."""
    reasons: Mapping[str, str]
    """Maps each derived value to a sentence that states the reason for it."""
    env: Mapping[str, str]
    """Environment variables that are set for every worker."""
    network: str
    """A network preset, or the name of a network interface."""
    requeue: RequeuePolicy
    spare_nodes: int
    """The number of nodes allocated in addition to `num_nodes`, to replace nodes that fail."""
    per: str
    """The processes that one Slurm task runs: a single worker (`gpu`) or all workers of a node (`node`)."""
    command: Sequence[str] | None
    """The command that each rank runs; None for the built-in trainer."""
    command_signal: str
    """The signal that asks a COMMAND to save: `USR2`, `TERM`, or, with `auto`, the signal that the COMMAND
    handles."""
    launcher: str
    python: Sequence[str] | None
    """The Python interpreter for a launcher or the built-in trainer; if None, the agent's interpreter is
    used."""
    venv: str | None
    """The virtual environment that the agent activates for a COMMAND."""
    container_program: str | None
    slurm: SlurmRequest | None
    """The job's Slurm options; None for a local job."""
    node_sizes: Sequence[int] | None
    """The number of workers on each node, if not all nodes have the same number."""
    warnings: Sequence[str]
    checkpoint_bytes: int | None
    version: int
    """The format version of plan.json."""
    world_size: int


class PlanJson(_PlanJson, total=False):
    """The content of plan.json."""

    after: Sequence[str]
    """Folders of the runs and groups that must finish before a run on this machine starts."""
    sizes: Mapping[str, Mapping[str, object]]
    """Maps each possible node count except `num_nodes` to the plan values that differ for that node count."""
    gpu_types: Mapping[str, str]
    """Maps each partition in which the job may start to its GPU type."""
    fills_nodes: bool
    capabilities: Mapping[str, Mapping[str, object]]
    """Maps the name of each third-party capability to its part of the plan."""


class _ChosenNodesJson(TypedDict, total=False):
    offers: Sequence[Mapping[str, object]]
    """The job requests that `--nodes auto` considered."""
    taken: Mapping[str, object] | None
    """The job request that `--nodes auto` chose; None if the original request is kept."""
    reason: str | None
    """The reason why `--nodes auto` chose no request."""


class _StartTimeJson(TypedDict):
    partition: str
    is_asked: bool
    """True if the config requests this partition, or if this is the default partition and the config requests
    none."""
    start_time: str | None
    """The expected start time; None if Slurm reports no time."""
    nodes: Sequence[str]
    remark: str
    """Slurm's explanation of why it reports no start time."""
    refused: bool
    """True if Slurm would reject the job."""


class CheckJson(_ChosenNodesJson):
    """A valid config and the plan of its run."""

    config: Mapping[str, object]
    """The effective config; `trainkit schema` prints its JSON Schema."""
    origins: Mapping[str, str]
    """Maps each dotted config key to the origin of its value."""
    plan: PlanJson
    wait: Sequence[_StartTimeJson] | None
    """Slurm's estimate of the start time in each partition; None if there is no estimate."""


class _SubmittedJson(TypedDict):
    run_dir: str
    name: str
    job_id: str
    backend: str
    warnings: Sequence[str]


class SubmittedJson(_SubmittedJson, _ChosenNodesJson, total=False):
    """A run or a group of runs that was submitted."""

    attempt: int
    """The attempt number, which is always 1 for a new run; absent for a group."""
    array: str
    """The array indices of the group's runs; absent for a single run."""
    num_points: int
    """The number of runs of the group; absent for a single run."""


SubmittedOrPlan = SubmittedJson | PlanJson
"""The JSON output of `trainkit submit`: the plan for `--dry-run` on this machine, or the submitted run."""
