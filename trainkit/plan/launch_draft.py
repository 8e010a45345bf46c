"""Launch drafts: derive the values of a plan for this machine or a running step, and its GPU binding."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from trainkit.cluster.machine import Machine
from trainkit.config.loaded import LoadedConfig
from trainkit.errors import ConfigError, Problem
from trainkit.formats import plural
from trainkit.plan.batch import BatchRequest, batch_reason, make_batch, scaled_lr
from trainkit.plan.launch import Batch, Layout, SlurmRequest
from trainkit.plan.layout_rules import make_layout

WORKERS_PER_CPU = 16


@dataclass
class LaunchDraft:
    """Derives a plan for this machine: each method derives one value and records its reason or problem."""

    loaded: LoadedConfig
    machine: Machine
    problems: list[Problem] = field(default_factory=list)
    """Without the origins of their keys."""
    reasons: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    gpu_types: dict[str, str] = field(default_factory=dict)
    """The GPU type of each partition, of which Slurm chooses one."""
    is_one_node: bool = False
    """Whether this machine is one of several hosts that are started by hand, not all nodes."""

    @property
    def nodes_here(self) -> int:
        """The number of nodes that share this machine."""
        return 1 if self.is_one_node else self.loaded.config.resources.most_nodes

    def _workers_here(self, world_size: int) -> int:
        return world_size * self.nodes_here // self.loaded.config.resources.most_nodes

    def check_oversubscription(self, device: str, world_size: int) -> None:
        """Report too many CPU workers: a typo in --nodes must not start a thousand processes here."""
        most, here = WORKERS_PER_CPU * self.machine.num_cpus, self._workers_here(world_size)
        if device == "cpu" and here > most:
            message = f"starts {here} workers on the {self.machine.num_cpus} CPU cores of this machine"
            key = "resources.nodes" if self.nodes_here > 1 else "resources.gpus_per_node"
            self.problem(key, message, f"the maximum here is {most} workers ({WORKERS_PER_CPU} per core)")

    def device(self) -> str:
        requested = self.loaded.config.device
        if requested == "cuda" and not self.machine.num_gpus:
            message = f"is cuda, but {self.machine.gpu_reason}"
            self.problem("device", message, "device: auto uses what this machine has")
        if requested != "auto":
            self.reasons["device"] = f"device: {requested} was requested"
            return requested
        device = "cuda" if self.machine.num_gpus else "cpu"
        self.reasons["device"] = f"{device}: {self.machine.gpu_reason}"
        return device

    def workers_per_node(self, device: str) -> int:
        resources = self.loaded.config.resources
        nodes, requested, num_gpus = self.nodes_here, resources.gpus_per_node, self.machine.num_gpus
        if requested != "auto":
            self.reasons["workers_per_node"] = f"resources.gpus_per_node: {requested} was requested"
            if device == "cuda" and 0 < num_gpus < nodes * requested:
                message = (
                    f"is {requested}: {plural(nodes, 'node')} x {requested} = {nodes * requested} GPUs, "
                    f"but this machine has {num_gpus}"
                )
                self.problem("resources.gpus_per_node", message, self._gpu_hint())
            return requested
        if device == "cpu":
            reason = "1: a CPU node has one worker unless resources.gpus_per_node is set"
            self.reasons["workers_per_node"] = reason
            return 1
        if 0 < num_gpus < nodes:
            message = f"is {nodes}, but this machine has {plural(num_gpus, 'GPU')} and every node needs one"
            self.problem("resources.nodes", message, self._gpu_hint())
            return 1
        share = max(1, num_gpus // nodes)
        idle = num_gpus - share * nodes
        self.reasons["workers_per_node"] = (
            f"{share}: {plural(num_gpus, 'GPU')} shared by {plural(nodes, 'node')}"
            + (f", {idle} left idle" if idle > 0 else "")
        )
        return share

    def _gpu_hint(self) -> str:
        num_gpus = self.machine.num_gpus
        return f"--nodes 1 --gpus-per-node {num_gpus} fits, and device: cpu starts any number of workers"

    def layout(self, world_size: int) -> Layout:
        try:
            layout, self.reasons["layout"] = make_layout(self.loaded.config.parallel, world_size)
        except ConfigError as error:
            self.problems += error.problems
            # Check the batch anyway, as if every process read different samples.
            return Layout(dp_shard=world_size)
        return layout

    def batch(self, layout: Layout) -> Batch | None:
        request = BatchRequest.of(self.loaded)
        try:
            batch = make_batch(request, layout, self.loaded.config.data.seq_len)
        except ConfigError as error:
            self.problems += error.problems
            return None
        self.reasons["batch"] = batch_reason(batch, request, layout.dp)
        return batch

    def lr(self, layout: Layout) -> float:
        optimizer = self.loaded.config.optimizer
        lr, self.reasons["lr"] = scaled_lr(
            optimizer.lr, optimizer.lr_scale, layout.dp, optimizer.lr_scale_base
        )
        return lr

    def threads_per_worker(self, world_size: int) -> int | None:
        requested = self.loaded.config.resources.cpus_per_gpu
        if requested != "auto":
            self.reasons["threads_per_worker"] = f"resources.cpus_per_gpu: {requested} was requested"
            return requested
        threads, self.reasons["threads_per_worker"] = self.derived_threads(world_size)
        return threads

    def derived_threads(self, world_size: int) -> tuple[int | None, str]:
        """The threads per worker if the config does not set them, and why."""
        num_cpus, here = self.machine.num_cpus, self._workers_here(world_size)
        threads = max(1, num_cpus // here)
        return threads, f"{threads}: {num_cpus} CPU cores for {plural(here, 'worker')}"

    def lead_s(self) -> int:
        """How many seconds before its end the run gets the notice; here, as many as it asks for."""
        return math.ceil(self.loaded.config.requeue.grace_s)

    def per(self, launcher: str) -> Literal["gpu", "node"]:
        """The unit of a task."""
        return "node"

    def request(
        self, device: str, workers_per_node: int, threads: int | None, notice: str, per: str
    ) -> SlurmRequest | None:
        """The Slurm options; None if no job is submitted."""
        return None

    def problem(self, key: str, message: str, hint: str = "") -> None:
        self.problems.append(Problem(key, message, hint=hint))


@dataclass
class StepDraft(LaunchDraft):
    """Derives a plan for a running step, whose first node is this machine."""

    node_sizes: tuple[int, ...] = ()
    is_task_per_rank: bool = False

    def workers_per_node(self, device: str) -> int:
        count, num_gpus = max(self.node_sizes), self.machine.num_gpus
        self.reasons["workers_per_node"] = (
            f"{','.join(map(str, self.node_sizes))}: workers of each node of the step"
        )
        if device == "cuda" and count > num_gpus == 1 and self.is_task_per_rank:
            # The ranks find out whether it is the same GPU in all tasks.
            self.warnings.append(f"task 0 sees one GPU of its node: {BOUND_GPU_WARNING}")
        elif device == "cuda" and count > num_gpus:
            message = f"is {count} in this step, but this node has {num_gpus} visible GPUs"
            hint = "request GPUs with srun --gpus-per-node, or set device: cpu"
            self.problem("resources.gpus_per_node", message, hint)
        return count

    def check_oversubscription(self, device: str, world_size: int) -> None:
        """Do nothing: Slurm has started the tasks already."""

    def derived_threads(self, world_size: int) -> tuple[int | None, str]:
        return None, "the cores that Slurm allocated to each task"


BOUND_GPU_WARNING = (
    "where a rank sees only its own GPU, NCCL may fail with `invalid device ordinal` or not use NVLink; "
    "`gpu-bind: none` in launch.srun_extra, or srun --gpu-bind=none, lets every task see all GPUs of its node"
)
