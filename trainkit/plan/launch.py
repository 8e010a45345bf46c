"""Defines the launch plan: all values that are decided before a job starts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from trainkit.capability import Part
from trainkit.errors import UsageError
from trainkit.plan.workload import TRAINER, Workload
from trainkit.run.files import LEFT_OUT, OPTIONAL, difference, read_json, read_record, to_json
from trainkit.shipped import SHIPPED, attended_in, files_of, keys_of, load, put_parts, take_parts

PLAN_VERSION = 1
_KEYS = (
    "backend num_nodes workers_per_node device layout batch lr threads_per_worker grace_s reasons env "
    "network requeue spare_nodes per command command_signal launcher python venv container_program slurm "
    "node_sizes after warnings checkpoint_bytes sizes gpu_types fills_nodes version world_size"
)
"""The keys of plan.json in order, excluding the keys that capabilities add."""
_OF_RECORDS = {
    "command": ("workload", "argv"),
    "command_signal": ("workload", "signal"),
    "launcher": ("workload", "launcher"),
    "env": ("environment", "variables"),
    "network": ("environment", "network"),
    "python": ("environment", "python"),
    "venv": ("environment", "venv"),
    "container_program": ("environment", "container_program"),
    "gpu_types": ("slurm", "gpu_types"),
    "fills_nodes": ("slurm", "fills_nodes"),
}
"""Maps a key of plan.json to the `LaunchPlan` field and its subfield that contain the value.
"""
Options = dict[str, str | int | bool]
P = TypeVar("P", bound=Part)
DAMAGED_HINT = "the folder of each attempt in attempts/ also contains the plan of the attempt"


@dataclass(frozen=True)
class Place:
    """The coordinates of a rank along the dimensions of a layout."""

    pp: int = 0
    dp_replicate: int = 0
    dp_shard: int = 0
    cp: int = 0
    tp: int = 0


@dataclass(frozen=True)
class Layout:
    """The degrees of parallelism of a job.

    The dimensions, from outermost to innermost, are pp, dp_replicate, dp_shard, cp and tp. Tensor-parallel
    ranks communicate most, so they have consecutive rank numbers on the same node.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    """Number of ranks over which experts are divided: groups of neighbours among `expert_ranks`."""

    @property
    def shards(self) -> int:
        """Return the number of ranks over which parameters other than those of experts are sharded."""
        return self.dp_shard * self.cp

    @property
    def expert_ranks(self) -> int:
        """Return the number of ranks over which the experts of one replica can be divided and sharded.

        Tensor-parallel ranks route different tokens, because sequence parallelism splits the tokens.
        """
        return self.shards * self.tp

    @property
    def expert_shards(self) -> int:
        """Return the number of ranks over which each expert's parameters are sharded.

        Without expert parallelism, every tensor-parallel rank has all experts.
        """
        return self.shards if self.ep == 1 else self.expert_ranks // self.ep

    @property
    def dp(self) -> int:
        """Return the data-parallel size: the number of different batches processed in parallel."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def splits_model(self) -> bool:
        """Return whether several ranks share the computation of one sample."""
        return self.tp * self.pp * self.cp > 1

    @property
    def has_local_forward(self) -> bool:
        """Return whether a forward pass runs without collectives."""
        return self.world_size == self.dp_replicate

    def place(self, rank: int) -> Place:
        """Return the coordinates of a rank."""
        rank, tp = divmod(rank, self.tp)
        rank, cp = divmod(rank, self.cp)
        rank, dp_shard = divmod(rank, self.dp_shard)
        pp, dp_replicate = divmod(rank, self.dp_replicate)
        return Place(pp, dp_replicate, dp_shard, cp, tp)

    def dp_rank(self, rank: int) -> int:
        """Return the data-parallel index of a rank, from 0 to `dp` - 1."""
        place = self.place(rank)
        return place.dp_replicate * self.dp_shard + place.dp_shard


@dataclass(frozen=True)
class BatchStage:
    """The batch of a stage of the warm-up, which ends with the step `until_step`."""

    until_step: int
    accumulation_steps: int
    global_batch_size: int


@dataclass(frozen=True)
class Batch:
    """The batch of one optimizer step: ``global = device x data-parallel x accumulation`` samples."""

    device_batch_size: int
    accumulation_steps: int
    global_batch_size: int
    tokens_per_step: int
    pp_microbatches: int | None = None
    """Microbatches per device batch; None without a pipeline."""
    warmup: tuple[BatchStage, ...] = field(default=(), metadata=OPTIONAL)
    """The batches of the first steps, in ascending order of steps; see ``train.batch_warmup``."""

    def stages(self, step: int) -> Iterator[tuple[int | None, Batch]]:
        """Yield each batch that follows after `step` steps, with its number of steps; None for the last."""
        for stage in self.warmup:
            if step < stage.until_step:
                tokens = self.tokens_per_step // self.global_batch_size * stage.global_batch_size
                yield (
                    stage.until_step - step,
                    replace(
                        self,
                        accumulation_steps=stage.accumulation_steps,
                        global_batch_size=stage.global_batch_size,
                        tokens_per_step=tokens,
                        warmup=(),
                    ),
                )
                step = stage.until_step
        yield None, replace(self, warmup=())

    @property
    def warmup_text(self) -> str:
        """Return the stages of the warm-up as the end of a sentence about the batch; "" without a warm-up."""
        begins = [0, *(stage.until_step for stage in self.warmup)]
        stages = (
            f"{stage.global_batch_size} in steps {begin + 1} to {stage.until_step}"
            for begin, stage in zip(begins, self.warmup, strict=False)
        )
        return f", after a warm-up ({', '.join(stages)})" if self.warmup else ""

    def after(self, step: int) -> Batch:
        """Return the batch of the step that follows after `step` steps."""
        return next(self.stages(step))[1]

    def num_samples(self, step: int, num_steps: int) -> int:
        """Return the number of samples in `num_steps` steps that follow after `step` steps."""
        found = 0
        for count, batch in self.stages(step):
            steps = num_steps if count is None else min(count, num_steps)
            found, num_steps = found + steps * batch.global_batch_size, num_steps - steps
        return found

    def num_steps(self, step: int, num_samples: int) -> int:
        """Return the number of steps that train `num_samples` samples after `step` steps.

        The last of these steps may train fewer samples than its global batch size.
        """
        found = 0
        for count, batch in self.stages(step):
            needed = -(-num_samples // batch.global_batch_size)
            steps = needed if count is None else min(count, needed)
            found, num_samples = found + steps, max(0, num_samples - steps * batch.global_batch_size)
        return found


@dataclass(frozen=True)
class RequeuePolicy:
    """The rules for automatic restarts: the keys of the config section `requeue` that a job needs."""

    on: tuple[str, ...] = ("preempted", "timeout", "node_fail", "crash", "hang")
    max: int = 100
    max_crashes: int = 3
    total_s: float | None = None
    """Total duration of all jobs in seconds if the run is divided into consecutive jobs (slices); else
    None."""
    hang_factor: float | None = 20.0
    hang_min_s: float = 300.0


@dataclass(frozen=True)
class WorkerEnvironment:
    """The initial environment of the worker processes."""

    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables that every worker gets."""
    network: str = "auto"
    """A network preset, or the name of a network interface."""
    python: tuple[str, ...] | None = None
    """The interpreter for a launcher or the built-in trainer; if None, the agent's interpreter is used."""
    venv: str | None = None
    """The virtual environment that the agent activates for a command; None if the batch script activates it.
    """
    container_program: str | None = None
    """The program that runs `launch.container`: ``apptainer``, ``singularity`` or ``pyxis``."""


@dataclass(frozen=True)
class SlurmRequest:
    """The Slurm options of one job, in display order."""

    sbatch: Options = field(default_factory=dict)
    """sbatch options by long name; flags that take no value map to True."""
    srun: Options = field(default_factory=dict)
    """srun options for the job step that starts the ranks."""
    version: tuple[int, ...] = ()
    """Slurm version; empty if unknown."""
    clusters: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    """Clusters to which the job may be submitted; empty for this host's own cluster."""
    gpu_types: dict[str, str] = field(default_factory=dict, metadata=OPTIONAL)
    """Maps each partition where the job may start to its GPU type if several partitions or types are
    allowed."""
    fills_nodes: bool = field(default=False, metadata=OPTIONAL)
    """True if the ranks may use all CPUs of an exclusive job, including CPUs that it did not request."""
    whole_node_gpus: int | None = field(default=None, metadata=OPTIONAL)
    """The largest number of GPUs per node that Slurm allocates to a job that shares its nodes with no other
    job; None if the job gets only the GPUs that it requests, or if the nodes are unknown."""

    def comment(self, token: str) -> str:
        """Return the Slurm comment for a job: its submission token, followed by the config's comment."""
        own = self.sbatch.get("comment")
        return f"{token} {own}" if own else token


@dataclass(frozen=True)
class LaunchPlan:
    """The plan of a launch, with the reason for each derived value."""

    backend: str
    num_nodes: int
    workers_per_node: int
    device: str
    """``cpu`` (with gloo) or ``cuda`` (with nccl)."""
    layout: Layout
    batch: Batch
    lr: float
    """Peak learning rate after scaling to the number of data-parallel processes."""
    threads_per_worker: int | None
    """Number of threads per worker; if None, the workers use the cores available on their node."""
    grace_s: float
    """Seconds from a stop signal until the job is killed."""
    reasons: dict[str, str]
    """Maps each derived value to one sentence with its reason."""
    environment: WorkerEnvironment = WorkerEnvironment()
    requeue: RequeuePolicy = RequeuePolicy()
    spare_nodes: int = 0
    """Number of nodes allocated in addition to `num_nodes`, to replace nodes that fail."""
    per: str = "node"
    """Specifies whether one Slurm task runs a single worker (``gpu``) or all workers of a node (``node``)."""
    workload: Workload = TRAINER
    """The program that the ranks run."""
    slurm: SlurmRequest | None = None
    """The job's Slurm options; None for a local job."""
    node_sizes: tuple[int, ...] | None = None
    """Number of workers on each node if it varies; `workers_per_node` is then the maximum."""
    after: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    """Folders of the runs and groups that must finish before a run on this machine starts."""
    warnings: tuple[str, ...] = ()
    """Warnings about values that were not checked or that may slow the run down, one sentence each."""
    checkpoint_bytes: int | None = None
    """Checkpoint size in bytes; None unless the run trains a built-in model."""
    sizes: dict[str, dict[str, object]] = field(default_factory=dict, metadata=OPTIONAL)
    """Maps each possible node count except `num_nodes` to the plan values that differ for that node count."""
    parts: dict[str, dict[str, object]] = field(default_factory=dict, metadata=LEFT_OUT)
    """Maps a capability to the data of its part of the plan; use `part` to read a part."""

    @property
    def is_here(self) -> bool:
        """Return whether this machine is the only node or simulates all nodes."""
        return self.backend == "local"

    @property
    def is_job(self) -> bool:
        """Return whether a scheduler runs the plan as a job; if not, the command itself starts the run."""
        return self.slurm is not None

    @property
    def clusters(self) -> tuple[str, ...]:
        """Return the clusters to which the job may be submitted; empty for this host's own cluster."""
        return () if self.slurm is None else self.slurm.clusters

    @property
    def has_supervisor(self) -> bool:
        """Return whether a supervisor process watches all ranks.

        There is no supervisor if srun or another launcher has started the ranks before trainkit.
        """
        return self.backend not in ("srun", "launcher")

    @property
    def gpus_per_node(self) -> int:
        """Return the number of GPUs on each node that the ranks use."""
        return self.workers_per_node if self.device == "cuda" else 0

    @property
    def fewest_nodes(self) -> int:
        return min([self.num_nodes, *map(int, self.sizes)])

    @property
    def shown_nodes(self) -> str:
        """Return the number of nodes, or the range of node counts, in words."""
        first = f"{self.fewest_nodes}-" if self.fewest_nodes < self.num_nodes else ""
        return f"{first}{self.num_nodes} node{'s' if self.num_nodes > 1 else ''}"

    @property
    def may_lose_nodes(self) -> bool:
        """Return whether the run can continue within the same job after a node is lost."""
        return bool(self.spare_nodes) or bool(self.sizes)

    def at(self, num_nodes: int) -> LaunchPlan:
        """Return the plan for the largest planned node count up to `num_nodes`, or else for the smallest."""
        planned = [self.num_nodes, *map(int, self.sizes)]
        size = max((size for size in planned if size <= num_nodes), default=self.fewest_nodes)
        if size == self.num_nodes:
            return self
        return LaunchPlan.from_dict(resized(self.to_dict(), size))

    @property
    def attended_in(self) -> str | None:
        """Return the capability that lets a user interact with a rank, possibly for hours, or None."""
        return attended_in(self.parts)

    @property
    def attended_rank(self) -> int | None:
        """Return the rank that the user interacts with, or None."""
        name = self.attended_in
        rank = None if name is None else self.parts[name].get(SHIPPED[name].attends)
        return rank if isinstance(rank, int) else None

    def without_hangs(self) -> LaunchPlan:
        """Return the plan with hang detection disabled, because a rank may wait for user input."""
        plan = replace(self, requeue=replace(self.requeue, hang_factor=None))
        for name in self.parts:
            plan = load(name).without_hangs(plan)
        return plan

    def with_part(self, part: Part) -> LaunchPlan:
        """Return the plan with a part added, replacing any earlier part of the same capability."""
        return replace(self, parts={**self.parts, part.CAPABILITY: to_json(part)})

    def part(self, kind: type[P]) -> P | None:
        """Return the part whose class is `kind`, or None if the plan contains no such part.

        Raises UsageError if the part is damaged.
        """
        value = self.parts.get(kind.CAPABILITY)
        try:
            return None if value is None else read_record(kind, value, strict=True)
        except TypeError as error:
            message = f"plan.json is damaged: {kind.CAPABILITY}: {error}"
            raise UsageError(message, hint=DAMAGED_HINT) from None

    @property
    def files(self) -> dict[str, str]:
        """Return the files that capabilities add to the run folder, as a mapping from name to text."""
        return files_of(self.parts)

    @property
    def world_size(self) -> int:
        if self.node_sizes is not None:
            return sum(self.node_sizes)
        return self.num_nodes * self.workers_per_node

    def workers_of(self, node_rank: int) -> int:
        return self.workers_per_node if self.node_sizes is None else self.node_sizes[node_rank]

    def first_rank_of(self, node_rank: int) -> int:
        if self.node_sizes is not None:
            return sum(self.node_sizes[:node_rank])
        return node_rank * self.workers_per_node

    def to_dict(self) -> dict[str, object]:
        value = {**to_json(self), "version": PLAN_VERSION, "world_size": self.world_size}
        for key, (record, name) in _OF_RECORDS.items():
            if value[record] is not None and name in value[record]:
                value[key] = value[record].pop(name)
        value["command"] = value["command"] or None
        # The keys of the workload and environment records are stored at the top level of plan.json.
        del value["workload"], value["environment"]
        return put_parts({key: value[key] for key in _KEYS.split() if key in value} | value, self.parts)

    def to_text(self) -> str:
        """Return the plan as the text of plan.json."""
        return plan_text(self.to_dict())

    @classmethod
    def read(cls, file: Path, *, executes: bool = True) -> LaunchPlan:
        """Read the plan from a plan.json file.

        Raises OSError if the file cannot be read, and UsageError if the plan is damaged or was written by a
        newer trainkit version.

        If `executes` is True, also raises UsageError if other users have permission to write the file. Set
        `executes` to False if no command in the plan is executed.
        """
        try:
            return cls.from_dict(read_json(file, executes=executes))
        except ValueError as error:
            raise damaged_plan(file, error) from error

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> LaunchPlan:
        """Return the plan stored by `to_dict`, ignoring keys unknown to this trainkit version.

        Raises UsageError if a newer trainkit version wrote the plan, and ValueError if the plan is damaged.
        """
        try:
            if value.get("version", 0) > PLAN_VERSION:
                message = (
                    f"plan.json has version {value['version']}, but this trainkit version supports "
                    f"{PLAN_VERSION}"
                )
                raise UsageError(
                    message, hint="use the trainkit version that created the run, or a newer version"
                )
            # Raise an error for unknown degrees of parallelism, because ignoring them would change the run.
            Layout(**value["layout"]), Batch(**value["batch"])
            if (slurm := value.get("slurm")) is not None:
                # Raise an error if the Slurm options are missing, because the job would differ without them.
                slurm["sbatch"], slurm["srun"]
            plan = read_record(cls, {**_with_records(value), "parts": take_parts(value)}, strict=True)
            counts = [plan.num_nodes, plan.workers_per_node, *(plan.node_sizes or ()), *astuple(plan.layout)]
            if min(counts) < 1:
                raise ValueError("plan.json is damaged: a number of nodes, workers or ranks is not positive")
            # Raise an error if a capability's part is damaged, so that later readers need not check the
            # parts.
            files_of(plan.parts), keys_of(plan.parts)
            return plan
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"plan.json is damaged: {error!r}") from None


def _with_records(plan: Mapping[str, object]) -> dict[str, object]:
    """Return the content of plan.json with the top-level keys of each record moved back into the record."""
    found = {key: value for key, value in plan.items() if key not in ("workload", "environment")}
    if found.get("command") is None:
        found.pop("command", None)
    for key, (record, name) in _OF_RECORDS.items():
        own = found.get(record, {})
        if key in found and isinstance(own, dict):
            found[record] = {**own, name: found.pop(key)}
    return found


def resized(plan: Mapping[str, object], num_nodes: int) -> dict[str, object]:
    """Return the content of plan.json adapted to another planned node count.

    Keys written by other trainkit versions are kept, because the job was submitted with them.
    """
    from trainkit.run.submitted import plans_by_size  # imported here because only node ranges need it

    plans = plans_by_size(plan)
    chosen = plans.pop(str(num_nodes))
    return {**chosen, "sizes": {name: difference(chosen, other) for name, other in plans.items()}}


def plan_text(plan: Mapping[str, object]) -> str:
    """Return the content of a plan as the text of plan.json."""
    return json.dumps(plan, indent=2, ensure_ascii=False) + "\n"


def with_excluded(request: SlurmRequest, hosts: Sequence[str]) -> SlurmRequest:
    """Return the request with `hosts` added to its excluded hosts."""
    before = str(request.sbatch.get("exclude") or "")
    new = [host for host in hosts if host not in before.split(",")]
    exclude = ",".join([*([before] if before else []), *new])
    return replace(request, sbatch={**request.sbatch, "exclude": exclude}) if new else request


def option_argv(options: Options) -> list[str]:
    """Return Slurm options as arguments, such as ``--nodes=2``; options set to False are omitted."""
    return [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in options.items()
        if value is not False
    ]


def damaged_plan(file: Path, error: ValueError) -> UsageError:
    """Return the error to raise for a damaged plan.json."""
    return UsageError(f"{file} cannot be read: {error}", hint=DAMAGED_HINT)
