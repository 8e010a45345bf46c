"""A plan in the making, for a job whose nodes are all this machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainkit.config.loaded import LoadedConfig
from trainkit.errors import ConfigError, Problem
from trainkit.plan.batch import batch_reason, make_batch
from trainkit.plan.launch import Batch, Layout
from trainkit.plan.layout import make_layout
from trainkit.plan.lr import scaled_lr
from trainkit.plan.machine import Machine

WORKERS_PER_CPU = 16


@dataclass
class Draft:
    """A plan in the making: each method derives one value and notes its reason or its problem."""

    loaded: LoadedConfig
    machine: Machine
    problems: list[Problem] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    def refuse_a_crowd(self, device: str, world_size: int) -> None:
        """A typing error in --nodes must not start a thousand processes on one machine."""
        most = WORKERS_PER_CPU * self.machine.num_cpus
        if device == "cpu" and world_size > most:
            message = f"makes {world_size} workers on this machine's {self.machine.num_cpus} CPU cores"
            key = "resources.nodes" if self.loaded.config.resources.nodes > 1 else "resources.gpus_per_node"
            self.problem(key, message, f"at most {most} workers ({WORKERS_PER_CPU} a core) are started here")

    def device(self) -> str:
        asked = self.loaded.config.device
        if asked == "cuda" and not self.machine.num_gpus:
            message = f"is cuda, but {self.machine.gpu_reason}"
            self.problem("device", message, "device: auto takes what is there")
        if asked != "auto":
            self.reasons["device"] = f"device: {asked} was asked for"
            return asked
        device = "cuda" if self.machine.num_gpus else "cpu"
        self.reasons["device"] = f"{device}: {self.machine.gpu_reason}"
        return device

    def workers_per_node(self, device: str) -> int:
        resources = self.loaded.config.resources
        nodes, asked, num_gpus = resources.nodes, resources.gpus_per_node, self.machine.num_gpus
        if asked != "auto":
            self.reasons["workers_per_node"] = f"resources.gpus_per_node: {asked} was asked for"
            if device == "cuda" and 0 < num_gpus < nodes * asked:
                message = (
                    f"is {asked}: {_count(nodes, 'node')} x {asked} = {nodes * asked} GPUs, "
                    f"but this machine has {num_gpus}"
                )
                self.problem("resources.gpus_per_node", message, self._gpu_hint())
            return asked
        if device == "cpu":
            reason = "1: a CPU node has one worker unless resources.gpus_per_node says otherwise"
            self.reasons["workers_per_node"] = reason
            return 1
        if 0 < num_gpus < nodes:
            message = f"is {nodes}, but this machine has {_count(num_gpus, 'GPU')} and every node needs one"
            self.problem("resources.nodes", message, self._gpu_hint())
            return 1
        share = max(1, num_gpus // nodes)
        idle = num_gpus - share * nodes
        self.reasons["workers_per_node"] = (
            f"{share}: {_count(num_gpus, 'GPU')} shared by {_count(nodes, 'node')}"
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
            self.collect(error)
            # The batch is still checked: against all processes reading different samples.
            return Layout(dp_shard=world_size)
        return layout

    def batch(self, layout: Layout) -> Batch | None:
        train, seq_len = self.loaded.config.train, self.loaded.config.data.seq_len
        try:
            batch = make_batch(train.device_batch_size, train.global_batch_size, layout.dp, seq_len)
        except ConfigError as error:
            self.collect(error)
            return None
        self.reasons["batch"] = batch_reason(batch, layout.dp)
        return batch

    def lr(self, layout: Layout) -> float:
        optimizer = self.loaded.config.optimizer
        lr, self.reasons["lr"] = scaled_lr(
            optimizer.lr, optimizer.lr_scale, layout.dp, optimizer.lr_scale_base
        )
        return lr

    def threads_per_worker(self, world_size: int) -> int | None:
        asked = self.loaded.config.resources.cpus_per_gpu
        if asked != "auto":
            self.reasons["threads_per_worker"] = f"resources.cpus_per_gpu: {asked} was asked for"
            return asked
        num_cpus = self.machine.num_cpus
        threads = max(1, num_cpus // world_size)
        workers = "1 worker" if world_size == 1 else f"{world_size} workers"
        self.reasons["threads_per_worker"] = f"{threads}: {num_cpus} CPU cores for {workers}"
        return threads

    def problem(self, key: str, message: str, hint: str = "") -> None:
        self.problems.append(self.loaded.problem(key, message, hint))

    def collect(self, error: ConfigError) -> None:
        for problem in error.problems:
            self.problem(problem.key, problem.message, problem.hint)


def _count(number: int, noun: str) -> str:
    return f"1 {noun}" if number == 1 else f"{number} {noun}s"
