"""Drafts a plan for this machine or a running Slurm step, without checking the model and data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from trainkit.capability import Ranks
from trainkit.cluster.machine import Machine
from trainkit.cluster.target import LOCAL, Target
from trainkit.config.loaded import LoadedConfig
from trainkit.config.running import RequeueConfig
from trainkit.config.schema import capabilities_of
from trainkit.config.training import NAMED, named_defaults
from trainkit.config.validation import doubts
from trainkit.errors import ConfigError, Problem
from trainkit.formats import plural, time_limit_s
from trainkit.plan.batch import BatchRequest, batch_reason, make_batch, scaled_lr
from trainkit.plan.launch import Batch, LaunchPlan, Layout, RequeuePolicy, SlurmRequest, WorkerEnvironment
from trainkit.plan.layout_rules import make_layout
from trainkit.plan.workload import Workload, out_of_reach
from trainkit.run.files import to_json
from trainkit.shipped import load

WORKERS_PER_CPU = 16


@dataclass
class LaunchDraft:
    """A draft of a plan for this machine; each method derives one value and records its reason."""

    loaded: LoadedConfig
    machine: Machine
    target: Target
    problems: list[Problem] = field(default_factory=list)
    """Problems found so far, without the config files and lines where their keys are set."""
    reasons: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)
    """Config keys whose values a capability passes to the command."""
    parts: dict[str, dict[str, object]] = field(default_factory=dict)

    def plan(self, workload: Workload) -> LaunchPlan:
        """Return the plan without checking the model and data; raise ConfigError with all problems found."""
        config, target = self.loaded.config, self.target
        if target is not LOCAL:
            self.reasons["backend"] = target.reason
        if target.cluster is not None:
            self.reasons["cluster"] = target.cluster.reason
        device = self.device()
        workers_per_node = self.workers_per_node(device)
        sizes = target.node_sizes
        num_nodes = config.resources.most_nodes if sizes is None else len(sizes)
        world_size = num_nodes * workers_per_node if sizes is None else sum(sizes)
        if not workload.is_command:
            layout = self.layout(world_size)
            batch = self.batch(layout)
            lr = self.lr(layout)
            if self.loaded.length_note:
                self.reasons["length"] = self.loaded.length_note
        else:
            layout, batch, lr = Layout(dp_shard=world_size), Batch(0, 0, 0, 0), 0.0
            self._plan_command(workload, Ranks(world_size, num_nodes, workers_per_node, device))
            self.reasons["end"] = (
                "exit code 0 finishes the run; after a stop signal, the command must also have created "
                "$TRAINKIT_JOB_DONE_FILE"
            )
            if (why := out_of_reach(workload.argv)) is not None:
                self.reasons["notice"] = (
                    "a stop signal may not reach the training process, so no checkpoint would be saved: "
                    f"{why}"
                )
        self.check_oversubscription(device, world_size)
        threads = self.threads_per_worker(world_size)
        lead_s = self.lead_s()
        per = target.per or self.per(workload.launcher)
        # For a COMMAND, Slurm signals the agents, which then send the configured signal to the COMMAND's
        # processes.
        has_agents = workload.is_command or config.requeue.signal == "auto"
        notice = workload.notice if has_agents else config.requeue.signal
        slurm = self.request(device, workers_per_node, threads, f"{notice}@{lead_s}", per)
        self.warnings += doubts(self.loaded, trains=not workload.is_command)
        self.warnings += self._without_effect(workload)
        if batch is None or self.problems:
            raise ConfigError(self.problems)
        has_slices = slurm is not None and config.resources.slice is not None
        total_s = time_limit_s(str(config.resources.time)) if has_slices else None
        return LaunchPlan(
            backend=target.backend,
            num_nodes=num_nodes,
            workers_per_node=workers_per_node,
            environment=WorkerEnvironment({**self.env, **config.launch.env}, config.launch.network),
            requeue=replace(_policy(config.requeue), total_s=total_s),
            spare_nodes=0 if slurm is None else config.resources.spare_nodes,
            per=per,
            device=device,
            layout=layout,
            batch=batch,
            lr=lr,
            threads_per_worker=threads,
            grace_s=min(config.requeue.grace_s, lead_s),
            reasons=self.reasons,
            workload=replace(workload, signal=config.requeue.signal),
            slurm=slurm,
            node_sizes=None if sizes is None or len(set(sizes)) == 1 else sizes,
            warnings=tuple(self.warnings),
            parts=self.parts,
        )

    def _without_effect(self, workload: Workload) -> Iterator[str]:
        """Yield a warning for command-line options that have no effect on the run.

        Values in a config file are not reported, because the file may be shared with runs where the values
        have an effect. For a sweep, options without an effect are reported for each trial.
        """
        found = sorted(
            key
            for key in self.loaded.typed
            if not (
                workload.uses(key) or key in self.passed or self.loaded.origins[key].startswith("--sweep ")
            )
        )
        found = [key for key in found if not any(other.startswith(f"{key}.") for other in found)]
        if found:
            has, it = ("has", "it") if len(found) == 1 else ("have", "them")
            yield (
                f"{', '.join(found)} {has} no effect on a COMMAND or function that does not read {it} from "
                "config.yaml in $TRAINKIT_JOB_RUN_DIR"
            )

    def _plan_command(self, workload: Workload, ranks: Ranks) -> None:
        """Plan the values that capabilities pass to the command."""
        for name in capabilities_of(self.loaded.config):
            try:
                given = load(name).plan_command(self.loaded, workload, ranks)
            except ConfigError as error:
                self.problems += error.problems
                continue
            self.reasons |= given.reasons
            self.warnings += given.warnings
            self.env |= given.env
            self.passed.update(given.keys)
            if given.part is not None:
                self.parts[name] = to_json(given.part)

    def check_oversubscription(self, device: str, world_size: int) -> None:
        """Report too many CPU workers, so that a typo in --nodes cannot start thousands of processes.

        A running Slurm step is not checked, because Slurm has already started its tasks. For a Slurm job,
        `limit_problems` checks the number of workers.
        """
        if self.target.node_sizes is not None or self.target.cluster is not None:
            return
        most = WORKERS_PER_CPU * self.machine.num_cpus
        if device == "cpu" and world_size > most:
            message = f"starts {world_size} workers on the {self.machine.num_cpus} CPU cores of this machine"
            key = (
                "resources.nodes"
                if self.loaded.config.resources.most_nodes > 1
                else "resources.gpus_per_node"
            )
            self.problem(
                key, message, f"at most {most} workers can run on this machine ({WORKERS_PER_CPU} per core)"
            )

    def device(self) -> str:
        requested = self.loaded.config.device
        if requested == "auto":
            return self.detected_device()
        if requested == "cuda" and self.target.cluster is None and not self.machine.num_gpus:
            message = f"is cuda, but {self.machine.gpu_reason}"
            self.problem("device", message, "device: auto uses the devices of this machine")
        self.reasons["device"] = f"device: {requested} was requested"
        return requested

    def detected_device(self) -> str:
        device = "cuda" if self.machine.num_gpus else "cpu"
        self.reasons["device"] = f"{device}: {self.machine.gpu_reason}"
        return device

    def workers_per_node(self, device: str) -> int:
        requested = self.loaded.config.resources.gpus_per_node
        num_gpus, nodes = self.machine.num_gpus, self.loaded.config.resources.most_nodes
        if requested == "auto" and device == "cuda":
            return self.detected_gpus()
        if requested == "auto":
            reason = "1: a CPU node has one worker unless resources.gpus_per_node is set"
            self.reasons["workers_per_node"] = reason
            return 1
        self.reasons["workers_per_node"] = f"resources.gpus_per_node: {requested} was requested"
        if device == "cuda" and self.target.cluster is None and 0 < num_gpus < nodes * requested:
            message = (
                f"is {requested}: {plural(nodes, 'node')} x {requested} = {nodes * requested} GPUs, "
                f"but this machine has {num_gpus}"
            )
            self.problem("resources.gpus_per_node", message, self._gpu_hint())
        return requested

    def detected_gpus(self) -> int:
        """Return the detected number of GPUs per node, used if the config does not specify one."""
        nodes, num_gpus = self.loaded.config.resources.most_nodes, self.machine.num_gpus
        if 0 < num_gpus < nodes:
            message = (
                f"is {nodes}, but this machine has {plural(num_gpus, 'GPU')} and every node needs one GPU"
            )
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
        return f"use --nodes 1 --gpus-per-node {num_gpus}, or use device: cpu for any number of workers"

    def layout(self, world_size: int) -> Layout:
        try:
            layout, self.reasons["layout"] = make_layout(self.loaded.config.parallel, world_size)
        except ConfigError as error:
            self.problems += error.problems
            # The layout is invalid, so check the batch with a layout where every process reads different
            # samples.
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
        for section in NAMED:
            name = getattr(self.loaded.config, section).name
            for key, value in named_defaults(section, name).items():
                if not self.loaded.set_by_user(f"{section}.{key}"):
                    self.reasons[key] = f"{value}: default of {name}"
        return lr

    def threads_per_worker(self, world_size: int) -> int | None:
        requested = self.loaded.config.resources.cpus_per_gpu
        if requested != "auto":
            self.reasons["threads_per_worker"] = f"resources.cpus_per_gpu: {requested} was requested"
            return requested
        threads, self.reasons["threads_per_worker"] = self.derived_threads(world_size)
        return threads

    def derived_threads(self, world_size: int) -> tuple[int | None, str]:
        """Return the default number of threads per worker, and the reason for this number."""
        num_cpus = self.machine.num_cpus
        threads = max(1, num_cpus // world_size)
        return threads, f"{threads}: {num_cpus} CPU cores for {plural(world_size, 'worker')}"

    def lead_s(self) -> int:
        """Return the seconds from the stop signal until the job is killed: the configured grace time."""
        return math.ceil(self.loaded.config.requeue.grace_s)

    def per(self, launcher: str) -> Literal["gpu", "node"]:
        """Return whether a Slurm task runs a single worker (``gpu``) or all workers of a node (``node``)."""
        return "node"

    def request(
        self, device: str, workers_per_node: int, threads: int | None, notice: str, per: str
    ) -> SlurmRequest | None:
        """Return the job's Slurm options, or None if no job is submitted."""
        return None

    def problem(self, key: str, message: str, hint: str = "") -> None:
        self.problems.append(Problem(key, message, hint=hint))


@dataclass
class StepDraft(LaunchDraft):
    """A draft of the plan for a running Slurm step, whose first node is this machine."""

    def workers_per_node(self, device: str) -> int:
        sizes, num_gpus = self.target.node_sizes or (), self.machine.num_gpus
        count = max(sizes)
        self.reasons["workers_per_node"] = (
            f"{','.join(map(str, sizes))}: number of workers on each node of the step"
        )
        if device == "cuda" and count > num_gpus == 1 and self.target.per == "gpu":
            # The ranks check whether all tasks see the same GPU.
            self.warnings.append(f"task 0 sees one GPU of its node: {BOUND_GPU_WARNING}")
        elif device == "cuda" and count > num_gpus:
            message = f"is {count} in this step, but this node has {num_gpus} visible GPUs"
            fewer = "start fewer ranks" if self.is_launched else "request GPUs with srun --gpus-per-node"
            self.problem("resources.gpus_per_node", message, f"{fewer}, or set device: cpu")
        return count

    def derived_threads(self, world_size: int) -> tuple[int | None, str]:
        if self.is_launched:
            return None, "the cores of each host, shared by its ranks"
        return None, "the cores that Slurm allocated to each task"

    @property
    def is_launched(self) -> bool:
        """Return whether another launcher, rather than Slurm, started the ranks."""
        return self.target.backend == "launcher"


def _policy(section: RequeueConfig) -> RequeuePolicy:
    """Return the values of the section `requeue` that the job needs."""
    known = (field.name for field in fields(RequeuePolicy) if field.name in type(section).model_fields)
    return RequeuePolicy(**{name: getattr(section, name) for name in known})


BOUND_GPU_WARNING = (
    "if a rank sees only its own GPU, NCCL may fail with `invalid device ordinal` or not use NVLink; "
    "`gpu-bind: none` in launch.srun_extra, or srun --gpu-bind=none, lets every task see all GPUs of the node"
)
