"""The launch plan: everything that is decided before a job starts, as plain numbers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from shlex import quote
from typing import Any

from trainkit.errors import UsageError
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
    pp_microbatches: int | None = None
    """Parts that a device batch is cut into; None without a pipeline and in plans of older versions."""


@dataclass(frozen=True)
class RequeuePolicy:
    """When the run may start again by itself."""

    on: tuple[str, ...] = ("preempted", "timeout", "node_fail", "crash", "hang")
    max: int = 100
    max_crashes: int = 3
    hang_factor: float | None = 20.0
    """A step hangs when it takes this many times as long as the median step; None for never."""
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
    """For each derived value, one sentence with its origin."""
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
    """The options for Slurm; None for a local job."""
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


def describe_plan(plan: LaunchPlan, name: str) -> str:
    """One line for what will run and one for each value that was derived, which its reason begins with."""
    nodes = f"{plan.num_nodes} node{'s' if plan.num_nodes > 1 else ''}"
    workers = f"{plan.workers_per_node} worker{'s' if plan.workers_per_node > 1 else ''}"
    spare = f", {plan.spare_nodes} spare" if plan.spare_nodes else ""
    lines = [f"{name}: {nodes} x {workers} on {plan.device}{spare}, {plan.backend} backend"]
    width = max((len(key) for key in plan.reasons), default=0)
    lines += [f"  {key:<{width}}  {reason}" for key, reason in plan.reasons.items()]
    return "\n".join(lines)


UNFINISHED_STATES = ("pending", "starting", "running", "restarting", "stopping", "requeueing")
"""States of a run that may still finish."""
MAX_NAMED = 3


@dataclass(frozen=True)
class Dependency:
    """A run that a job waits for."""

    name: str
    """For people: its folder, or the point that it is."""
    state: str
    job_id: str | None
    """None for a run that never had a job."""
    reason: str | None = None


def dependency_ids(text: str, runs: Sequence[Dependency], array: str | None = None) -> list[str]:
    """The Slurm jobs that have to end well before what `text` names has finished; none when it has.

    `array` is the job id of a group. Raises UsageError for what has failed, is not known, or runs on this
    machine.
    """
    open_runs = [run for run in runs if run.state != "finished"]
    wrong = [run for run in open_runs if run.state not in UNFINISHED_STATES or run.job_id is None]
    if wrong:
        raise UsageError(_unfinishable(text, wrong, len(runs)), hint=_hint(wrong[0]))
    local = next((run for run in open_runs if str(run.job_id).startswith("local-")), None)
    if local is not None:
        raise UsageError(
            f"--after {text}: {local.name} runs on this machine, and Slurm cannot wait for it",
            hint=f"`trainkit logs {quote(local.name)} -f` returns when it has ended",
        )
    own = f"{array}_"
    if array is not None and open_runs and all(str(run.job_id).startswith(own) for run in runs):
        return [array]
    return [str(run.job_id) for run in open_runs]


def _unfinishable(text: str, wrong: Sequence[Dependency], count: int) -> str:
    first = wrong[0]
    reason = f" ({first.reason})" if first.reason else ""
    if count == 1:
        return f"--after {text}: {first.name} is {first.state}{reason}"
    named = ", ".join(f"{run.name} is {run.state}" for run in wrong[:MAX_NAMED])
    more = f" and {len(wrong) - MAX_NAMED:,} more" if len(wrong) > MAX_NAMED else ""
    return f"--after {text}: {named}{more}, of {count:,} runs"


def _hint(wrong: Dependency) -> str:
    if wrong.state == "unknown":
        return f"`trainkit status {quote(wrong.name)}` says why; without --after it starts at once"
    return f"`trainkit resume {quote(wrong.name)}` resumes it; then it can be waited for"


def with_dependency(plan: LaunchPlan, texts: Sequence[str], job_ids: Sequence[str]) -> LaunchPlan:
    """The plan of a job that starts when these have ended well; `texts` are the runs as they were typed.

    Raises UsageError for a plan without Slurm.
    """
    if not texts:
        return plan
    if plan.slurm is None:
        raise UsageError(
            "--after lets a job wait in Slurm's queue, and this run would start here at once",
            hint="`trainkit logs RUN -f` returns when a run has ended",
        )
    names, verb = ", ".join(texts), "has" if len(texts) == 1 else "have"
    if not job_ids:
        reasons = {**plan.reasons, "after": f"at once: {names} finished already"}
        return dataclasses.replace(plan, reasons=reasons)
    # Without kill-on-invalid-dep: a job whose wait became hopeless stays, and `status` says that it has.
    dependency = "afterok:" + ":".join(dict.fromkeys(job_ids))
    reasons = {**plan.reasons, "after": f"{dependency}: starts when {names} {verb} finished well"}
    slurm = dataclasses.replace(plan.slurm, sbatch={**plan.slurm.sbatch, "dependency": dependency})
    return dataclasses.replace(plan, slurm=slurm, reasons=reasons)
