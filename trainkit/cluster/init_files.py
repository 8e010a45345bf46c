"""The files that `trainkit init` writes: the profile of a cluster and a first run config for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from trainkit.cluster.limits import ResourceRequest, listed, partition_problems
from trainkit.cluster.model import Account, Cluster, Partition, Qos
from trainkit.cluster.profile import AccountProfile, NodesProfile, PartitionProfile, QosProfile
from trainkit.config.section import Section
from trainkit.config.yamlfile import Dumper
from trainkit.errors import UsageError
from trainkit.folders import FIRST_RUN, FIRST_RUN_NAME, ensure_folder, shipped_templates
from trainkit.formats import memory_text, time_text, version_text


def describe_cluster(cluster: Cluster) -> str:
    """A cluster in one line; the profile says the rest."""
    names = [
        f"{item.name}{' (default)' * item.is_default}" for item in cluster.partitions if not item.is_hidden
    ]
    return f"{cluster.name}, Slurm {version_text(cluster.slurm_version)}, with the partitions {listed(names)}"


def differences(profile: Cluster, found: Cluster) -> list[str]:
    """The sections of a profile that are out of date; sections that either side lacks are skipped."""
    is_up = {item.name: item.is_up for item in found.partitions}
    written = {item.name: replace(item, is_up=is_up.get(item.name, True)) for item in profile.partitions}
    current = {item.name: item for item in found.partitions}
    names = {**written, **current} if written and current else {}
    different = [f"partition {name}" for name in names if written.get(name) != current.get(name)]
    if None not in (profile.accounts, found.accounts) and _names(profile.accounts) != _names(found.accounts):
        different.append("accounts")
    if None not in (profile.qos, found.qos) and _names(profile.qos) != _names(found.qos):
        different.append("qos")
    return different


def _names(items: Iterable[Account] | Iterable[Qos] | None) -> set[str]:
    return {item.name for item in items or ()}


TASK_FILES = ("{}.py", "{}.yaml", "test_{}.py")
SHIPPED_TASK = "mine"


def task_texts(name: str) -> dict[str, str]:
    """The files of a new task by name: the task, its config and its test, from the shipped ones."""
    folder, class_name = shipped_templates() / "task", "".join(part.capitalize() for part in name.split("_"))
    texts = {file.format(name): (folder / file.format(SHIPPED_TASK)).read_text() for file in TASK_FILES}
    return {
        file: text.replace(SHIPPED_TASK.capitalize(), class_name).replace(SHIPPED_TASK, name)
        for file, text in texts.items()
    }


def write_new(path: Path, text: str) -> bool:
    """Write a new file; return False if the path already exists.

    Raises UsageError if it cannot be written.
    """
    try:
        ensure_folder(path.parent, parents=True)
        with path.open("x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except BaseException:
                path.unlink()  # a partial file would block the next try
                raise
    except FileExistsError:
        if path.parent.is_dir():
            return False
        raise UsageError(f"{path.parent} is a file", hint="choose another folder with --dir") from None
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror or error}",
            hint="--dir DIR sets the folder of the run config, XDG_CONFIG_HOME that of the profile",
        ) from error
    return True


COMMENT_COLUMN = 32
UNBOUNDED = 10**6


def profile_text(cluster: Cluster, today: date) -> str:
    """The profile of a cluster as YAML; `trainkit.cluster.profile` reads it back."""
    return "\n".join(_profile_lines(cluster, today)) + "\n"


def _flow(value: object) -> str:
    """A value as one line of YAML."""
    text: str = yaml.dump(
        [value], Dumper=Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=UNBOUNDED
    )
    return text.strip()[1:-1]


def _commented(line: str, comment: str) -> str:
    """A line with its comment in column `COMMENT_COLUMN`."""
    return f"{line:<{COMMENT_COLUMN - 2}}  # {comment}" if comment else line


def _profile_lines(cluster: Cluster, today: date) -> Iterator[str]:
    yield f"# Profile of the cluster {cluster.name}, written by `trainkit init` on {today}."
    yield "#"
    yield "# trainkit checks configs against this file instead of querying Slurm. Edit it where it is wrong."
    yield "# Sections that you remove are not checked; without `partitions` Slurm is queried each time."
    yield "profile_version: 1"
    yield _commented(f"name: {_flow(cluster.name)}", "ClusterName in slurm.conf")
    if cluster.slurm_version:
        yield f"slurm_version: {_flow(version_text(cluster.slurm_version))}"
    yield _commented(f"gpu_option: {cluster.gpu_option}", "how sbatch requests GPUs: gpus-per-node or gres")
    yield _commented(
        f"containers: {_flow(list(cluster.containers))}", "found here; compute nodes may have others"
    )
    yield _commented(f"modules: {_flow(cluster.has_modules)}", "whether the `module` command exists")
    if cluster.expedited_requeue is not None:
        yield "# Whether a job restarts ahead of all others when a node fails (sbatch --requeue=expedite)."
        yield "# A job that fails for another reason then stays in the queue, held, until you cancel it."
        yield f"expedited_requeue: {_flow(cluster.expedited_requeue)}"
    yield ""
    yield from _default_lines(cluster)
    yield ""
    yield from _account_lines(cluster)
    yield ""
    yield "# Times are in Slurm's format. Identical nodes share an entry; nodes out of service are included."
    yield "partitions:"
    for partition in cluster.partitions:
        yield from _partition_lines(partition)


def _default_lines(cluster: Cluster) -> Iterator[str]:
    yield "# Run config keys for every run on this cluster; your own configs and options override them."
    yield "# `trainkit check CONFIG --show-origin` shows which values come from here."
    yield "defaults:"
    yield "  launch:"
    yield _commented("    network: auto", "ib, socket, debug, or the name of an interface")
    yield _commented("    env: {}", "for every process, such as {NCCL_SOCKET_IFNAME: =ib0}")
    known = {"apptainer" if name == "singularity" else name for name in cluster.containers}
    runtimes = sorted(known & {"pyxis", "apptainer"})
    if len(runtimes) == 1:
        yield _commented(f"    container_runtime: {runtimes[0]}", "runs launch.container")
    else:
        yield _commented("    # container_runtime: pyxis", "or apptainer: runs launch.container")
    yield _commented("    # modules: [cuda]", "loaded before every run")
    yield "  # resources:"
    account = next((item.name for item in cluster.accounts or () if item.is_default), None)
    yield _commented(f"  #   account: {_flow(account or 'NAME')}", "when a config sets none")
    default = cluster.partition(None)
    yield _commented(
        f"  #   partition: {_flow(default.name if default else 'NAME')}", "when a config sets none"
    )


def _account_lines(cluster: Cluster) -> Iterator[str]:
    if cluster.accounts is None:
        yield "# Accounts are not checked: Slurm does not enforce them here, or accounting did not answer."
        yield "# accounts: {NAME: {default: true}}"
    else:
        yield "# The accounts that you may charge (other users may have others), and their QOS."
        yield "accounts:"
        for account in cluster.accounts:
            yield f"  {_flow(account.name)}: {_flow(_values(AccountProfile, account))}"
    if cluster.qos:
        yield "qos:"
        for qos in cluster.qos:
            yield f"  {_flow(qos.name)}: {_flow(_values(QosProfile, qos))}"


_TEXTS: dict[str, Callable[[int], str]] = {
    "max_time_s": time_text,
    "default_time_s": time_text,
    "mem_mib": memory_text,
}
_PARTITION_COMMENTS = {
    "hidden": "Slurm lists it only with --all",
    "default_time": "of a job with resources.time: null",
    "max_nodes": "of one job",
    "max_cpus_per_node": "that its jobs may use",
}


def _values(section: type[Section], item: object, *always: str) -> dict[str, Any]:
    """The keys of a section of the profile that are not at their defaults, or are `always` written."""
    found: dict[str, Any] = {}
    for name, info in section.model_fields.items():
        value: Any = getattr(item, name)
        if value != info.default or name in always:
            value = list(value) if isinstance(value, tuple) else value
            found[info.alias or name] = _TEXTS[name](value) if name in _TEXTS and value is not None else value
    return found


def _partition_lines(partition: Partition) -> Iterator[str]:
    yield f"  {_flow(partition.name)}:"
    for key, value in _values(PartitionProfile, partition, "max_time_s").items():
        if key != "nodes":
            comment = _PARTITION_COMMENTS.get(key, "no limit" if value is None else "")
            yield _commented(f"    {key}: {_flow(value)}", comment)
    if partition.nodes:
        yield "    nodes:"
        for kind in partition.nodes:
            known = _values(NodesProfile, kind, "count")
            if set(kind.gpus) == {""}:
                known["gpus"] = kind.gpus[""]
            yield f"      - {_flow(known)}"


FIRST_RUN_TIME_S = 1800
MIN_FIRST_RUN_TIME_S = 300
"""Partitions with a shorter limit are not chosen for the first run."""


def first_run_text(cluster: Cluster | None) -> str:
    """A run config that runs unchanged; `cluster` is None on a machine without Slurm."""
    return "\n".join(_first_run_lines(cluster)) + "\n"


def _first_run_lines(cluster: Cluster | None) -> Iterator[str]:
    partition = None if cluster is None else first_partition(cluster)
    where = "this machine" if cluster is None else f"the cluster {cluster.name}"
    yield f"# A first run on {where}: trains a small model on Python code, without downloads."
    yield "#"
    yield f"#   trainkit check {FIRST_RUN}"
    yield f"#   trainkit submit {FIRST_RUN} --follow"
    yield "#"
    yield "# `trainkit check … --show-origin` lists every key with its value."
    yield _commented("extends: quickstart.yaml", "ships with trainkit; the keys below override it")
    yield f"name: {FIRST_RUN_NAME}"
    yield ""
    yield "resources:"
    yield "  nodes: 1"
    gpus = 0 if partition is None else max((kind.num_gpus() for kind in partition.nodes), default=0)
    comment = f"all {gpus} GPUs of a node" if gpus else "one process per node without GPUs"
    yield _commented("  gpus_per_node: auto", comment)
    if cluster is None or partition is None:
        return
    others = [item.name for item in cluster.partitions if not item.is_hidden and item is not partition]
    yield _commented(f"  partition: {_flow(partition.name)}", f"also: {', '.join(others)}" if others else "")
    limit_s = partition.max_time_s
    comment = (
        "no limit in this partition" if limit_s is None else f"at most {time_text(limit_s)} in this partition"
    )
    yield _commented(
        f"  time: {_flow(time_text(min(FIRST_RUN_TIME_S, limit_s or FIRST_RUN_TIME_S)))}", comment
    )
    names = [item.name for item in cluster.accounts or ()]
    if (account := _first_account(cluster)) is not None:
        yield _commented(f"  account: {_flow(account)}", f"also: {', '.join(names[1:])}" if names[1:] else "")


def first_partition(cluster: Cluster) -> Partition | None:
    """The partition for the first run: one with GPUs if possible, preferably the default one."""
    request = ResourceRequest(nodes=1, names={}, account=_first_account(cluster))
    usable = [
        item
        for item in sorted(cluster.partitions, key=lambda item: not item.is_default)
        if item.is_up
        and not item.is_hidden
        and not (item.max_time_s is not None and item.max_time_s < MIN_FIRST_RUN_TIME_S)
        and next(partition_problems(request, cluster, item), None) is None
    ]
    with_gpus = [item for item in usable if any(kind.num_gpus() for kind in item.nodes)]
    return next(iter([*with_gpus, *usable, *cluster.partitions]), None)


def _first_account(cluster: Cluster) -> str | None:
    """The account to charge if there is no default account, else None."""
    accounts = cluster.accounts or ()
    if not accounts or any(item.is_default for item in accounts):
        return None
    return accounts[0].name
