"""The Slurm options of a job, by their long names for sbatch and srun."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainkit.config.schema import RunConfig

Value = str | int | bool
Options = dict[str, Value]

SBATCH_KEYS = {
    "time": "resources.time",
    "time-min": "resources.time_min",
    "partition": "resources.partition",
    "clusters": "resources.clusters",
    "cluster": "resources.clusters",
    "account": "resources.account",
    "qos": "resources.qos",
    "constraint": "resources.constraint",
    "exclude": "resources.exclude",
    "reservation": "resources.reservation",
    "mem": "resources.mem",
    "comment": "resources.comment",
    "mail-user": "resources.mail_user",
    "mail-type": "resources.mail_type",
    "nodes": "resources.nodes",
    "no-kill": "resources.spare_nodes",
    "ntasks-per-node": "resources.gpus_per_node",
    "ntasks": "resources.gpus_per_node",
    "gpus-per-node": "resources.gpus_per_node",
    "gres": "resources.gpus_per_node",
    "gpus": "resources.gpus_per_node",
    "gpus-per-task": "resources.gpus_per_node",
    "cpus-per-task": "resources.cpus_per_gpu",
    "job-name": "name",
    "signal": "requeue.signal",
    "requeue": "requeue.on",
    "no-requeue": "requeue.on",
    "array": "--array",
    "dependency": "--after",
}
"""sbatch options that a config key or a command option sets; they are rejected in `resources.extra`."""

_PASSED_ON = (
    *("time_min", "account", "qos", "constraint", "exclude", "reservation"),
    *("mem", "comment", "mail_user", "mail_type"),
)
"""Keys of `resources` whose values sbatch gets as they are."""

RESERVED_SBATCH_OPTIONS = (
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
"""sbatch options that trainkit sets itself."""

RESERVED_SRUN_OPTIONS = (
    *("nodes", "ntasks", "ntasks-per-node", "output", "error", "input", "kill-on-bad-exit", "wait"),
    *("chdir", "pty", "multi-prog", "label", "jobid", "overlap", "signal", "export"),
    *("nodelist", "nodefile", "exclude", "relative", "no-kill"),
)

SLURM_REQUEUE_CAUSES = ("preempted", "node_fail")
"""Causes after which Slurm itself requeues a job that has --requeue."""


@dataclass(frozen=True)
class SlurmRequest:
    """The Slurm options of one job, in reading order."""

    sbatch: Options = field(default_factory=dict)
    """sbatch options by long name; True for an option without a value."""
    srun: Options = field(default_factory=dict)
    """srun options of the step that starts the ranks."""
    version: tuple[int, ...] = ()
    """The version of Slurm; empty if unknown."""
    clusters: tuple[str, ...] = ()
    """The clusters of which any one may take the job; empty for the one here."""

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> SlurmRequest:
        """The request that `dataclasses.asdict` wrote."""
        names = (tuple(value.get(name, ())) for name in ("version", "clusters"))
        return cls(dict(value["sbatch"]), dict(value["srun"]), *names)

    def comment(self, token: str) -> str:
        """The comment of a job: the token of its submission, then the config's."""
        own = self.sbatch.get("comment")
        return f"{token} {own}" if own else token


def make_request(
    config: RunConfig,
    *,
    tasks_per_node: int,
    cpus_per_task: int | None,
    gpus_per_node: int | None,
    gpu_option: str,
    notice: str,
    expedite: bool = False,
    partition: str | None = None,
) -> SlurmRequest:
    """The Slurm options of a config.

    `gpu_option` is the option that requests GPUs on this cluster: ``gpus-per-node`` or ``gres``. `notice` is
    the signal before the time limit and its number of seconds, such as ``USR2@120``. `expedite` uses the
    expedited requeue of Slurm 25.11. `partition` is what the plan made of ``resources.partition``.
    """
    resources = config.resources
    sbatch: Options = {
        "job-name": config.name,
        "nodes": resources.most_nodes + resources.spare_nodes,
        "ntasks-per-node": tasks_per_node,
    }
    if resources.spare_nodes:
        sbatch["no-kill"] = True  # the job survives the loss of a node
    if cpus_per_task is not None:
        sbatch["cpus-per-task"] = cpus_per_task
    if gpus_per_node is not None:
        # Slurm takes several types as all of them on each node, so a list of partitions stands for them.
        kind = f"{resources.gpu_type}:" if len(resources.gpu_types) == 1 else ""
        prefix = "gpu:" if gpu_option == "gres" else ""
        sbatch[gpu_option] = f"{prefix}{kind}{gpus_per_node}"
    if resources.job_time is not None:
        sbatch["time"] = resources.job_time
    if partition is not None:
        sbatch["partition"] = partition
    for name in _PASSED_ON:
        if (value := getattr(resources, name)) is not None:
            sbatch[name.replace("_", "-")] = value
    if config.notify.mail is not None:
        # Imported here because it is slow, and jobs only read their request.
        from trainkit.config.running import MAIL_TYPES

        sbatch["mail-user"] = config.notify.mail
        sbatch["mail-type"] = ",".join(MAIL_TYPES[event] for event in config.notify.on if event in MAIL_TYPES)
    sbatch["signal"] = notice
    if any(cause in config.requeue.on for cause in SLURM_REQUEUE_CAUSES):
        sbatch["requeue"] = "expedite" if expedite else True
    else:
        sbatch["no-requeue"] = True
    sbatch |= resources.extra
    srun: Options = {
        "nodes": resources.most_nodes,
        "ntasks": resources.most_nodes * tasks_per_node,
        "ntasks-per-node": tasks_per_node,
        "kill-on-bad-exit": 0,
        "wait": 0,
        # torch meets by itself, and a cluster's default may be a plugin that its nodes do not have.
        "mpi": "none",
        **config.launch.srun_extra,
    }
    return SlurmRequest(sbatch, srun, clusters=resources.clusters)


def with_excluded(request: SlurmRequest, hosts: Sequence[str]) -> SlurmRequest:
    """The request with these hosts excluded too."""
    before = str(request.sbatch.get("exclude") or "")
    new = [host for host in hosts if host not in before.split(",")]
    exclude = ",".join([*([before] if before else []), *new])
    return replace(request, sbatch={**request.sbatch, "exclude": exclude}) if new else request


def reserved_options(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """(key, message, hint) for every extra option that another key or trainkit itself sets."""
    for option in config.resources.extra:
        key = f"resources.extra.{option}"
        if option in SBATCH_KEYS:
            yield key, "has its own key", f"use {SBATCH_KEYS[option]}"
        elif option in RESERVED_SBATCH_OPTIONS:
            yield key, "is set by trainkit", "remove it"
    for option in config.launch.srun_extra:
        if option in RESERVED_SRUN_OPTIONS:
            yield f"launch.srun_extra.{option}", "is set by trainkit", "remove it"


def option_argv(options: Options) -> list[str]:
    """Options as command-line arguments, such as ``--nodes=2``; False omits an option."""
    return [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in options.items()
        if value is not False
    ]
