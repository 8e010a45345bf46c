"""The plan of a Slurm job: its nodes are not this machine, so what they have comes from the cluster."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from trainkit.plan.cluster import Cluster, Partition
from trainkit.plan.draft import Draft
from trainkit.plan.slurm_request import SlurmRequest, make_request, reserved_options

SHARE_OF_TIME = 4
"""The notice before the end of a job comes at the earliest when so much of its time is left."""


@dataclass
class SlurmDraft(Draft):
    """A plan for the nodes of a cluster."""

    cluster: Cluster = field(default_factory=lambda: Cluster("unknown"))

    @property
    def partition(self) -> Partition | None:
        return self.cluster.partition(self.loaded.config.resources.partition)

    def device(self) -> str:
        asked, partition = self.loaded.config.device, self.partition
        if asked != "auto":
            self.reasons["device"] = f"device: {asked} was asked for"
            return asked
        if partition is None:
            message = "is auto, but what the nodes of this cluster have is not known"
            self.problem("device", message, "say device: cuda or device: cpu")
            return "cpu"
        device = "cuda" if partition.gpus_per_node else "cpu"
        what = f"have {partition.gpus_per_node} GPUs" if partition.gpus_per_node else "have no GPU"
        self.reasons["device"] = f"{device}: the nodes of partition {partition.name} {what}"
        return device

    def workers_per_node(self, device: str) -> int:
        asked, partition = self.loaded.config.resources.gpus_per_node, self.partition
        if asked != "auto":
            self.reasons["workers_per_node"] = f"resources.gpus_per_node: {asked} was asked for"
            if device == "cuda" and partition is not None and asked > partition.gpus_per_node:
                message = (
                    f"is {asked}, but the nodes of partition {partition.name} have {partition.gpus_per_node}"
                )
                self.problem("resources.gpus_per_node", message)
            return asked
        if device == "cpu":
            reason = "1: a CPU node has one worker unless resources.gpus_per_node says otherwise"
            self.reasons["workers_per_node"] = reason
            return 1
        if partition is None or not partition.gpus_per_node:
            message = "is auto, but how many GPUs the nodes have is not known"
            self.problem("resources.gpus_per_node", message, "say how many, or name another partition")
            return 1
        count = partition.gpus_per_node
        self.reasons["workers_per_node"] = f"{count}: the GPUs of a node of partition {partition.name}"
        return count

    def refuse_a_crowd(self, device: str, world_size: int) -> None:
        """Slurm knows how many fit."""

    def threads_per_worker(self, world_size: int) -> int | None:
        asked, partition = self.loaded.config.resources.cpus_per_gpu, self.partition
        if asked != "auto":
            self.reasons["threads_per_worker"] = f"resources.cpus_per_gpu: {asked} was asked for"
            return asked
        if partition is not None and partition.gpus_per_node and partition.cpus_per_node and self.uses_gpus:
            share = max(1, partition.cpus_per_node // partition.gpus_per_node)
            self.reasons["threads_per_worker"] = (
                f"{share}: {partition.cpus_per_node} CPU cores for {partition.gpus_per_node} GPUs in a node"
            )
            return share
        self.reasons["threads_per_worker"] = "what Slurm gives a task; resources.cpus_per_gpu asks for more"
        return None

    @property
    def uses_gpus(self) -> bool:
        device = self.loaded.config.device
        partition = self.partition
        return device == "cuda" or (
            device == "auto" and partition is not None and partition.gpus_per_node > 0
        )

    def lead_s(self) -> int:
        """How many seconds before the time limit the job is told, so that it can save."""
        config = self.loaded.config
        grace_s = math.ceil(config.requeue.grace_s)
        time = config.resources.time
        if time is None or grace_s <= time_limit_s(time) // SHARE_OF_TIME:
            return grace_s
        limit_s = time_limit_s(time)
        lead_s = max(1, limit_s // SHARE_OF_TIME)
        self.reasons["notice"] = (
            f"{lead_s} s before the end: requeue.grace_s is {grace_s}, and the job has {limit_s} s in all"
        )
        return lead_s

    def per(self, launcher: str) -> Literal["gpu", "node"]:
        """What a Slurm task stands for."""
        if launcher == "python":
            return self.loaded.config.launch.per
        self.reasons["per"] = f"node: {launcher} starts the ranks of a node itself"
        return "node"

    def request(
        self, device: str, workers_per_node: int, threads: int | None, lead_s: int, per: str
    ) -> SlurmRequest:
        """The options for Slurm."""
        config = self.loaded.config
        for key, message, hint in reserved_options(config):
            self.problem(key, message, hint)
        tasks = 1 if per == "node" else workers_per_node
        cpus = None if threads is None else threads * workers_per_node // tasks
        return make_request(
            config,
            tasks_per_node=tasks,
            cpus_per_task=cpus,
            gpus_per_node=workers_per_node if device == "cuda" else None,
            gpu_option=self.cluster.gpu_option,
            lead_s=lead_s,
        )


def time_limit_s(text: str) -> int:
    """Seconds of a time as Slurm writes it: ``M``, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M``, ``D-H:M:S``."""
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in re.split(":", rest)]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0, 0)[:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(parts) == 1:
        return parts[0] * 60
    hours, minutes, seconds = (0, *parts) if len(parts) == 2 else parts
    return (hours * 60 + minutes) * 60 + seconds
