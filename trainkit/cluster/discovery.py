"""What a submission has to know of the cluster, asked all at once: it takes as long as the slowest answer."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainkit.errors import TrainkitError
from trainkit.slurm.client import (
    FIELD,
    QUERY_TIMEOUT_S,
    RECORD,
    SlurmUnreachable,
    plain_environ,
    query,
    records,
    run_slurm,
    seconds_of,
)
from trainkit.slurm.control import Version, parse_config, parse_version, show_config
from trainkit.slurm.hosts import first_host

MAX_KINDS = 32
"""Of a partition: of so many the usable CPUs and memory are asked for."""
_NODE_FIELDS = ("%R", "%D", "%c", "%m", "%T", "%N", "%G", "%f")
# With --all: a partition that Slurm does not list can still be named by a job.
NODES_ARGV = ("sinfo", "--all", "--noheader", "--exact", f"--format={FIELD.join(_NODE_FIELDS)}{RECORD}")
PARTITIONS_ARGV = ("scontrol", "show", "partition", "--oneliner", "--all")
_TOKEN = re.compile(r"(?P<name>\w+)=(?P<value>\S*)")
_GPU = re.compile(r"(?:^|,)gpu(?::(?P<type>[^:()]+))?(?::no_consume)?:(?P<count>\d+)(?:\([^)]*\))?")
_OUT_OF_SERVICE = re.compile(r"down|drain|fail|maint|unk|power(?:ed_down|ing_down)|reboot", re.IGNORECASE)
_MODULE_SIGNS = ("MODULESHOME", "LMOD_CMD", "BASH_FUNC_module%%")
_MODULE_FILES = (Path("/etc/profile.d/lmod.sh"), Path("/etc/profile.d/modules.sh"))
_CONTAINER_PROGRAMS = ("apptainer", "singularity", "enroot")
_USABLE = ("CPUTot", "CPUEfctv", "CoreSpecCount", "ThreadsPerCore", "RealMemory", "MemSpecLimit")
_ASSOCIATION_FIELDS = "DefaultAccount,Account,Partition,QOS,DefaultQOS"
_ACCOUNTING_TIMEOUT_S = 10.0
_LOCAL_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class NodeType:
    """Nodes of a partition that are alike."""

    count: int
    in_service: int
    """How many of them can run jobs now or later, because they are not down or drained."""
    cpus: int
    """That jobs can have: without those that Slurm keeps for itself, where that was asked."""
    memory_mib: int
    """As for CPUs."""
    gpus: dict[str, int]
    """How many GPUs a node has, by type; the type is empty where the site names none."""
    features: tuple[str, ...]
    hosts: str
    """As a host list."""

    @property
    def num_gpus(self) -> int:
        """GPUs of all types a node."""
        return sum(self.gpus.values())


@dataclass(frozen=True)
class Partition:
    """What a partition allows. None means without limit, or for everybody."""

    name: str
    is_default: bool
    is_up: bool
    max_time_s: int | None
    default_time_s: int | None
    """The time limit of a job that asks for none; None where that is `max_time_s`."""
    max_nodes: int | None
    num_nodes: int
    allowed_accounts: tuple[str, ...] | None
    allowed_qos: tuple[str, ...] | None
    allowed_groups: tuple[str, ...] | None
    denied_accounts: tuple[str, ...]
    denied_qos: tuple[str, ...]
    preempt_mode: str
    """OFF, REQUEUE, CANCEL, SUSPEND, …: what happens to its jobs when others need the nodes."""
    grace_s: int
    """How long a job has after it is told that it is preempted."""
    node_types: tuple[NodeType, ...] = ()
    is_hidden: bool = False
    max_cpus_per_node: int | None = None
    """Most CPUs of a node that its jobs may use."""

    @property
    def max_gpus_per_node(self) -> int:
        """The GPUs of its largest nodes."""
        return max((kind.num_gpus for kind in self.node_types), default=0)


@dataclass(frozen=True)
class Association:
    """An account that this user may charge, and with what."""

    account: str
    is_default: bool
    partition: str
    """Empty for any partition."""
    qos: tuple[str, ...]
    default_qos: str


@dataclass(frozen=True)
class ClusterFacts:
    """What was found out about a cluster."""

    name: str
    version: Version
    """Of the controller."""
    max_array_size: int
    requeues_by_default: bool
    partitions: tuple[Partition, ...]
    """The default one first, then in Slurm's order."""
    associations: tuple[Association, ...] | None
    """None where there is no accounting or it does not answer."""
    has_pyxis: bool
    containers: tuple[str, ...]
    """Which of apptainer, singularity and enroot are on PATH here; compute nodes may have others."""
    has_modules: bool
    config: dict[str, str] = field(repr=False)
    """`scontrol show config` in full."""

    def partition(self, name: str | None) -> Partition | None:
        """The partition of this name, or the default one; None when there is none."""
        for partition in self.partitions:
            if partition.name == name or (name is None and partition.is_default):
                return partition
        return None


def has_slurm(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this machine belongs to a cluster: sbatch is there and finds a configuration.

    A cluster whose controller is away is one. Takes one local command.
    """
    path = None if environ is None else environ.get("PATH")
    if shutil.which("sbatch", path=path) is None:
        return False
    try:
        run_slurm(["sbatch", "--version"], _LOCAL_TIMEOUT_S, environ=environ)
    except SlurmUnreachable as error:
        # Without a file Slurm looks for its controller in the DNS, and here it found none there either.
        return bool(error.stderr) and "DNS SRV lookup failed" not in error.stderr
    return True


def cluster_facts(environ: Mapping[str, str] | None = None, user: str | None = None) -> ClusterFacts:
    """Asks Slurm's controller four times, accounting once and srun's help once; raises SlurmUnreachable."""
    environ = os.environ if environ is None else environ
    config = show_config(environ)
    nodes = query(NODES_ARGV, environ=environ).stdout
    listing = query(PARTITIONS_ARGV, environ=environ).stdout
    node_types = with_usable(parse_node_types(nodes), environ, QUERY_TIMEOUT_S)
    partitions = parse_partitions(listing, node_types)
    return ClusterFacts(
        name=config.get("ClusterName", ""),
        version=parse_version(config["SLURM_VERSION"]),
        max_array_size=int(config.get("MaxArraySize", "1001")),
        requeues_by_default=config.get("JobRequeue", "1") == "1",
        partitions=tuple(sorted(partitions, key=lambda partition: not partition.is_default)),
        associations=_associations(config, environ, user),
        has_pyxis=_has_pyxis(environ),
        containers=tuple(
            name for name in _CONTAINER_PROGRAMS if shutil.which(name, path=environ.get("PATH", os.defpath))
        ),
        has_modules=any(name in environ for name in _MODULE_SIGNS) or any(map(Path.exists, _MODULE_FILES)),
        config=config,
    )


def parse_partitions(text: str, node_types: Mapping[str, tuple[NodeType, ...]]) -> list[Partition]:
    """The lines of `scontrol show partition --oneliner`."""
    return [
        _partition({match["name"]: match["value"] for match in _TOKEN.finditer(line)}, node_types)
        for line in text.splitlines()
        if line.startswith("PartitionName=")
    ]


def _partition(values: Mapping[str, str], node_types: Mapping[str, tuple[NodeType, ...]]) -> Partition:
    name = values["PartitionName"]
    return Partition(
        name=name,
        is_default=values.get("Default") == "YES",
        is_up=values.get("State", "UP") == "UP",
        max_time_s=seconds_of(values.get("MaxTime", "")),
        default_time_s=seconds_of(values.get("DefaultTime", "")),
        max_nodes=_number(values.get("MaxNodes", "")),
        num_nodes=_number(values.get("TotalNodes", "")) or 0,
        allowed_accounts=_names(values.get("AllowAccounts", "ALL")),
        allowed_qos=_names(values.get("AllowQos", "ALL")),
        allowed_groups=_names(values.get("AllowGroups", "ALL")),
        denied_accounts=_names(values.get("DenyAccounts", "")) or (),
        denied_qos=_names(values.get("DenyQos", "")) or (),
        preempt_mode=values.get("PreemptMode", "OFF"),
        grace_s=_number(values.get("GraceTime", "")) or 0,
        node_types=node_types.get(name, ()),
        is_hidden=values.get("Hidden") == "YES",
        max_cpus_per_node=_number(values.get("MaxCPUsPerNode", "")),
    )


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _names(text: str) -> tuple[str, ...] | None:
    return None if text in ("ALL", "(null)") else tuple(name for name in text.split(",") if name)


def parse_node_types(text: str) -> dict[str, tuple[NodeType, ...]]:
    """What sinfo printed, by partition; nodes that differ only in their state are counted together."""
    merged: dict[str, dict[tuple[object, ...], NodeType]] = {}
    for partition, count, cpus, memory, state, hosts, gres, features in records(text, len(_NODE_FIELDS)):
        kinds = merged.setdefault(partition, {})
        key = (cpus, memory, gres, features)
        before = kinds.get(key)
        kinds[key] = NodeType(
            count=int(count) + (before.count if before else 0),
            in_service=(0 if _OUT_OF_SERVICE.search(state) else int(count))
            + (before.in_service if before else 0),
            cpus=_number(cpus.rstrip("+")) or 0,
            memory_mib=_number(memory.rstrip("+")) or 0,
            gpus=parse_gpus(gres),
            features=() if features == "(null)" else tuple(features.split(",")),
            hosts=f"{before.hosts},{hosts}" if before else hosts,
        )
    return {partition: tuple(kinds.values()) for partition, kinds in merged.items()}


def with_usable(
    node_types: Mapping[str, tuple[NodeType, ...]], environ: Mapping[str, str], timeout_s: float
) -> dict[str, tuple[NodeType, ...]]:
    """The nodes with the CPUs and the memory that jobs can have, of which sinfo does not tell.

    One node of each kind is asked about. Where Slurm does not say, everything counts as usable.
    """
    hosts = {
        _hardware(kind): first_host(kind.hosts)
        for kinds in node_types.values()
        for kind in kinds[:MAX_KINDS]
        if kind.hosts
    }
    if not hosts:
        return dict(node_types)
    argv = ["scontrol", "--oneliner", "show", "node", ",".join(dict.fromkeys(hosts.values()))]
    try:
        usable = parse_usable(run_slurm(argv, timeout_s, environ=plain_environ(environ)))
    except TrainkitError:
        return dict(node_types)
    return {
        name: tuple(
            replace(kind, cpus=found[0], memory_mib=found[1])
            if (found := usable.get(hosts.get(_hardware(kind), "")))
            else kind
            for kind in kinds
        )
        for name, kinds in node_types.items()
    }


def _hardware(kind: NodeType) -> tuple[object, ...]:
    return kind.cpus, kind.memory_mib, *sorted(kind.gpus.items())


def parse_usable(text: str) -> dict[str, tuple[int, int]]:
    """(CPUs, MiB) that jobs can have of each node in what `scontrol --oneliner show node` prints."""
    usable = {}
    for line in text.splitlines():
        values = {match["name"]: match["value"] for match in _TOKEN.finditer(line)}
        numbers = {key: _number(values.get(key, "")) or 0 for key in _USABLE}
        # Before 22.05 CPUEfctv is not told, and after a restart with other settings it can be too large.
        cpus = numbers["CPUTot"] - numbers["CoreSpecCount"] * (numbers["ThreadsPerCore"] or 1)
        cpus = min(cpus, numbers["CPUEfctv"] or cpus)
        memory = numbers["RealMemory"] - numbers["MemSpecLimit"]
        if cpus > 0 and memory > 0 and "NodeName" in values:
            usable[values["NodeName"]] = cpus, memory
    return usable


def parse_gpus(gres: str) -> dict[str, int]:
    """The GPUs in `gpu:a100:4(S:0-1),gpu:2,nvme:1`, by type."""
    gpus: dict[str, int] = {}
    for match in _GPU.finditer(gres):
        kind = match["type"] or ""
        gpus[kind] = gpus.get(kind, 0) + int(match["count"])
    return gpus


def _associations(
    config: Mapping[str, str], environ: Mapping[str, str], user: str | None
) -> tuple[Association, ...] | None:
    if "slurmdbd" not in config.get("AccountingStorageType", ""):
        return None
    argv = ["sacctmgr", "--noheader", "--parsable2", "show", "user", "withassoc", "where"]
    argv += [f"name={user or getpass.getuser()}", f"format={_ASSOCIATION_FIELDS}"]
    try:
        return parse_associations(run_slurm(argv, _ACCOUNTING_TIMEOUT_S, environ=plain_environ(environ)))
    except TrainkitError:
        return None


def parse_associations(text: str) -> tuple[Association, ...]:
    """The lines of sacctmgr, `default account|account|partition|qos,qos|default qos`."""
    rows = [line.split("|") for line in text.splitlines()]
    return tuple(
        Association(account, account == default, partition, tuple(filter(None, qos.split(","))), default_qos)
        for default, account, partition, qos, default_qos in (row for row in rows if len(row) == 5)
    )


def _has_pyxis(environ: Mapping[str, str]) -> bool:
    try:
        return "--container-image" in run_slurm(["srun", "--help"], _LOCAL_TIMEOUT_S, environ=environ)
    except TrainkitError:
        return False


GLANCE_TIMEOUT_S = 10.0
"""A controller that is away is told by its silence; sbatch, which comes next, is asked for longer."""
_CONFIG_ARGV = ("scontrol", "show", "config")
_WORD = re.compile(r"(?P<name>\w+)=(?P<value>\S*)")
_ID = re.compile(r"\(\d+\)$")


@dataclass(frozen=True)
class QosLimit:
    """A quality of service, as far as the controller tells everybody."""

    name: str
    max_time_s: int | None


@dataclass(frozen=True)
class ClusterAnswers:
    """What Slurm's controller tells at once."""

    name: str
    version: Version
    config: dict[str, str]
    partitions: tuple[Partition, ...]
    associations: tuple[Association, ...] | None = None
    """None when not asked for, not enforced or not told. Which QOS they have is not told."""
    qos: tuple[QosLimit, ...] | None = None
    """All that there are; None when not asked for or not told."""


def query_cluster(
    environ: Mapping[str, str] | None = None,
    *,
    with_accounts: bool = False,
    user: str | None = None,
    timeout_s: float = GLANCE_TIMEOUT_S,
) -> ClusterAnswers:
    """Asks Slurm's controller three or four things side by side, each once, and then of a node of each kind.

    Raises SlurmUnreachable after `timeout_s`.
    """
    user = user or getpass.getuser()
    questions: list[Sequence[str]] = [_CONFIG_ARGV, PARTITIONS_ARGV, NODES_ARGV]
    if with_accounts:
        questions.append(["scontrol", "--oneliner", "show", "assoc_mgr", f"users={user}", "flags=assoc,qos"])
    environ = plain_environ(os.environ if environ is None else environ)
    answers = _ask_all(questions, environ, timeout_s)
    for answer in answers[:3]:
        if isinstance(answer, TrainkitError):
            raise answer
    settings, partitions, nodes = map(str, answers[:3])
    config = parse_config(settings)
    accounts = answers[3] if with_accounts else None
    associations, qos = parse_assoc_mgr(accounts, user) if isinstance(accounts, str) else ((), ())
    node_types = with_usable(parse_node_types(nodes), environ, timeout_s)
    is_enforced = "associations" in config.get("AccountingStorageEnforce", "")
    return ClusterAnswers(
        name=config.get("ClusterName", ""),
        version=parse_version(config["SLURM_VERSION"]),
        config=config,
        partitions=tuple(parse_partitions(partitions, node_types)),
        associations=associations if associations and is_enforced else None,
        qos=qos or None,
    )


def _ask_all(
    questions: Sequence[Sequence[str]], environ: Mapping[str, str], timeout_s: float
) -> list[str | TrainkitError]:
    """The answers, or what went wrong, in the order of the questions."""
    answers: list[str | TrainkitError] = [""] * len(questions)

    def ask(index: int) -> None:
        try:
            answers[index] = run_slurm(questions[index], timeout_s, environ=environ)
        except TrainkitError as error:
            answers[index] = error

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(questions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def parse_assoc_mgr(text: str, user: str) -> tuple[tuple[Association, ...], tuple[QosLimit, ...]]:
    """The user's associations and all QOS in what `scontrol --oneliner show assoc_mgr` prints."""
    associations, qos = [], []
    for line in text.splitlines():
        values = {match["name"]: match["value"] for match in reversed(list(_WORD.finditer(line)))}
        if line.startswith("ClusterName=") and _ID.sub("", values.get("UserName", "")) == user:
            is_default = values.get("DefAssoc") == "Yes"
            associations.append(Association(values["Account"], is_default, values["Partition"], (), ""))
        elif line.startswith("QOS="):
            minutes = values.get("MaxWallPJ", "")
            limit_s = 60 * int(minutes) if minutes.isdigit() else None
            qos.append(QosLimit(_ID.sub("", values["QOS"]), limit_s))
    return tuple(associations), tuple(qos)


QOS_TIMEOUT_S = 10.0
_ARGV = ("sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=Name,MaxWall,Flags")


@dataclass(frozen=True)
class QosFacts:
    """A quality of service."""

    name: str
    max_time_s: int | None
    flags: tuple[str, ...]

    @property
    def lifts_time(self) -> bool:
        """Whether its jobs may be longer than their partition allows."""
        return "PartitionTimeLimit" in self.flags

    @property
    def lifts_nodes(self) -> bool:
        """Whether its jobs may have more nodes than their partition allows one job."""
        return "PartitionMaxNodes" in self.flags


def query_qos(environ: Mapping[str, str]) -> tuple[QosFacts, ...] | None:
    """All there are; None without accounting, or when it does not answer. Takes some tenths of a second."""
    try:
        return parse_qos(run_slurm(_ARGV, QOS_TIMEOUT_S, environ=plain_environ(environ)))
    except TrainkitError:
        return None


def parse_qos(text: str) -> tuple[QosFacts, ...]:
    """The lines of sacctmgr, `name|1-00:00:00|flag,flag`."""
    rows = [line.split("|") for line in text.splitlines()]
    return tuple(
        QosFacts(name, seconds_of(limit), tuple(filter(None, flags.split(","))))
        for name, limit, flags in (row for row in rows if len(row) == 3)
    )
