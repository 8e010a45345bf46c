"""Finds a config's cluster in a profile or through Slurm, and defines the profile format.

A profile is a file `clusters/NAME.yaml` in the current folder or the user's config folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field, JsonValue, PlainValidator, ValidationError

from trainkit.cluster.bad_nodes import excluded, memory_file
from trainkit.cluster.discovery import query_cluster, query_cluster_names, query_qos
from trainkit.cluster.limits import ResourceRequest, listed
from trainkit.cluster.min_poll import FOLDER
from trainkit.cluster.model import Account, Cluster, NodeKind, Partition, PartitionLimit, Qos
from trainkit.config.running import SLURM_TIME, OneLine
from trainkit.config.schema import show_value
from trainkit.config.section import AtLeastOne, Section
from trainkit.config.yamlfile import Entry, read_yaml_file
from trainkit.errors import ConfigError, Problem, SlurmError
from trainkit.folders import config_folder, shipped_configs, user_groups
from trainkit.formats import MEMORY, did_you_mean, memory_mib, time_limit_s
from trainkit.slurm.client import SlurmRefused
from trainkit.slurm.environment import cluster_name, other_cluster, scrubbed

if TYPE_CHECKING:
    from trainkit.config import LoadedConfig


KEY = "launch.cluster"
CLUSTERS = "resources.clusters"


@dataclass(frozen=True)
class FoundProfile:
    """A profile, and the reason why it was chosen for a config."""

    path: Path
    shown: str
    """The profile's file name for messages."""
    profile: ClusterProfile
    defaults: Entry | None
    """The profile's `defaults` section, which every other layer of a run config overrides."""
    reason: str


def user_folder() -> Path:
    """Return the folder to which `trainkit init` writes profiles."""
    return config_folder() / FOLDER


def find_profile(loaded: LoadedConfig) -> FoundProfile | None:
    """Return the profile that a run uses, or None if there is none.

    The profile is selected by `launch.cluster`, or else by the first cluster in `resources.clusters`, or else
    by the ClusterName in slurm.conf. If slurm.conf contains no ClusterName and there is only one profile,
    that profile is used. Raises ConfigError if the selected profile does not exist or is invalid, or if two
    profiles describe the same cluster.
    """
    folders = [Path.cwd() / FOLDER, user_folder()]
    named = loaded.config.launch.cluster
    if named is not None:
        return _found(_named(loaded, named, folders), f"launch.cluster is {named}")
    files = [sorted(folder.glob("*.yaml")) for folder in folders]
    if not any(files):
        return None
    first = _first_cluster(loaded)
    name = first or cluster_name()
    if name is None:
        if len(alone := [path for paths in files for path in paths]) > 1:
            return None
        return _found(alone[0], "no other profile exists, and slurm.conf contains no ClusterName")
    for paths in files:
        # If several profiles have this cluster name, prefer the one whose file name is the cluster name.
        own = [path for path in sorted(paths, key=lambda path: path.stem != name) if _name_in(path) == name]
        if len(own) > 1 and own[0].stem != name:
            message = f"is not set, and {' and '.join(path.stem for path in own)} are both profiles of {name}"
            raise ConfigError(
                [loaded.problem(KEY, message, f"choose a profile, for example with --cluster {own[0].stem}")]
            )
        if own:
            of_here = f"ClusterName is {name} in slurm.conf"
            return _found(own[0], of_here if first is None else f"resources.clusters begins with {name}")
    return None


def _named(loaded: LoadedConfig, name: str, folders: Sequence[Path]) -> Path:
    folders = [*folders, shipped_configs() / FOLDER]
    for folder in folders:
        if "/" not in name and (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    if name == "local":
        message = "is local, an unknown cluster profile"
        raise ConfigError([loaded.problem(KEY, message, "--backend local runs on this machine")])
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    hint = f"{did_you_mean(name, known)}profiles: {', '.join(known)}; "
    hint += "run `trainkit init` on the cluster to write a profile of the cluster"
    if name == "local":
        hint = "launch.backend: local (--backend local) starts the run on this machine"
    raise ConfigError([loaded.problem(KEY, f"is {name}, an unknown cluster profile", hint)])


def _name_in(path: Path) -> str | None:
    """Return the `name` in a profile, or the profile's file name if the profile cannot be read.

    The read error is reported when the profile is loaded.
    """
    try:
        found = read_yaml_file(path, str(path)).find(("name",))
    except ConfigError:
        return path.stem
    return str(found.value).lower() if found is not None else path.stem


def _found(path: Path, reason: str) -> FoundProfile:
    cwd = Path.cwd()
    shown = str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path)
    profile, defaults = _read(path, shown, path.stat().st_mtime_ns)
    return FoundProfile(path, shown, profile, defaults, f"{profile.name}: {shown}, because {reason}")


@lru_cache(maxsize=4)
def _read(path: Path, shown: str, mtime_ns: int) -> tuple[ClusterProfile, Entry | None]:
    return read_profile(path, shown)


def known_cluster(loaded: LoadedConfig, run: Path | None = None) -> Cluster:
    """Return a config's cluster from its profile or Slurm; set `error` if Slurm does not answer.

    If `run`, the folder of a run that is being restarted, is given, the bad nodes include hosts where a start
    of this run failed. Raises ConfigError if the profile is invalid or does not exist, or if the cluster is
    unknown.
    """
    if loaded.config.resources.clusters:
        _check_clusters(loaded)
    known = _profile_or_slurm(loaded)
    name = known.name if known.partitions else _first_cluster(loaded) or cluster_name() or known.name
    bad = excluded(name, run=None if run is None else str(run))
    if len(loaded.config.resources.clusters) > 1:
        bad = {}  # Other clusters would reject a job that excludes hosts of the first cluster.
    hint = f"`rm {quote(str(memory_file(name)))}` clears the list"
    return replace(known, bad_nodes=bad, forget_hint=hint) if bad else known


def _first_cluster(loaded: LoadedConfig) -> str | None:
    """Return the cluster for which a run is planned, or None if the config lists no clusters."""
    return next(iter(loaded.config.resources.clusters), None)


def _check_clusters(loaded: LoadedConfig) -> None:
    """Raise ConfigError unless Slurm commands can address all clusters in `resources.clusters`.

    The check is needed because sbatch silently ignores unknown names in a list of clusters.
    """
    try:
        known = query_cluster_names()
    except SlurmRefused as error:
        message = (
            f"needs Slurm's accounting, which tells commands how to reach other clusters: {error.message}"
        )
        raise ConfigError([loaded.problem(CLUSTERS, message, "remove it")]) from None
    unknown = [name for name in loaded.config.resources.clusters if name not in known]
    if unknown:
        hint = f"{did_you_mean(unknown[0], known)}clusters: {', '.join(known)}"
        message = f"contains {listed(unknown)}, which Slurm's accounting does not know"
        raise ConfigError([loaded.problem(CLUSTERS, message, hint)])
    if "," in (named := scrubbed(os.environ).get("SLURM_CLUSTERS", "")):
        message = f"cannot be used while the environment names several clusters: {named}"
        raise ConfigError([loaded.problem(CLUSTERS, message, "unset SLURM_CLUSTERS SBATCH_CLUSTERS")])
    if cluster_name() is None:
        message = "cannot be used on this machine, because no slurm.conf contains the name of this cluster"
        raise ConfigError([loaded.problem(CLUSTERS, message, "export SLURM_CONF")])


def _profile_or_slurm(loaded: LoadedConfig) -> Cluster:
    found = find_profile(loaded)
    if found is None:
        return _cluster_from_slurm(loaded)
    hint = (
        f"this information is from {found.shown}; if the file is out of date, delete the file and run "
        "`trainkit init`"
    )
    known = found.profile.to_cluster(found.reason, hint)
    if known.partitions:
        return known
    live = _cluster_from_slurm(loaded)
    return replace(
        known,
        partitions=live.partitions,
        accounts=live.accounts if known.accounts is None else known.accounts,
        qos=live.qos if known.qos is None else known.qos,
        reason=f"{known.reason}; the profile lists no partitions, so Slurm was queried",
        error=live.error,
    )


def _cluster_from_slurm(loaded: LoadedConfig) -> Cluster:
    """Query Slurm for the cluster; if Slurm does not answer, return only an `error` and a `reason`."""
    resources = loaded.config.resources
    try:
        name = other_cluster(_first_cluster(loaded)) or ""
        cluster = query_cluster(name, with_accounts=bool(resources.account or resources.qos))
    except SlurmError as error:
        message = error.message.splitlines()[0]
        reason = f"unknown: Slurm did not answer, so no limits were checked ({message})"
        return Cluster("unknown", reason=reason, error=f"Slurm did not answer ({message})")
    reason = f"{cluster.name}: no profile found, so Slurm was queried (`trainkit init` writes a profile)"
    cluster = replace(cluster, reason=reason)
    request = ResourceRequest.of(resources, cluster)
    if resources.qos is None or not any(map(request.exceeds, request.partitions)):
        return cluster
    # Only the accounting database knows whether the QOS overrides the limit that the job exceeds. The
    # accounting database is slow, so query it only if needed.
    qos = query_qos()
    return cluster if qos is None else replace(cluster, qos=qos)


def _parsed(pattern: str, example: str, parse: Callable[[str], object]) -> PlainValidator:
    def validate(value: object) -> object:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise ValueError(f"should be text such as {example}")
        return parse(value)

    return PlainValidator(validate)


Time = Annotated[str, _parsed(SLURM_TIME, '"01:00:00" or "2-12:00:00"', time_limit_s)]
Memory = Annotated[str, _parsed(MEMORY, '"64G"', lambda text: memory_mib(text) or 0)]
Version = Annotated[
    str, _parsed(r"\d+\.\d+(\.\d+)?", '"24.05.2"', lambda text: tuple(map(int, text.split("."))))
]
Names = Annotated[tuple[OneLine, ...], Field(strict=False)]
GpuCounts = Annotated[
    dict[str, AtLeastOne], BeforeValidator(lambda found: {"": found} if type(found) is int else found)
]


class NodesProfile(Section):
    """A `NodeKind` in a profile. `gpus` is a plain number if the cluster does not name its GPU types."""

    count: AtLeastOne = 1
    cpus: AtLeastOne | None = None
    mem_mib: Memory | None = Field(default=None, alias="memory")
    gpus: GpuCounts = Field(default={})
    features: Names = ()


class PartitionProfile(Section):
    """A `Partition` in a profile; null means that there is no limit."""

    is_default: bool = Field(default=False, alias="default")
    is_hidden: bool = Field(default=False, alias="hidden")
    is_exclusive: bool = Field(default=False, alias="exclusive")
    max_time_s: Time | None = Field(default=None, alias="max_time")
    default_time_s: Time | None = Field(default=None, alias="default_time")
    min_nodes: AtLeastOne | None = None
    max_nodes: AtLeastOne | None = None
    max_cpus_per_node: AtLeastOne | None = None
    max_mem_mib: Memory | None = Field(default=None, alias="max_memory_per_node")
    max_mem_per_cpu_mib: Memory | None = Field(default=None, alias="max_memory_per_cpu")
    allowed_qos: Names | None = Field(default=None, alias="qos")
    denied_qos: Names = ()
    allowed_accounts: Names | None = Field(default=None, alias="accounts")
    denied_accounts: Names = ()
    allowed_groups: Names | None = Field(default=None, alias="groups")
    needs_reservation: bool = False
    nodes: Annotated[tuple[NodesProfile, ...], Field(strict=False)] = ()


class AccountProfile(Section):
    """An `Account` in a profile."""

    is_default: bool = Field(default=False, alias="default")
    partitions: Names | None = None
    qos: Names | None = None
    parents: Names | None = None


class QosProfile(Section):
    """A `Qos` in a profile."""

    max_time_s: Time | None = Field(default=None, alias="max_time")
    overrides: Annotated[tuple[PartitionLimit, ...], Field(strict=False)] = ()


class ClusterProfile(Section):
    """A `Cluster` against which configs are checked, and default config values for runs on that cluster.

    A key in the file is the alias of its field or, without an alias, the field's name. A null or missing
    value means unknown.
    """

    profile_version: Literal[1] = 1
    name: OneLine
    slurm_version: Version | None = None
    gpu_option: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    containers: Annotated[
        tuple[Literal["pyxis", "apptainer", "singularity", "enroot"], ...], Field(strict=False)
    ] = ()
    has_modules: bool = Field(default=False, alias="modules")
    expedited_requeue: bool | None = None
    min_poll_s: Annotated[float, Field(ge=0)] | None = None
    """Minimum seconds between two queries about the jobs of a user; read by `trainkit.cluster.min_poll`."""
    accounts: dict[str, AccountProfile | None] | None = None
    qos: dict[str, QosProfile | None] | None = None
    partitions: dict[str, PartitionProfile | None] | None = None
    defaults: dict[str, JsonValue] | None = None
    """Default config values for every run on this cluster; the user's own configs override them."""

    def to_cluster(self, reason: str = "", out_of_date_hint: str = "") -> Cluster:
        values = dict(self)
        del values["profile_version"], values["defaults"], values["min_poll_s"]
        values["slurm_version"] = self.slurm_version or ()
        values["partitions"] = tuple(
            Partition(name, **{**dict(item), "nodes": tuple(NodeKind(**dict(kind)) for kind in item.nodes)})
            for name, value in (self.partitions or {}).items()
            for item in [value or PartitionProfile()]
        )
        for key, kind in (("accounts", Account), ("qos", Qos)):
            if values[key] is not None:
                values[key] = tuple(kind(name, **dict(item or ())) for name, item in values[key].items())
        return Cluster(**values, groups=user_groups(), reason=reason, out_of_date_hint=out_of_date_hint)


def read_profile(path: Path, shown: str) -> tuple[ClusterProfile, Entry | None]:
    """Read a profile and its `defaults` section. `shown` is the file name for messages.

    Raises a ConfigError that lists every problem.
    """
    entry = read_yaml_file(path, shown)
    try:
        profile = ClusterProfile.model_validate(entry.plain())
    except ValidationError as error:
        raise ConfigError(_problems(error, entry)) from None
    defaults = entry.find(("defaults",))
    return profile, defaults if defaults is not None and defaults.is_mapping else None


def _problems(error: ValidationError, entry: Entry) -> list[Problem]:
    """Return one problem per key, in file order. Problems in a list item have the list's line number."""
    found: dict[str, Problem] = {}
    for item in error.errors(include_url=False, include_context=False):
        path = tuple(map(str, item["loc"]))
        ends = range(len(path), -1, -1)
        origin = next(place.origin for end in ends if (place := entry.find(path[:end])) is not None)
        text = re.sub(r"^(Value error, |Input )| or instance of \w+", "", item["msg"])
        text = text.replace("valid tuple", "list").replace("valid dictionary", "mapping")
        key, message, hint = ".".join(filter(None, path)), f"{text}, not {show_value(item['input'])}", ""
        if item["type"] == "missing":
            message, hint = "is missing", "ClusterName in slurm.conf"
        elif item["type"] == "extra_forbidden":
            message, hint = "unknown key", did_you_mean(path[-1], _KEYS).rstrip()
        found.setdefault(key, Problem(key, message, origin, hint))
    return sorted(found.values(), key=lambda problem: int(problem.origin.rpartition(":")[2] or 0))


_KEYS = {
    info.alias or name
    for section in (ClusterProfile, PartitionProfile, NodesProfile, AccountProfile, QosProfile)
    for name, info in section.model_fields.items()
}
