"""Queries Slurm for a cluster's partitions, nodes, accounts and QOS, and returns a `cluster.model.Cluster`.

`query_cluster` is fast and runs before each submission; `discover_cluster` also queries everything else that
a profile can contain.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal

from trainkit.cluster.model import (
    SUBACCOUNTS_SINCE,
    Account,
    Cluster,
    NodeKind,
    Partition,
    PartitionLimit,
    Qos,
)
from trainkit.errors import TrainkitError
from trainkit.folders import user_groups, user_name
from trainkit.slurm.client import QUERY_TIMEOUT_S, query, retrying, seconds_of
from trainkit.slurm.control import has_expedited_requeue, parse_config, parse_version
from trainkit.slurm.environment import finds_cluster

CLUSTER_TIMEOUT_S = 10.0
"""Timeout in seconds for queries to the controller; shorter than sbatch's timeout, so that an unreachable
controller is reported sooner."""
ACCOUNTING_TIMEOUT_S = 10.0
LOCAL_TIMEOUT_S = 10.0
CONFIG_ARGV = ("scontrol", "show", "config")
# --all also lists hidden partitions, which jobs can use. --local omits the other clusters of a federation,
# because a job of this cluster does not run on their nodes.
PARTITIONS_ARGV = ("scontrol", "show", "partition", "--oneliner", "--all", "--local")
NODES_ARGV = ("scontrol", "show", "node", "--oneliner", "--all", "--local")
_QOS_ARGV = ("sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=Name,MaxWall,Flags")
_ACCOUNTS_ARGV = ("sacctmgr", "--noheader", "--parsable2", "show", "user", "withassoc", "where")
_OVERRIDES: dict[PartitionLimit, str] = {
    "time": "PartitionTimeLimit",
    "nodes": "PartitionMaxNodes",
    "min_nodes": "PartitionMinNodes",
}
"""Maps each partition limit to the QOS flag that overrides it."""
_ACCOUNT_FIELDS = ("DefaultAccount", "Account", "Partition", "QOS")

ENFORCE = "AccountingStorageEnforce"

_PAIR = re.compile(r"(?P<name>\w+)=(?P<value>\S*)")
_ID = re.compile(r"\(\d+\)$")
_SOCKETS = re.compile(r"\(\w+:[^)]*\)")
"""Matches the sockets or indices in a resource, such as `(S:0,1)`, which may contain commas."""
_COUNT = re.compile(r"(\d+)([kmgtp]?)", re.ASCII | re.IGNORECASE)
_GPU_OPTIONS_PLUGIN = "cons_tres"
"""The only SelectType that supports --gpus-per-node; all other types need --gres."""
_MODULE_VARIABLES = ("MODULESHOME", "LMOD_CMD", "BASH_FUNC_module%%")
_MODULE_FILES = (Path("/etc/profile.d/lmod.sh"), Path("/etc/profile.d/modules.sh"))
_CONTAINER_PROGRAMS = ("apptainer", "singularity", "enroot")
_AMOUNTS = ("CPUTot", "CPUEfctv", "CoreSpecCount", "ThreadsPerCore", "RealMemory", "MemSpecLimit")
_NODE_PAIR = re.compile(rf"\b({'|'.join(_AMOUNTS)}|AvailableFeatures|Gres|Partitions)=(\S*)")


def has_slurm() -> bool:
    """Return whether this machine belongs to a cluster: sbatch is installed and finds a Slurm configuration.

    Also returns True if the controller is down or if it is unclear whether there is a configuration. Runs one
    Slurm command, which does not contact the controller.
    """
    return shutil.which("sbatch") is not None and finds_cluster() is not False


def query_cluster(name: str = "", *, with_accounts: bool = False) -> Cluster:
    """Query the controller about a cluster, with up to four commands in parallel.

    The cluster defaults to this machine's cluster. The result includes accounts and QOS only if
    `with_accounts` is set. Only the accounting database knows which QOS an account may use and which limits a
    QOS overrides (see `query_qos`). Raises SlurmUnreachable if the controller does not answer within
    `CLUSTER_TIMEOUT_S`.
    """
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(_query_associations, name) if with_accounts else None
        config, cluster = _ask_controller(CLUSTER_TIMEOUT_S, name)
    if asked is None:
        return cluster
    accounts, qos = asked.result()
    return replace(_with_accounts(cluster, config, accounts), qos=qos or None)


def _query_associations(cluster: str = "") -> tuple[tuple[Account, ...], tuple[Qos, ...]]:
    """Return the user's accounts and all QOS that the controller knows; empty if it does not answer."""
    user = user_name()
    argv = ("scontrol", "--oneliner", "show", "assoc_mgr", f"users={user}", "flags=assoc,qos")
    return parse_assoc_mgr(_try(argv, CLUSTER_TIMEOUT_S, cluster) or "", user)


def _ask_controller(timeout_s: float, name: str = "") -> tuple[dict[str, str], Cluster]:
    """Query a cluster's settings, partitions and nodes, but not its accounts and QOS."""
    commands = (CONFIG_ARGV, PARTITIONS_ARGV, NODES_ARGV)
    with ThreadPoolExecutor(len(commands)) as threads:
        settings, partitions, nodes = threads.map(lambda argv: _ask(argv, timeout_s, name), commands)
    config = parse_config(settings)
    cluster = Cluster(
        name=config.get("ClusterName", ""),
        partitions=tuple(parse_partitions(partitions, parse_nodes(nodes))),
        gpu_option=gpu_option(config),
        slurm_version=parse_version(config["SLURM_VERSION"]),
        groups=user_groups(),
    )
    return config, cluster


def _ask(argv: Sequence[str], timeout_s: float, cluster: str = "") -> str:
    return query(argv, timeout_s=timeout_s, patience_s=0.0, cluster=cluster)


def _try(argv: Sequence[str], timeout_s: float, cluster: str = "") -> str | None:
    """Return the output of a query that some sites do not support, or None if the query fails."""
    try:
        return _ask(argv, timeout_s, cluster)
    except TrainkitError:
        return None


def query_cluster_names() -> list[str]:
    """Return the names of the clusters that Slurm commands can address, as accounting lists them.

    Raises SlurmRefused if the site has no slurmdbd, and SlurmUnreachable if Slurm does not answer.
    """
    argv = ["sacctmgr", "--noheader", "--parsable2", "show", "clusters", "format=Cluster"]
    return _ask(argv, ACCOUNTING_TIMEOUT_S).split()


def discover_cluster() -> Cluster | None:
    """Describe this machine's cluster using Slurm, accounting and PATH, or return None if Slurm is missing.

    The default partition is listed first. Raises SlurmUnreachable if Slurm does not answer.
    """
    if not has_slurm():
        return None
    config, cluster = retrying(lambda: _ask_controller(QUERY_TIMEOUT_S))
    accounts = _query_accounts(config)
    if accounts:
        above = {item.name: item.parents for item in _query_associations()[0]}
        accounts = tuple(replace(item, parents=above.get(item.name)) for item in accounts)
    has_modules = any(name in os.environ for name in _MODULE_VARIABLES) or any(
        map(Path.exists, _MODULE_FILES)
    )
    return replace(
        _with_accounts(cluster, config, accounts),
        partitions=tuple(sorted(cluster.partitions, key=lambda partition: not partition.is_default)),
        qos=None if accounts is None else query_qos(),
        containers=(
            *(["pyxis"] if "--container-image" in (_try(("srun", "--help"), LOCAL_TIMEOUT_S) or "") else []),
            *(name for name in _CONTAINER_PROGRAMS if shutil.which(name)),
        ),
        has_modules=has_modules,
        expedited_requeue=False if has_expedited_requeue(cluster.slurm_version, config) else None,
    )


def _enforced(config: Mapping[str, str], accounts: Iterable[Account] | None) -> tuple[Account, ...] | None:
    """Merge Slurm's entries, one per account and partition, into one per account.

    Returns None if Slurm checks no accounts.
    """
    merged: dict[str, Account] = {}
    for account in accounts or ():
        known = merged.get(account.name, account)
        merged[account.name] = Account(
            account.name,
            account.is_default or known.is_default,
            _union(known.partitions, account.partitions),
            _union(known.qos, account.qos),
            known.parents,
        )
    is_checked = "associations" in config.get(ENFORCE, "")
    return tuple(merged.values()) if merged and is_checked else None


def _with_accounts(
    cluster: Cluster, config: Mapping[str, str], accounts: Iterable[Account] | None
) -> Cluster:
    """Return the cluster with `accounts`.

    If Slurm does not check accounts, the partitions accept any account.
    """
    known = _enforced(config, accounts)
    partitions = cluster.partitions
    # If the setting is missing, it is unknown whether Slurm checks accounts.
    is_compared = known or cluster.slurm_version < SUBACCOUNTS_SINCE or ENFORCE not in config
    if not is_compared:
        partitions = tuple(replace(item, allowed_accounts=None, denied_accounts=()) for item in partitions)
    return replace(cluster, accounts=known, partitions=partitions)


def _union(one: tuple[str, ...] | None, other: tuple[str, ...] | None) -> tuple[str, ...] | None:
    return None if one is None or other is None else tuple(dict.fromkeys((*one, *other)))


def gpu_option(config: Mapping[str, str]) -> Literal["gpus-per-node", "gres"]:
    """Return the sbatch option that requests GPUs. `config` is the output of `scontrol show config`."""
    plugin = config.get("SelectType", _GPU_OPTIONS_PLUGIN)
    return "gpus-per-node" if _GPU_OPTIONS_PLUGIN in plugin else "gres"


def parse_partitions(text: str, kinds: Mapping[str, tuple[NodeKind, ...]]) -> list[Partition]:
    """Parse `scontrol show partition --oneliner`. `kinds` maps partition names to their nodes."""
    return [
        _partition(_pairs(line), kinds) for line in text.splitlines() if line.startswith("PartitionName=")
    ]


def _pairs(line: str) -> dict[str, str]:
    """Return the `Name=value` pairs in a line; if a name is repeated, use its first value."""
    return {match["name"]: match["value"] for match in reversed(list(_PAIR.finditer(line)))}


def _partition(values: Mapping[str, str], kinds: Mapping[str, tuple[NodeKind, ...]]) -> Partition:
    name = values["PartitionName"]
    return Partition(
        name=name,
        is_default=values.get("Default") == "YES",
        is_hidden=values.get("Hidden") == "YES",
        is_exclusive=values.get("OverSubscribe") == "EXCLUSIVE",
        is_up=values.get("State", "UP") == "UP",
        max_time_s=seconds_of(values.get("MaxTime", "")),
        default_time_s=seconds_of(values.get("DefaultTime", "")),
        min_nodes=_at_least_2(values.get("MinNodes", "")),
        max_nodes=_number(values.get("MaxNodes", "")),
        max_cpus_per_node=_number(values.get("MaxCPUsPerNode", "")),
        max_mem_mib=_number(values.get("MaxMemPerNode", "")),
        max_mem_per_cpu_mib=_number(values.get("MaxMemPerCPU", "")),
        nodes=kinds.get(name, ()),
        allowed_qos=_names(values.get("AllowQos", "ALL")),
        denied_qos=_names(values.get("DenyQos", "")) or (),
        allowed_accounts=_names(values.get("AllowAccounts", "ALL")),
        denied_accounts=_names(values.get("DenyAccounts", "")) or (),
        allowed_groups=("root",)
        if values.get("RootOnly") == "YES"
        else _names(values.get("AllowGroups", "ALL")),
        needs_reservation=values.get("ReqResv") == "YES",
    )


def _at_least_2(text: str) -> int | None:
    """Parse a minimum number of nodes; return None for a minimum of 1, which is no limit."""
    return number if (number := _number(text)) is not None and number > 1 else None


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _names(text: str) -> tuple[str, ...] | None:
    return None if text in ("ALL", "(null)") else tuple(name for name in text.split(",") if name)


def parse_nodes(text: str) -> dict[str, tuple[NodeKind, ...]]:
    """Parse `scontrol show node --oneliner`; return the nodes in each partition, grouped by kind.

    For each node, only CPUs and memory that jobs can use are included.
    """
    found: dict[str, Counter[tuple[int | None, int | None, str, str]]] = {}
    # There may be ten thousand nodes but only a few distinct kinds, so parse each distinct line only once.
    for pairs, count in Counter(tuple(_NODE_PAIR.findall(line)) for line in text.splitlines()).items():
        values = dict(reversed(pairs))  # use the first value of a repeated name, because free text may follow
        amounts = {key: _number(values.get(key, "")) or 0 for key in _AMOUNTS}
        # Do not rely on CPUEfctv alone: Slurm before 22.05 does not report it, and it can be too large after
        # Slurm was restarted with changed settings.
        cpus = amounts["CPUTot"] - amounts["CoreSpecCount"] * (amounts["ThreadsPerCore"] or 1)
        cpus = min(cpus, amounts["CPUEfctv"] or cpus)
        mem_mib = amounts["RealMemory"] - amounts["MemSpecLimit"]
        features = values.get("AvailableFeatures", "").replace("(null)", "")
        node = max(cpus, 0) or None, max(mem_mib, 0) or None, values.get("Gres", ""), features
        for partition in filter(None, values.get("Partitions", "").split(",")):
            found.setdefault(partition, Counter())[node] += count
    return {
        partition: tuple(
            NodeKind(count, cpus, mem_mib, parse_gpus(gres), tuple(filter(None, features.split(","))))
            for (cpus, mem_mib, gres, features), count in nodes.items()
        )
        for partition, nodes in found.items()
    }


def parse_gpus(gres: str) -> dict[str, int]:
    """Return the number of GPUs per type in a GRES text such as `gpu:a100:4(S:0-1),gpu:2,nvme:1`.

    In a TRES text such as `cpu=64,gres/gpu=4,gres/gpu:a100=3`, the entry without a type is the total number
    of GPUs.
    """
    gpus: dict[str, int] = {}
    typed = 0
    for resource in _SOCKETS.sub("", gres).split(","):
        tres, amount, number = resource.strip().removeprefix("gres/").partition("=")
        name, *fields = tres.split(":")
        if name != "gpu":
            continue
        fields = [field for field in [*fields, number] if field not in ("", "no_consume", "(null)")]
        counted = _COUNT.fullmatch(fields[-1]) if fields else None
        count = 1  # The default count in Slurm is 1.
        if counted is not None:
            count = int(counted[1]) * 1024 ** " kmgtp".index(counted[2].lower() or " ")
            fields.pop()
        gpu_type = fields[0] if fields else ""
        gpus[gpu_type] = gpus.get(gpu_type, 0) + count
        typed += count if amount and gpu_type else 0
    if typed and "" in gpus:
        gpus[""] -= typed
    return {gpu_type: count for gpu_type, count in gpus.items() if count}


def _query_accounts(config: Mapping[str, str]) -> tuple[Account, ...] | None:
    if "slurmdbd" not in config.get("AccountingStorageType", ""):
        return None
    argv = [*_ACCOUNTS_ARGV, f"name={user_name()}", f"format={','.join(_ACCOUNT_FIELDS)}"]
    answer = _try(argv, ACCOUNTING_TIMEOUT_S)
    return None if answer is None else parse_accounts(answer)


def parse_accounts(text: str) -> tuple[Account, ...]:
    """Parse a user's associations in sacctmgr's format `default account|account|partition|qos,qos`."""
    return tuple(
        Account(
            account,
            is_default=account == default,
            partitions=(partition,) if partition else None,
            qos=tuple(filter(None, qos.split(","))),
        )
        for default, account, partition, qos in _rows(text, len(_ACCOUNT_FIELDS))
    )


def parse_assoc_mgr(text: str, user: str) -> tuple[tuple[Account, ...], tuple[Qos, ...]]:
    """Parse the user's associations and all QOS from `scontrol --oneliner show assoc_mgr`."""
    accounts, qos, parents = list[Account](), list[Qos](), dict[str, str]()
    for line in text.splitlines():
        values = {name: _ID.sub("", value) for name, value in _pairs(line).items()}
        if line.startswith("ClusterName=") and values.get("UserName") == user:
            partition = values["Partition"]
            is_default = values.get("DefAssoc") == "Yes"
            accounts.append(Account(values["Account"], is_default, (partition,) if partition else None))
        elif line.startswith("ClusterName=") and values.get("UserName") == "":
            parents[values["Account"]] = values.get("ParentAccount", "")
        elif line.startswith("QOS="):
            minutes = _number(values.get("MaxWallPJ", ""))
            limit_s = None if minutes is None else 60 * minutes
            qos.append(Qos(values["QOS"], limit_s, overrides=None))
    return tuple(replace(item, parents=_above(item.name, parents)) for item in accounts), tuple(qos)


def _above(account: str, parents: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return all ancestors of an account, or None if Slurm hides one of them (PrivateData=usage)."""
    found: list[str] = []
    while account in parents and account not in found[:-1]:
        account = parents[account]
        if not account:
            return tuple(found)
        found.append(account)
    return None


def query_qos() -> tuple[Qos, ...] | None:
    """Query all QOS and the limits they override; return None if accounting does not answer.

    Accounting takes several tenths of a second to answer, longer than the controller.
    """
    answer = _try(_QOS_ARGV, ACCOUNTING_TIMEOUT_S)
    return None if answer is None else parse_qos(answer)


def parse_qos(text: str) -> tuple[Qos, ...]:
    """Parse QOS in sacctmgr's format `name|1-00:00:00|flag,flag`."""
    return tuple(
        Qos(
            name,
            seconds_of(limit),
            tuple(key for key, flag in _OVERRIDES.items() if flag in flags.split(",")),
        )
        for name, limit, flags in _rows(text, 3)
    )


def _rows(text: str, length: int) -> list[list[str]]:
    """Return the fields of each line in sacctmgr's output."""
    return [row for line in text.splitlines() if len(row := line.split("|")) == length]
