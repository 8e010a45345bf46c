"""Writes the files that `trainkit init` creates: a cluster profile and a first run config."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from trainkit.cluster.limits import ResourceRequest, listed, partition_problems
from trainkit.cluster.model import Account, Cluster, NodeKind, Partition, Qos
from trainkit.cluster.profile import AccountProfile, NodesProfile, PartitionProfile, QosProfile
from trainkit.config.section import Section
from trainkit.config.yamlfile import Dumper
from trainkit.errors import UsageError
from trainkit.folders import FIRST_RUN, FIRST_RUN_NAME, ensure_folder, shipped_templates
from trainkit.formats import memory_text, time_text, version_text


def describe_cluster(cluster: Cluster) -> str:
    """Describe a cluster in one line; the cluster profile contains the details."""
    names = [
        f"{item.name}{' (default)' * item.is_default}" for item in cluster.partitions if not item.is_hidden
    ]
    return f"{cluster.name}, Slurm {version_text(cluster.slurm_version)}, with the partitions {listed(names)}"


TASK_FILES = ("{}.py", "{}.yaml", "test_{}.py")
SHIPPED_TASK = "mine"


def task_texts(name: str) -> dict[str, str]:
    """Return the text of each file in a new task (the task, its config and its test), keyed by name."""
    class_name = "".join(part.capitalize() for part in name.split("_"))
    shipped = {file: shipped_templates() / "task" / file.format(SHIPPED_TASK) for file in TASK_FILES}
    texts = {file.format(name): path.read_text(encoding="utf-8") for file, path in shipped.items()}
    return {
        file: text.replace(SHIPPED_TASK.capitalize(), class_name).replace(SHIPPED_TASK, name)
        for file, text in texts.items()
    }


def write_new(path: Path, text: str) -> bool:
    """Write a new file and return True, or return False if the path already exists.

    Raises UsageError if the file cannot be written.
    """
    try:
        ensure_folder(path.parent, parents=True)
        with path.open("x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except BaseException:
                path.unlink()  # otherwise, the next `trainkit init` would keep a partly written file
                raise
    except FileExistsError:
        if path.parent.is_dir():
            return False
        raise UsageError(
            f"{path.parent} is a file, not a folder", hint="choose another folder with --dir"
        ) from None
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror or error}",
            hint="set the folder of the run config with --dir DIR, and the folder of the profile with "
            "XDG_CONFIG_HOME",
        ) from error
    return True


COMMENT_COLUMN = 32
UNBOUNDED = 10**6
PARTITION_COMMENTS = {
    "hidden": "Slurm lists this partition only with --all",
    "exclusive": "a job gets whole nodes with all of their GPUs",
    "default_time": "default for jobs with resources.time: null",
    "min_nodes": "of one job",
    "max_nodes": "of one job",
    "max_cpus_per_node": "per node, for all jobs in the partition together",
    "needs_reservation": "jobs in this partition must set resources.reservation",
}
_TEXTS: dict[str, Callable[[int], str]] = {
    "max_time_s": time_text,
    "default_time_s": time_text,
    "mem_mib": memory_text,
    "max_mem_mib": memory_text,
    "max_mem_per_cpu_mib": memory_text,
}
_SECTIONS: dict[type, tuple[type[Section], str | None]] = {
    Account: (AccountProfile, None),
    Qos: (QosProfile, None),
    Partition: (PartitionProfile, "max_time_s"),
    NodeKind: (NodesProfile, "count"),
}
"""Maps each type to its profile section, and to the key that is written even with its default value, or None
if there is no such key."""


def profile_text(cluster: Cluster, today: date) -> str:
    """Return the profile of a cluster as YAML, in the format that `trainkit.cluster.profile` reads."""
    known = {"apptainer" if name == "singularity" else name for name in cluster.containers}
    default = cluster.partition(None)
    return _rendered(
        "profile.yaml.j2",
        cluster=cluster,
        today=today,
        runtimes=sorted(known & {"pyxis", "apptainer"}),
        account=next((item.name for item in cluster.accounts or () if item.is_default), "NAME"),
        partition=default.name if default else "NAME",
        comments=PARTITION_COMMENTS,
    )


def _rendered(template: str, **values: object) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(shipped_templates()),
        undefined=StrictUndefined,
        autoescape=False,  # The output is YAML, not HTML, and the `flow` filter quotes every value.
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(flow=_flow, version=version_text, values=_values)
    lines = (line.partition("\t# ") for line in environment.get_template(template).render(values).split("\n"))
    return "\n".join(f"{line:<{COMMENT_COLUMN - 2}}  # {text}" if text else line for line, _, text in lines)


def _flow(value: object) -> str:
    """Return a value as a single line of YAML."""
    text: str = yaml.dump(
        [value], Dumper=Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=UNBOUNDED
    )
    return text.strip()[1:-1]


def _values(item: Account | Qos | Partition | NodeKind) -> dict[str, object]:
    """Return a profile section as a dictionary, without default values and without the key `nodes`."""
    section, always = _SECTIONS[type(item)]
    found: dict[str, object] = {}
    for name, info in section.model_fields.items():
        value: Any = getattr(item, name)
        if name == "nodes" or (value == info.default and name != always):
            continue
        if name == "gpus" and set(value) == {""}:
            value = value[""]
        value = list(value) if isinstance(value, tuple) else value
        found[info.alias or name] = _TEXTS[name](value) if name in _TEXTS and value is not None else value
    return found


FIRST_RUN_TIME_S = 1800
MIN_FIRST_RUN_TIME_S = 300
"""Minimum time limit in seconds that a partition must allow to be chosen for the first run."""


def first_run_text(cluster: Cluster | None) -> str:
    """Return a run config that works without changes; `cluster` is None on a machine without Slurm."""
    partition = None if cluster is None else first_partition(cluster)
    partitions, accounts = (cluster.partitions, cluster.accounts or ()) if cluster else ((), ())
    limit_s = None if partition is None else partition.max_time_s
    return _rendered(
        "first_run.yaml.j2",
        where="this machine" if cluster is None else f"the cluster {cluster.name}",
        file=FIRST_RUN,
        name=FIRST_RUN_NAME,
        gpus=0 if partition is None else max((kind.num_gpus() for kind in partition.nodes), default=0),
        partition=partition,
        others=[item.name for item in partitions if not item.is_hidden and item is not partition],
        time=time_text(min(FIRST_RUN_TIME_S, limit_s or FIRST_RUN_TIME_S)),
        limit=None if limit_s is None else time_text(limit_s),
        account=None if cluster is None or partition is None else _first_account(cluster),
        accounts=[item.name for item in accounts[1:]],
    )


def first_partition(cluster: Cluster) -> Partition | None:
    """Return the partition for the first run: preferably one with GPUs, and then the default partition."""
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
    """Return the account to charge if Slurm has no default account for the user, or None otherwise."""
    accounts = cluster.accounts or ()
    if not accounts or any(item.is_default for item in accounts):
        return None
    return accounts[0].name
