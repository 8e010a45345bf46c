"""The launch draft for a Slurm job; derives values in the launch plan from properties of the cluster."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trainkit.cluster.discovery import parse_gpus
from trainkit.cluster.limits import (
    ResourceRequest,
    limit_problems,
    listed,
    partition_refusals,
    spare_capacity,
)
from trainkit.cluster.model import NodeKind
from trainkit.config.running import MAIL_TYPES
from trainkit.config.schema import RunConfig
from trainkit.errors import KeyProblem, SlurmError
from trainkit.formats import plural, time_text
from trainkit.plan.launch import LaunchPlan, Options, SlurmRequest, with_excluded
from trainkit.plan.launch_draft import BOUND_GPU_WARNING, LaunchDraft
from trainkit.plan.workload import PER_RANK

SHARE_OF_TIME = 4
"""The warning signal is sent when at most 1/SHARE_OF_TIME of the job's time limit remains."""

_PASSED_ON = (
    "time_min",
    "account",
    "qos",
    "constraint",
    "exclude",
    "reservation",
    "mem",
    "comment",
    "mail_user",
    "mail_type",
)
"""Keys in `resources` whose values are passed to sbatch unchanged."""

_KEYS = {
    **{
        name.replace("_", "-"): f"resources.{name}"
        for name in ("time", "partition", "clusters", "nodes", *_PASSED_ON)
    },
    **dict.fromkeys(
        ("ntasks-per-node", "ntasks", "gpus-per-node", "gres", "gpus", "gpus-per-task"),
        "resources.gpus_per_node",
    ),
    **{"cluster": "resources.clusters", "no-kill": "resources.spare_nodes"},
    **{"cpus-per-task": "resources.cpus_per_gpu", "job-name": "name", "signal": "requeue.signal"},
    **{"requeue": "requeue.on", "no-requeue": "requeue.on", "array": "--array", "dependency": "--after"},
}
"""Maps sbatch options to the config key or trainkit option that sets them; `resources.extra` must not set
these options."""

_OWN_SBATCH = (
    "output",
    "error",
    "open-mode",
    "chdir",
    "wrap",
    "parsable",
    "test-only",
    "export-file",
    "input",
)
"""The sbatch options that trainkit sets itself."""

_OWN_SRUN = (
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "output",
    "error",
    "input",
    "kill-on-bad-exit",
    "wait",
    "chdir",
    "pty",
    "multi-prog",
    "label",
    "jobid",
    "overlap",
    "signal",
    "export",
    "nodelist",
    "nodefile",
    "exclude",
    "relative",
    "no-kill",
)

_REQUEUED_BY_SLURM = ("preempted", "node_fail")
"""The causes for which Slurm itself requeues a job that has --requeue."""


@dataclass
class SlurmDraft(LaunchDraft):
    """Derives the launch plan for a Slurm job."""

    def __post_init__(self) -> None:
        assert self.target.cluster is not None
        self.cluster = self.target.cluster
        self.asked = ResourceRequest.of(self.loaded.config.resources, self.cluster)
        """The resources that the config requests, to which `request` adds the workers per node."""
        refused = partition_refusals(self.asked, self.cluster)
        default = self.cluster.partition(None)
        named = self.asked.partitions or ([] if default is None else [default])
        self.partitions = [item for item in named if item.name not in refused] or named
        """The requested partitions or, if none is requested, the default partition. Partitions that would
        reject the job are omitted, unless all partitions would reject it."""
        self.partition = next(iter(self.partitions), None)
        gpu_type = self.asked.gpu_type
        self.kinds = {
            item.name: item.matching(self.asked.constraint, gpu_type) or item.nodes
            for item in self.partitions
        }
        """Maps each partition to the kinds of nodes that the job may get there; empty if unknown."""
        self.nodes = tuple(kind for kinds in self.kinds.values() for kind in kinds)
        self.gpu_types: dict[str, str] = {}
        """Maps each partition to a GPU type, because Slurm may choose among several partitions."""
        # If no node has the GPU type, `limit_problems` reports the problem.
        self._gpu_type = gpu_type if any(kind.num_gpus(gpu_type) for kind in self.nodes) else None

    def detected_device(self) -> str:
        if self.partition is None or not self.nodes:
            message = "is auto, but the hardware of this cluster's nodes is unknown"
            self._unknown("device", message, "set device: cuda or device: cpu")
            return "cpu"
        most = max(kind.num_gpus() for kind in self.nodes)
        what = f"have {most} GPUs" if most > 1 else "have a GPU" if most else "have no GPU"
        device = "cuda" if most else "cpu"
        self.reasons["device"] = f"{device}: the nodes of {self._where} {what}"
        return device

    def detected_gpus(self) -> int:
        # Use the smallest number of GPUs per node among all partitions that have GPUs.
        count = min(filter(None, map(self._gpus_per_node_of, self.kinds.values())), default=0)
        if self.partition is None or not self.nodes:
            message = "is auto, but the number of GPUs per node is unknown"
            self._unknown(
                "resources.gpus_per_node", message, "set resources.gpus_per_node, or choose another partition"
            )
            return 1
        if not count:
            message = f"is auto, but the nodes of {self._where} have no GPU"
            self.problem("resources.gpus_per_node", message, "choose another partition, or set device: cpu")
            return 1
        reason = f"{count}: GPUs per node in {self._where}"
        others = sorted({kind.num_gpus(self._gpu_type) for kind in self.nodes} - {count})
        if others:
            reason += f"; other nodes have {', '.join(map(str, others))}"
        mixed = next((kind.gpus for kind in self.nodes if len(kind.gpus) > 1), None)
        if mixed and self._gpu_type is None:
            types = listed(name or "others" for name in mixed)
            reason += f", of the types {types}; resources.gpu_type chooses one"
        self.reasons["workers_per_node"] = reason
        return count

    def _whole_node_gpus(self, is_exclusive: bool) -> int | None:
        """Return how many GPUs per node an exclusive job, or a job in an exclusive partition, may get."""
        whole = [item for item in self.partitions if is_exclusive or item.is_exclusive]
        return max((kind.num_gpus() for item in whole for kind in self.kinds[item.name]), default=0) or None

    @property
    def _where(self) -> str:
        names = listed(self.kinds, "or")
        return f"partition {names}" if len(self.kinds) == 1 else f"partitions {names}"

    def _gpus_per_node_of(self, kinds: tuple[NodeKind, ...]) -> int:
        """Return the largest number of GPUs per node that enough nodes have.

        Returns the maximum number if no number is available on enough nodes.
        """
        gpu_type = self._gpu_type
        counts = sorted({kind.num_gpus(gpu_type) for kind in kinds}, reverse=True)
        for count in filter(None, counts):
            nodes = sum(kind.count for kind in kinds if kind.num_gpus(gpu_type) >= count)
            if nodes >= self.asked.all_nodes:
                return count
        return max(counts, default=0)

    def derived_threads(self, world_size: int) -> tuple[int | None, str]:
        # Consider only nodes with a GPU for every worker; if there are none, consider all nodes with GPUs.
        workers, device = world_size // self.asked.nodes, self.loaded.config.device
        placed = ((item, kind) for item in self.partitions for kind in self.kinds[item.name])
        some = [(item, kind) for item, kind in placed if kind.num_gpus(self._gpu_type)]
        kinds = [found for found in some if found[1].num_gpus(self._gpu_type) >= workers] or some
        uses_gpus = device == "cuda" or (device == "auto" and any(kind.num_gpus() for kind in self.nodes))
        if uses_gpus and kinds:
            sizes = [(item.usable_cpus(kind) or 0, kind.num_gpus()) for item, kind in kinds]
            num_cpus, num_gpus = min(sizes, key=lambda size: size[0] // size[1])
            if threads := num_cpus // num_gpus:
                return (
                    threads,
                    f"{threads}: {plural(num_cpus, 'CPU core')} for {plural(num_gpus, 'GPU')} per node",
                )
        return None, "Slurm's default per task; resources.cpus_per_gpu requests more"

    def lead_s(self) -> int:
        """Return how many seconds before the time limit Slurm signals the job to save."""
        grace_s, limit_s = super().lead_s(), self._time_limit_s()
        if grace_s <= limit_s / SHARE_OF_TIME:
            return grace_s
        lead_s = max(1, int(limit_s) // SHARE_OF_TIME)
        self.reasons["notice"] = (
            f"{lead_s} s before the time limit: requeue.grace_s is {grace_s}, but the job has {limit_s} s"
        )
        return lead_s

    def _time_limit_s(self) -> float:
        """Return the shortest time limit in seconds that the job may get; infinite if no limit is known."""
        partition, resources = self.partition, self.loaded.config.resources
        if self.asked.time_s is not None:
            notes = []
            if resources.time_min is not None:
                notes.append(f"or as little as {resources.time_min}, if a shorter job can start sooner")
            if resources.slice is not None:
                notes.append(f"{resources.slice} per job, until the run has used {resources.time} in total")
            if notes:
                self.reasons["time"] = "; ".join(reversed(notes))
            # The backfill scheduler of Slurm 22.05 and 24.11 lowers the time limit to exactly --time-min.
            # Slurm 26.05 lowers the time limit only as far as necessary. All versions send the warning signal
            # relative to the lowered time limit, and keep this limit when the job is requeued.
            return self.asked.time_min_s or self.asked.time_s
        if partition is None or partition.job_time_s is None:
            return math.inf
        self.reasons["time"] = (
            f"{time_text(partition.job_time_s)}: resources.time is null, and this is the "
            f"{'default' if partition.default_time_s else 'maximum'} of partition {partition.name}"
        )
        return partition.job_time_s

    def per(self, launcher: str) -> Literal["gpu", "node"]:
        """Return whether the job has one Slurm task per GPU or one per node."""
        if launcher in PER_RANK:
            return self.loaded.config.launch.per
        self.reasons["per"] = f"node: {launcher} starts the ranks of a node itself"
        return "node"

    def _check_bindings(self, per: str, workers_per_node: int) -> None:
        """Report options that leave a rank without its own GPU.

        Explicit lists of GPUs are checked by the ranks.
        """
        launch, extra = self.loaded.config.launch, self.loaded.config.resources.extra
        is_unbound = "none" in (launch.srun_extra.get("gpu-bind"), extra.get("gpu-bind"))
        for key, value, num_gpus, sharing in _bound_gpus(self.loaded.config):
            seen = f"is {value}: a task would see {plural(num_gpus, 'GPU')}"
            if per == "node" and num_gpus < workers_per_node:
                hint = "remove this option, or set launch.per: gpu" if launch.per == "node" else "remove it"
                self.problem(
                    key, f"{seen}, but each task starts all {workers_per_node} ranks of its node", hint
                )
            elif per == "gpu" and sharing > 1:
                message = f"is {value}: ranks would share a GPU"
                self.problem(key, message, "bind a different GPU to every task")
            elif per == "gpu" and num_gpus > 1:
                self.problem(
                    key,
                    f"{seen}, but each task is only one rank",
                    "bind one GPU to every task, or remove this option",
                )
            elif per == "gpu" and not is_unbound:
                self.warnings.append(f"{key} is {value}: {BOUND_GPU_WARNING}")

    def request(
        self, device: str, workers_per_node: int, threads: int | None, notice: str, per: str
    ) -> SlurmRequest:
        """Return the Slurm request after checking it against the cluster's limits."""
        config = self.loaded.config
        for key, message, hint in _reserved_options(config):
            self.problem(key, message, hint)
        if device == "cuda" and workers_per_node > 1:
            self._check_bindings(per, workers_per_node)
        tasks = 1 if per == "node" else workers_per_node
        asked = self.asked.with_workers(workers_per_node, device, threads, per)
        reported = {problem.key for problem in self.problems}
        for key, message, hint in limit_problems(asked, self.cluster):
            if key not in reported:
                self.problem(key, message, hint)
        if asked.gpu_types and asked.gpus_per_node and not self.cluster.partitions:
            message = "names several types, but the partitions, which decide the type, are unknown"
            self._unknown("resources.gpu_type", message, "name one type")
        sbatch = self._sbatch(asked, tasks, threads, notice)
        srun: Options = {
            "nodes": asked.nodes,
            "ntasks": asked.nodes * tasks,
            "ntasks-per-node": tasks,
            "kill-on-bad-exit": 0,
            "wait": 0,
            # torch has its own rendezvous, and the nodes may lack the plugin for the cluster's default MPI
            # type.
            "mpi": "none",
            **config.launch.srun_extra,
        }
        is_exclusive = config.resources.extra.get("exclusive") is True
        request = SlurmRequest(
            sbatch,
            srun,
            version=self.cluster.slurm_version,
            clusters=config.resources.clusters,
            gpu_types=self.gpu_types,
            whole_node_gpus=self._whole_node_gpus(is_exclusive),
            fills_nodes=is_exclusive
            and config.resources.cpus_per_gpu == "auto"
            and "cpus-per-task" in sbatch
            and not {"cpus-per-task", "gpus-per-task"} & srun.keys()
            and "gpus-per-task" not in sbatch,
        )
        if request.clusters:
            choice = f", whichever starts the job first; the plan is made for {request.clusters[0]}"
            self.reasons["clusters"] = listed(request.clusters, "or") + choice * (len(request.clusters) > 1)
        for item in self.partitions:
            if not item.is_up:
                waits = "Slurm rejects the partition's jobs, or leaves them pending until it is up"
                self.warnings.append(f"partition {item.name} is not up: {waits}")
        spare = config.resources.spare_nodes
        if spare:
            self.reasons["spare_nodes"] = (
                f"{spare}: the job gets {asked.all_nodes} nodes, of which {asked.nodes} train"
            )
        return with_excluded(request, self._bad_nodes(asked))

    def _sbatch(
        self, asked: ResourceRequest, tasks_per_node: int, threads: int | None, notice: str
    ) -> Options:
        """Return the sbatch options. `notice` is the value of the --signal option, such as ``USR2@120``."""
        config, resources = self.loaded.config, self.loaded.config.resources
        options: Options = {
            "job-name": config.name,
            "nodes": asked.all_nodes,
            "ntasks-per-node": tasks_per_node,
        }
        if asked.spare_nodes:
            options["no-kill"] = True  # with --no-kill, the job survives the loss of a node
        if threads is not None:
            options["cpus-per-task"] = threads * asked.workers_per_node // tasks_per_node
        if asked.gpus_per_node is not None:
            # If several GPU types were listed, Slurm would require all of them on each node, so select the
            # type by a list of partitions.
            kind = f"{asked.gpu_type}:" if asked.gpu_type else ""
            prefix = "gpu:" if self.cluster.gpu_option == "gres" else ""
            options[self.cluster.gpu_option] = f"{prefix}{kind}{asked.gpus_per_node}"
        if resources.job_time is not None:
            options["time"] = resources.job_time
        if (partition := self._partition_names(asked)) is not None:
            options["partition"] = partition
        for name in _PASSED_ON:
            if (value := getattr(resources, name)) is not None:
                options[name.replace("_", "-")] = value
        if config.notify.mail is not None:
            options["mail-user"] = config.notify.mail
            events = (MAIL_TYPES[event] for event in config.notify.on if event in MAIL_TYPES)
            options["mail-type"] = ",".join(events)
        options["signal"] = notice
        if any(cause in config.requeue.on for cause in _REQUEUED_BY_SLURM):
            options["requeue"] = "expedite" if self.cluster.expedited_requeue else True
        else:
            options["no-requeue"] = True
        return options | resources.extra

    def _partition_names(self, asked: ResourceRequest) -> str | None:
        """Return the partitions to request, which may be derived from the requested GPU types."""
        refused = partition_refusals(asked, self.cluster)
        able = [item for item in asked.partitions if item.name not in refused]
        if able and (len(asked.names) > 1 or asked.gpu_types):
            types = {item.name: item.gpu_type(asked.constraint) for item in able}
            self.gpu_types = {name: kind for name, kind in types.items() if kind}
            shown = [f"{name} ({kind})" if kind else name for name, kind in types.items()]
            notes = [f"not {name}: {key} {message}" for name, (key, message, _) in refused.items()]
            which = ", whichever is free first" if len(shown) > 1 else ""
            self.reasons["partition"] = "; ".join([listed(shown, "or") + which, *notes])
        if asked.gpu_types and asked.gpus_per_node and able:
            return ",".join(item.name for item in able)
        return self.loaded.config.resources.partition

    def _bad_nodes(self, asked: ResourceRequest) -> list[str]:
        """Return recently failed hosts to exclude, but no more than the job can spare."""
        bad, capacity = self.cluster.bad_nodes, spare_capacity(asked)
        named = asked.named_nodes if bad else []
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
        """Report a missing value that could only be derived from the cluster's data.

        Raises SlurmError if Slurm did not answer.
        """
        if self.cluster.error:
            raise SlurmError(f"{key} {message}: {self.cluster.error}", hint=f"try again, or {hint}")
        self.problem(key, message, hint)


def _reserved_options(config: RunConfig) -> Iterator[KeyProblem]:
    """Yield a problem for each option in `resources.extra` that trainkit or another config key sets."""
    for option, value in config.resources.extra.items():
        key = f"resources.extra.{option}"
        if option in _KEYS:
            yield key, "has its own config key", f"use {_KEYS[option]}"
        elif option.startswith("tres-per-") and parse_gpus(str(value)):
            yield key, "asks for GPUs", f"use {_KEYS['gres']}"
        elif option in _OWN_SBATCH:
            yield key, "is set by trainkit", "remove it"
    for option in config.launch.srun_extra:
        if option in _OWN_SRUN:
            yield f"launch.srun_extra.{option}", "is set by trainkit", "remove it"


def _bound_gpus(config: RunConfig) -> Iterator[tuple[str, str, int, int]]:
    """Yield (key, value, GPUs per task, tasks per GPU) for each extra option that binds GPUs to tasks."""
    sections = {"resources.extra": config.resources.extra, "launch.srun_extra": config.launch.srun_extra}
    for section, options in sections.items():
        for option, value in options.items():
            kind, _, number = str(value).rpartition(":")
            count = int(number) if number.isdigit() else 1
            if option == "gpus-per-task" or (option, kind) == ("gpu-bind", "per_task"):
                yield f"{section}.{option}", str(value), count, 1
            elif option == "ntasks-per-gpu" or (option, kind) == ("gpu-bind", "single"):
                yield f"{section}.{option}", str(value), 1, count


FULL_RANGES = (24, 11)
"""The first Slurm version known to accept a list of node counts, such as ``--nodes=2,4``.

Since this version, Slurm also allocates as many nodes as possible to a job with a task option such as
``--ntasks-per-node``. Slurm 22.05 accepts only a range and, if ``--ntasks-per-node`` is given, allocates the
smallest number of nodes in the range.
"""


def in_one_job(plans: Sequence[LaunchPlan], version: tuple[int, ...]) -> list[LaunchPlan]:
    """Return the plans, one per node count, largest first, adapted to share a single job."""
    is_old, sizes = version < FULL_RANGES, [plan.num_nodes for plan in reversed(plans)]
    is_range = is_old or sizes == list(range(sizes[0], sizes[-1] + 1))
    nodes = f"{sizes[0]}-{sizes[-1]}" if is_range else ",".join(map(str, sizes))
    return [_in_one_job(plan, nodes, plans[0], plans[-1], is_old) for plan in plans]


def _in_one_job(
    plan: LaunchPlan, nodes: str, first: LaunchPlan, least: LaunchPlan, is_old: bool
) -> LaunchPlan:
    assert plan.slurm is not None
    assert first.slurm is not None
    assert least.slurm is not None
    # With --no-kill, the job survives the loss of a node, and the run continues on the remaining nodes.
    sbatch: Options = {**first.slurm.sbatch, "nodes": nodes, "no-kill": True}
    # Exclude as many bad nodes as the job can spare if it gets only the smallest number of nodes.
    if "exclude" in least.slurm.sbatch:
        sbatch["exclude"] = least.slurm.sbatch["exclude"]
    srun = plan.slurm.srun
    if is_old:
        tasks, cpus = int(sbatch.pop("ntasks-per-node")), int(sbatch.get("cpus-per-task", 1))
        sbatch["cpus-per-task"], srun = tasks * cpus, {**srun, "cpus-per-task": cpus}
    fills = plan.slurm.fills_nodes and not is_old
    return replace(plan, slurm=replace(plan.slurm, sbatch=sbatch, srun=srun, fills_nodes=fills))
