"""The cluster of a config: its profile, whose file format is here, or what Slurm answers.

A profile is a file `clusters/NAME.yaml` in the current folder or in the user's config folder.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, JsonValue, ValidationError

from trainkit.cluster.bad_nodes import excluded, memory_file
from trainkit.cluster.discovery import query_cluster, query_qos
from trainkit.cluster.model import Account, Cluster, NodeKind, Partition, Qos
from trainkit.config.names import near, schema_words, show_value
from trainkit.config.running import SLURM_TIME, OneLine, ResourcesConfig
from trainkit.config.section import AtLeastOne, Section, list_field
from trainkit.config.yamlfile import Entry, read_yaml_file
from trainkit.errors import ConfigError, Problem, SlurmError
from trainkit.folders import config_folder
from trainkit.formats import JsonObject, memory_mib, time_limit_s
from trainkit.resources import shipped_configs
from trainkit.slurm.environment import cluster_name

if TYPE_CHECKING:
    from trainkit.config import LoadedConfig


FOLDER = "clusters"
KEY = "launch.cluster"


@dataclass(frozen=True)
class FoundProfile:
    """A profile, and why it was chosen."""

    path: Path
    shown: str
    """The file name to show in messages."""
    profile: ClusterProfile
    defaults: Entry | None
    """Its `defaults` section, the lowest layer of every run config."""
    reason: str


def user_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder that `trainkit init` writes profiles to."""
    return config_folder(environ) / FOLDER


def find_profile(
    loaded: LoadedConfig, environ: Mapping[str, str] = os.environ, cwd: Path | None = None
) -> FoundProfile | None:
    """Find the profile that a run uses; None if there is none.

    It is the profile that `launch.cluster` names, else the one of the ClusterName in slurm.conf. If
    slurm.conf gives no name, it is the only profile. Raises ConfigError if the named profile does not exist,
    if two profiles are of the same cluster, or if the profile is invalid.
    """
    cwd = Path.cwd() if cwd is None else cwd
    folders = [cwd / FOLDER, user_folder(environ)]
    named = loaded.config.launch.cluster
    if named is not None:
        return _found(_named(loaded, named, folders), cwd, f"launch.cluster is {named}")
    files = [sorted(folder.glob("*.yaml")) for folder in folders]
    if not any(files):
        return None
    name = cluster_name(environ)
    if name is None:
        if len(alone := [path for paths in files for path in paths]) > 1:
            return None
        return _found(alone[0], cwd, "it is the only profile, and slurm.conf gives no ClusterName")
    for paths in files:
        own = _own_profile(loaded, paths, name)
        if own is not None:
            return _found(own, cwd, f"ClusterName is {name} in slurm.conf")
    return None


def _named(loaded: LoadedConfig, name: str, folders: Sequence[Path]) -> Path:
    folders = [*folders, shipped_configs() / FOLDER]
    for folder in folders:
        if "/" not in name and (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    match = near(name, known)
    hint = f"did you mean {match}? " if match else ""
    hint += f"profiles: {', '.join(known)}; `trainkit init` writes the profile of the cluster it runs on"
    raise ConfigError([loaded.problem(KEY, f"is {name}, an unknown cluster profile", hint)])


def _own_profile(loaded: LoadedConfig, paths: Sequence[Path], name: str) -> Path | None:
    """The profile whose `name` is the cluster's, or None.

    Of several, the one whose file has that name; else raises ConfigError.
    """
    own = [path for path in paths if _name_in(path) == name]
    if len(own) > 1:
        same = [path for path in own if path.stem == name]
        if not same:
            names = " and ".join(path.stem for path in own)
            message = f"is not set, and {names} are both profiles of {name}"
            hint = f"choose one, such as --cluster {own[0].stem}"
            raise ConfigError([loaded.problem(KEY, message, hint)])
        own = same
    return own[0] if own else None


def _name_in(path: Path) -> str | None:
    """The `name` in a profile; if it cannot be read, the file's name, so that using it reports why."""
    try:
        found = read_yaml_file(path, str(path)).find(("name",))
    except ConfigError:
        return path.stem
    return str(found.value).lower() if found is not None else path.stem


def _found(path: Path, cwd: Path, reason: str) -> FoundProfile:
    shown = str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path)
    profile, defaults = _read(path, shown, path.stat().st_mtime_ns)
    return FoundProfile(path, shown, profile, defaults, f"{profile.name}: {shown}, because {reason}")


@lru_cache(maxsize=4)
def _read(path: Path, shown: str, mtime_ns: int) -> tuple[ClusterProfile, Entry | None]:
    return read_profile(path, shown)


def known_cluster(
    loaded: LoadedConfig,
    environ: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
    run: Path | None = None,
) -> Cluster:
    """The cluster of a config, from its profile or Slurm; sets `error` if Slurm does not answer.

    `run` is the folder of a run that starts again: its bad nodes include those on which a start of it failed.
    Raises ConfigError for a profile that is invalid or does not exist.
    """
    known = _profile_or_slurm(loaded, environ, cwd)
    name = known.name if known.partitions else cluster_name(environ) or known.name
    bad = excluded(name, environ=environ, run=None if run is None else str(run))
    hint = f"`rm {quote(str(memory_file(name, environ)))}` clears the list"
    return replace(known, bad_nodes=bad, forget_hint=hint) if bad else known


def _profile_or_slurm(loaded: LoadedConfig, environ: Mapping[str, str], cwd: Path | None) -> Cluster:
    found = find_profile(loaded, environ, cwd)
    if found is None:
        return _cluster_from_slurm(loaded, environ)
    hint = f"this is from {found.shown}; if it is out of date, delete it and run `trainkit init`"
    known = found.profile.to_cluster(found.reason, hint)
    if known.partitions:
        return known
    live = _cluster_from_slurm(loaded, environ)
    return replace(
        known,
        partitions=live.partitions,
        accounts=live.accounts if known.accounts is None else known.accounts,
        qos=live.qos if known.qos is None else known.qos,
        reason=f"{known.reason}; it lists no partitions, so Slurm was queried",
        error=live.error,
    )


def _cluster_from_slurm(loaded: LoadedConfig, environ: Mapping[str, str]) -> Cluster:
    """Query Slurm for the cluster; if Slurm does not answer, only `error` and `reason` are set."""
    resources = loaded.config.resources
    try:
        cluster = query_cluster(environ, with_accounts=bool(resources.account or resources.qos))
    except SlurmError as error:
        message = error.message.splitlines()[0]
        reason = f"unknown: Slurm did not answer, so no limits were checked ({message})"
        return Cluster("unknown", reason=reason, error=f"Slurm did not answer ({message})")
    reason = f"{cluster.name}: no profile found, so Slurm was queried (`trainkit init` writes a profile)"
    cluster = replace(cluster, reason=reason)
    if resources.qos is None or not _exceeds_a_partition(resources, cluster):
        return cluster
    # Only accounting knows whether the QOS overrides that limit. It is slow, so query it only if needed.
    qos = query_qos(environ)
    return cluster if qos is None else replace(cluster, qos=qos)


def _exceeds_a_partition(resources: ResourcesConfig, cluster: Cluster) -> bool:
    time_s = None if resources.time is None else time_limit_s(resources.time) or math.inf
    return any(
        (time_s is not None and item.max_time_s is not None and time_s > item.max_time_s)
        or (item.max_nodes is not None and resources.nodes + resources.spare_nodes > item.max_nodes)
        for item in cluster.requested_partitions(resources.partition)
    )


Time = Annotated[
    str,
    Field(
        pattern=SLURM_TIME,
        json_schema_extra={"allowed": 'a time in quotes, such as "01:00:00" or "2-12:00:00"'},
    ),
]
Memory = Annotated[
    str, Field(pattern=r"^\d+[KMGT]$", json_schema_extra={"allowed": 'an amount such as "64G"'})
]
Names = Annotated[tuple[OneLine, ...], Field(strict=False)]


class NodesProfile(Section):
    """Nodes of a partition with the same hardware and features."""

    count: AtLeastOne = Field(default=1, description="Number of nodes.")
    cpus: AtLeastOne | None = Field(default=None, description="CPUs per node that jobs can use.")
    memory: Memory | None = Field(default=None, description="Memory per node that jobs can use.")
    gpus: dict[str, AtLeastOne] | AtLeastOne = Field(
        default={},
        description="GPUs per node by type, or their number if the cluster does not name types.",
        json_schema_extra={"allowed": 'a number, or numbers by type such as "{h100: 8}"'},
    )
    features: tuple[OneLine, ...] = list_field((), "Features that resources.constraint can name.")


class PartitionProfile(Section):
    """A partition; null where there is no limit."""

    default: bool = Field(default=False, description="Whether jobs without a partition go here.")
    hidden: bool = Field(default=False, description="Whether Slurm lists it only with --all.")
    max_time: Time | None = Field(default=None, description="Longest time limit of a job.")
    default_time: Time | None = Field(default=None, description="Time limit of a job that requests none.")
    max_nodes: AtLeastOne | None = Field(default=None, description="Maximum number of nodes of a job.")
    max_cpus_per_node: AtLeastOne | None = Field(
        default=None, description="Maximum number of CPUs per node that its jobs may use."
    )
    accounts: Names | None = Field(default=None, description="Accounts that may use it; null for all.")
    denied_accounts: tuple[OneLine, ...] = list_field((), "Accounts that may not.")
    qos: Names | None = Field(default=None, description="QOS that it accepts; null for all.")
    denied_qos: tuple[OneLine, ...] = list_field((), "QOS that it rejects.")
    groups: Names | None = Field(default=None, description="Groups that may use it; null for all.")
    nodes: tuple[NodesProfile, ...] = list_field((), "Its nodes; leave this out when they are unknown.")


class AccountProfile(Section):
    """An account that you may charge."""

    default: bool = Field(default=False, description="Whether it is charged when a job names none.")
    partitions: Names | None = Field(default=None, description="Where it can be used; null for anywhere.")
    qos: Names | None = Field(default=None, description="QOS that it may use; null when unknown.")


class QosProfile(Section):
    """A quality of service."""

    max_time: Time | None = Field(default=None, description="Longest time limit of a job.")
    overrides: tuple[Literal["time", "nodes"], ...] = list_field(
        (), "Partition limits that do not apply to its jobs."
    )


class ClusterProfile(Section):
    """The cluster that configs are checked against, and the defaults of every run on it."""

    model_config = ConfigDict(title="trainkit cluster profile")

    profile_version: Literal[1] = Field(default=1, description="Version of the profile format.")
    name: OneLine = Field(description="ClusterName in its slurm.conf.")
    slurm_version: str | None = Field(
        default=None,
        pattern=r"^\d+\.\d+(\.\d+)?$",
        description="Version of Slurm.",
        json_schema_extra={"allowed": 'a version in quotes, such as "24.05.2"'},
    )
    gpu_option: Literal["gpus-per-node", "gres"] = Field(
        default="gpus-per-node", description="The sbatch option that requests GPUs."
    )
    containers: tuple[Literal["pyxis", "apptainer", "singularity", "enroot"], ...] = list_field(
        (), "Container runtimes that are installed."
    )
    modules: bool = Field(default=False, description="Whether environment modules are installed.")
    expedited_requeue: bool | None = Field(
        default=None,
        description="Whether jobs use sbatch --requeue=expedite (Slurm 25.11 and later).",
    )
    accounts: dict[str, AccountProfile | None] | None = Field(
        default=None, description="Accounts that you may charge; null to not check accounts."
    )
    qos: dict[str, QosProfile | None] | None = Field(
        default=None, description="Qualities of service; null to not check them."
    )
    partitions: dict[str, PartitionProfile | None] | None = Field(
        default=None, description="Its partitions; null queries Slurm each time."
    )
    defaults: dict[str, JsonValue] | None = Field(
        default=None,
        description="Run config keys for every run on this cluster; your own configs override them.",
        json_schema_extra={"allowed": "keys of a run config"},
    )

    def to_cluster(self, reason: str = "", out_of_date_hint: str = "") -> Cluster:
        """The profile as a `Cluster`."""
        accounts, qos = self.accounts, self.qos
        return Cluster(
            name=self.name,
            partitions=tuple(_partition(name, item) for name, item in (self.partitions or {}).items()),
            gpu_option=self.gpu_option,
            accounts=None if accounts is None else tuple(_account(name, accounts[name]) for name in accounts),
            qos=None if qos is None else tuple(_qos(name, qos[name]) for name in qos),
            slurm_version=tuple(map(int, (self.slurm_version or "").split(".")))
            if self.slurm_version
            else (),
            containers=self.containers,
            has_modules=self.modules,
            expedited_requeue=self.expedited_requeue,
            reason=reason,
            out_of_date_hint=out_of_date_hint,
        )


def _partition(name: str, profile: PartitionProfile | None) -> Partition:
    item = profile or PartitionProfile()
    return Partition(
        name=name,
        is_default=item.default,
        is_hidden=item.hidden,
        max_time_s=None if item.max_time is None else time_limit_s(item.max_time),
        default_time_s=None if item.default_time is None else time_limit_s(item.default_time),
        max_nodes=item.max_nodes,
        max_cpus_per_node=item.max_cpus_per_node,
        nodes=tuple(_kind(kind) for kind in item.nodes),
        allowed_accounts=item.accounts,
        denied_accounts=item.denied_accounts,
        allowed_qos=item.qos,
        denied_qos=item.denied_qos,
        allowed_groups=item.groups,
    )


def _kind(profile: NodesProfile) -> NodeKind:
    memory = None if profile.memory is None else memory_mib(profile.memory)
    gpus = {"": profile.gpus} if isinstance(profile.gpus, int) else profile.gpus
    return NodeKind(
        profile.count, profile.cpus, None if memory is None else int(memory), gpus, profile.features
    )


def _account(name: str, profile: AccountProfile | None) -> Account:
    item = profile or AccountProfile()
    return Account(name, item.default, item.partitions, item.qos)


def _qos(name: str, profile: QosProfile | None) -> Qos:
    item = profile or QosProfile()
    return Qos(name, None if item.max_time is None else time_limit_s(item.max_time), item.overrides)


def read_profile(path: Path, shown: str) -> tuple[ClusterProfile, Entry | None]:
    """Read a profile and its `defaults` section; `shown` is the file's name in messages.

    Raises ConfigError with every problem.
    """
    entry = read_yaml_file(path, shown)
    try:
        profile = ClusterProfile.model_validate(entry.plain())
    except ValidationError as error:
        raise ConfigError(_problems(error, entry)) from None
    defaults = entry.find(("defaults",))
    return profile, defaults if defaults is not None and defaults.is_mapping else None


def _problems(error: ValidationError, entry: Entry) -> list[Problem]:
    found: dict[str, Problem] = {}
    for item in error.errors(include_url=False, include_context=False):
        path, value = _within(entry.plain(), item["loc"])
        origin = _origin(entry, path)
        key = ".".join(map(str, path))
        if item["type"] == "missing":
            key = ".".join(map(str, item["loc"]))
            problem = Problem(key, "is missing", entry.origin, "ClusterName in slurm.conf")
        elif item["type"] == "extra_forbidden":
            match = near(str(path[-1]), _inner(_schema_at(path[:-1])).get("properties", {}))
            hint = f"did you mean {match}?" if match else ""
            problem = Problem(key, "unknown key", origin, hint)
        else:
            message = f"must be {schema_words(_schema_at(path))}, not {show_value(value)}"
            problem = Problem(key, message, origin)
        found.setdefault(key, problem)
    return sorted(found.values(), key=lambda problem: int(problem.origin.rpartition(":")[2] or 0))


def _origin(entry: Entry, path: tuple[int | str, ...]) -> str:
    """The file and line of a path, or of the closest parent: list items have the list's line."""
    for end in range(len(path), 0, -1):
        place = entry.find(tuple(map(str, path[:end])))
        if place is not None:
            return place.origin
    return entry.origin


def _within(value: Any, location: tuple[int | str, ...]) -> tuple[tuple[int | str, ...], Any]:
    """The part of pydantic's location that is a path in `value`, and the value at that path.

    The remaining parts of the location name union members.
    """
    path: list[int | str] = []
    for part in location:
        is_key = isinstance(value, dict) and part in value
        is_index = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if not (is_key or is_index):
            break
        value = value[part]
        path.append(part)
    return tuple(path), value


@cache
def _schema() -> JsonObject:
    return ClusterProfile.model_json_schema()


def _schema_at(path: tuple[int | str, ...]) -> JsonObject:
    """The JSON schema at a path."""
    schema = _schema()
    for part in path:
        schema = _inner(schema)
        if isinstance(part, int):
            schema = schema["items"]
        else:
            schema = schema.get("properties", {}).get(part) or schema.get("additionalProperties") or {}
    return schema if "anyOf" in schema else _inner(schema)


def _inner(schema: JsonObject) -> JsonObject:
    """The section, mapping or list among the options of a schema; else the schema itself."""
    for option in schema.get("anyOf", [schema]):
        if "$ref" in option:
            option = _schema()["$defs"][option["$ref"].rpartition("/")[2]]
        if option.get("type") in ("object", "array"):
            return dict(option)
    return schema
