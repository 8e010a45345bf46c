"""Stores the state of each cluster in a JSON file that all processes share."""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from tools.slurm_cluster.processes import Pid

REGISTRY = Path("/run/trainkit-cluster")
"""Folder with the state files, outside the folders of the clusters, so that a cluster whose folder was
deleted can still be removed."""
MAX_NUMBER = 99
STATE_LINK = "cluster.json"
"""Name of the symlink in a cluster's folder that points to the cluster's file in the registry."""


@dataclass
class State:
    """The configuration of a cluster, and all processes that were started for it."""

    number: int
    folder: str
    machine: str
    boot_id: str
    accounting: bool
    num_hosts: int
    port: int
    slurm: str = ""
    """Folder of a Slurm version that is not the installed one; empty for the installed version."""
    cgroups: bool = False
    accounting_of: str = ""
    """Folder of another cluster whose slurmdbd and munge also serve this cluster; empty if there is none."""
    up_s: float = 0
    owner: Pid | None = None
    options: dict[str, str] = field(default_factory=dict)
    processes: dict[str, Pid] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the bridge and of the Slurm cluster, and the prefix of the host names."""
        return f"tk{self.number}"

    @property
    def path(self) -> Path:
        return Path(self.folder)

    @property
    def file(self) -> Path:
        return REGISTRY / f"{self.number}.json"

    @property
    def abandoned(self) -> bool:
        """Return whether the owner is dead or the machine was rebooted, so that no process will remove the
        cluster."""
        return self.boot_id != boot_id() or (self.owner is not None and not self.owner.alive())

    def host(self, index: int) -> str:
        """Return the name of a host, numbered from 1; raise ValueError if there is no such host."""
        if index not in self.hosts():
            raise ValueError(f"there is no host {index}; hosts are 1 to {self.num_hosts}")
        return f"{self.name}-node{index}"

    def address(self, index: int) -> str:
        """Return the IP address of a host; `network.MACHINE_INDEX` gives the address of this machine."""
        return str(network_of(self.number)[index])

    def hosts(self) -> range:
        return range(1, self.num_hosts + 1)

    def save(self) -> None:
        """Write the state file atomically; called whenever a process is started or stopped."""
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(asdict(self), indent=2) + "\n")
        os.replace(new, self.file)

    @classmethod
    def load(cls, file: Path) -> State:
        data = json.loads(file.read_text())
        data["owner"] = Pid(**data["owner"]) if data["owner"] else None
        data["processes"] = {name: Pid(**pid) for name, pid in data["processes"].items()}
        # Another checkout of this code may have started the cluster and stored additional fields.
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})


def network_of(number: int) -> ipaddress.IPv4Network:
    """Return the network of the cluster with this number, which has addresses for 1,021 hosts."""
    return ipaddress.IPv4Network((int(ipaddress.IPv4Address("10.214.0.0")) + 1024 * number, 22))


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def all_states() -> list[State]:
    """Return the states of all clusters on this machine, by number."""
    files = sorted(REGISTRY.glob("[0-9]*.json"), key=lambda file: int(file.stem))
    return [State.load(file) for file in files]


@contextmanager
def registry_lock(name: str = "lock") -> Iterator[None]:
    """Hold a machine-wide lock; the default lock protects cluster numbers and /etc/hosts."""
    REGISTRY.mkdir(exist_ok=True)
    with (REGISTRY / name).open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
