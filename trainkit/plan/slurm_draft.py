"""The launch draft for a Slurm job: derives the values of a launch plan from the cluster."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from trainkit.cluster.limits import limit_problems, spare_capacity
from trainkit.cluster.model import (
    Cluster,
    NodeKind,
    Partition,
    ResourceRequest,
    matching_nodes,
    resource_request,
)
from trainkit.errors import SlurmError
from trainkit.formats import time_limit_s, time_text
from trainkit.plan.launch_draft import LaunchDraft, gpu_binding_problems, gpu_binding_warnings
from trainkit.plan.slurm_request import SlurmRequest, make_request, reserved_options, with_excluded
from trainkit.plan.workload import PER_RANK

SHARE_OF_TIME = 4
"""Slurm signals a job no earlier than when 1/SHARE_OF_TIME of its time is left."""


@dataclass
class SlurmDraft(LaunchDraft):
    """Derives a plan for a Slurm job."""

    cluster: Cluster = field(default_factory=lambda: Cluster("unknown"))

    @property
    def partition(self) -> Partition | None:
        """The first requested partition that exists, else the default one."""
        requested = self.cluster.requested_partitions(self.loaded.config.resources.partition)
        return requested[0] if requested else self.cluster.partition(None)

    @property
    def nodes(self) -> tuple[NodeKind, ...]:
        """The nodes that the job may get; empty if unknown."""
        if self.partition is None:
            return ()
        resources = self.loaded.config.resources
        return (
            matching_nodes(self.partition, resources.constraint, resources.gpu_type) or self.partition.nodes
        )

    @property
    def _total_nodes(self) -> int:
        """Training nodes plus spare nodes."""
        resources = self.loaded.config.resources
        return resources.nodes + resources.spare_nodes

    @property
    def _gpu_type(self) -> str | None:
        """The requested GPU type if any node has it, else None: a missing type is reported elsewhere."""
        gpu_type = self.loaded.config.resources.gpu_type
        return gpu_type if any(kind.num_gpus(gpu_type) for kind in self.nodes) else None

    def device(self) -> str:
        requested, partition = self.loaded.config.device, self.partition
        if requested != "auto":
            self.reasons["device"] = f"device: {requested} was requested"
            return requested
        if partition is None or not self.nodes:
            message = "is auto, but the hardware of this cluster's nodes is unknown"
            self._unknown("device", message, "set device: cuda or device: cpu")
            return "cpu"
        most = max(kind.num_gpus() for kind in self.nodes)
        what = f"have {most} GPUs" if most > 1 else "have a GPU" if most else "have no GPU"
        device = "cuda" if most else "cpu"
        self.reasons["device"] = f"{device}: the nodes of partition {partition.name} {what}"
        return device

    def workers_per_node(self, device: str) -> int:
        requested, partition = self.loaded.config.resources.gpus_per_node, self.partition
        if requested != "auto":
            self.reasons["workers_per_node"] = f"resources.gpus_per_node: {requested} was requested"
            return requested
        if device == "cpu":
            reason = "1: a CPU node has one worker unless resources.gpus_per_node is set"
            self.reasons["workers_per_node"] = reason
            return 1
        count = self._gpus_per_node()
        if partition is None or not self.nodes:
            message = "is auto, but the number of GPUs per node is unknown"
            self._unknown("resources.gpus_per_node", message, "set it, or choose another partition")
            return 1
        if not count:
            message = f"is auto, but the nodes of partition {partition.name} have no GPU"
            self.problem("resources.gpus_per_node", message, "choose another partition, or set device: cpu")
            return 1
        reason = f"{count}: GPUs per node in partition {partition.name}"
        others = sorted({kind.num_gpus() for kind in self.nodes} - {count})
        if others:
            reason += f"; other nodes have {', '.join(map(str, others))}"
        self.reasons["workers_per_node"] = reason
        return count

    def _gpus_per_node(self) -> int:
        """The most GPUs per node that enough nodes have; the overall maximum if there are too few."""
        gpu_type = self._gpu_type
        counts = sorted({kind.num_gpus(gpu_type) for kind in self.nodes}, reverse=True)
        for count in filter(None, counts):
            nodes = sum(kind.count for kind in self.nodes if kind.num_gpus(gpu_type) >= count)
            if nodes >= self._total_nodes:
                return count
        return max(counts, default=0)

    def check_oversubscription(self, device: str, world_size: int) -> None:
        """Do nothing: `limit_problems` checks the limits of the cluster."""

    def derived_threads(self, world_size: int) -> tuple[int | None, str]:
        kinds = self._gpu_nodes(world_size // self.loaded.config.resources.nodes)
        partition = self.partition
        if partition is not None and self.uses_gpus and kinds:
            sizes = [(partition.usable_cpus(kind) or 0, kind.num_gpus()) for kind in kinds]
            num_cpus, num_gpus = min(sizes, key=lambda size: size[0] // size[1])
            if threads := num_cpus // num_gpus:
                return threads, f"{threads}: {num_cpus} CPU cores for {num_gpus} GPUs per node"
        return None, "Slurm's default per task; resources.cpus_per_gpu requests more"

    def _gpu_nodes(self, workers: int) -> list[NodeKind]:
        """The nodes with a GPU for every worker; if there are none, all nodes with GPUs."""
        gpu_type = self._gpu_type
        some = [kind for kind in self.nodes if kind.num_gpus(gpu_type)]
        return [kind for kind in some if kind.num_gpus(gpu_type) >= workers] or some

    @property
    def uses_gpus(self) -> bool:
        device = self.loaded.config.device
        return device == "cuda" or (device == "auto" and any(kind.num_gpus() for kind in self.nodes))

    def lead_s(self) -> int:
        """How many seconds before the time limit Slurm signals the job, so that it can save."""
        grace_s, limit_s = super().lead_s(), self._time_limit_s()
        if limit_s is None or grace_s <= limit_s // SHARE_OF_TIME:
            return grace_s
        lead_s = max(1, limit_s // SHARE_OF_TIME)
        self.reasons["notice"] = (
            f"{lead_s} s before the end: requeue.grace_s is {grace_s}, but the job has only {limit_s} s"
        )
        return lead_s

    def _time_limit_s(self) -> int | None:
        """The time limit of the job in seconds; None for no limit or if unknown."""
        time, partition = self.loaded.config.resources.time, self.partition
        if time is not None:
            return time_limit_s(time)
        if partition is None or partition.job_time_s is None:
            return None
        self.reasons["time"] = (
            f"{time_text(partition.job_time_s)}: resources.time is null, and this is the "
            f"{'default' if partition.default_time_s else 'maximum'} of partition {partition.name}"
        )
        return partition.job_time_s

    def per(self, launcher: str) -> Literal["gpu", "node"]:
        """The unit of a Slurm task."""
        if launcher in PER_RANK:
            return self.loaded.config.launch.per
        self.reasons["per"] = f"node: {launcher} starts the ranks of a node itself"
        return "node"

    def request(
        self, device: str, workers_per_node: int, threads: int | None, notice: str, per: str
    ) -> SlurmRequest:
        """The Slurm options, after checking the request against the limits of the cluster."""
        config = self.loaded.config
        for key, message, hint in reserved_options(config):
            self.problem(key, message, hint)
        if device == "cuda":
            for key, message, hint in gpu_binding_problems(config, per, workers_per_node):
                self.problem(key, message, hint)
            self.warnings += gpu_binding_warnings(config, per, workers_per_node)
        tasks = 1 if per == "node" else workers_per_node
        resources = resource_request(
            config.resources, workers_per_node=workers_per_node, device=device, threads=threads, per=per
        )
        reported = {problem.key for problem in self.problems}
        for key, message, hint in limit_problems(resources, self.cluster):
            if key not in reported:
                self.problem(key, message, hint)
        cpus = None if threads is None else threads * workers_per_node // tasks
        request = make_request(
            config,
            tasks_per_node=tasks,
            cpus_per_task=cpus,
            gpus_per_node=workers_per_node if device == "cuda" else None,
            gpu_option=self.cluster.gpu_option,
            notice=notice,
            expedite=bool(self.cluster.expedited_requeue),
        )
        spare = config.resources.spare_nodes
        if spare:
            self.reasons["spare_nodes"] = (
                f"{spare}: the job gets {self._total_nodes} nodes, and {config.resources.nodes} of them train"
            )
        request = with_excluded(request, self._bad_nodes(resources))
        return replace(request, version=self.cluster.slurm_version)

    def _bad_nodes(self, request: ResourceRequest) -> list[str]:
        """Recently failed hosts to exclude, as many as the job can spare."""
        bad, capacity = self.cluster.bad_nodes, spare_capacity(request, self.cluster)
        named = request.named_nodes if bad else []
        excluded = [host for host in bad if host not in named][:capacity]
        notes = [f"{host}: {bad[host]}" for host in excluded]
        for host, reason in bad.items():
            if host not in excluded:
                why = "resources.extra.nodelist names" if host in named else "the job needs"
                notes.append(f"not {host}, which {why}: {reason}")
        if notes:
            self.reasons["exclude"] = "; ".join([*notes, self.cluster.forget_hint])
        return excluded

    def _unknown(self, key: str, message: str, hint: str) -> None:
        """Report a value that is known only to the cluster.

        Raises SlurmError if Slurm did not answer.
        """
        if self.cluster.error:
            raise SlurmError(f"{key} {message}: {self.cluster.error}", hint=f"try again, or {hint}")
        self.problem(key, message, hint)
