"""What is known of a cluster by other processes: a JSON file a cluster, in a folder of the machine."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools.slurm_cluster.processes import Pid

REGISTRY = Path("/run/trainkit-cluster")
"""Outside of the clusters' folders: a cluster whose folder was deleted can still be torn down."""
MAX_NUMBER = 99
STATE_LINK = "cluster.json"
"""In a cluster's folder: a link to its file in the registry."""


@dataclass
class State:
    """A cluster as it was last seen, and every process that was started for it."""

    number: int
    folder: str
    machine: str
    boot_id: str
    accounting: bool
    num_hosts: int
    port: int
    up_s: float = 0
    owner: Pid | None = None
    options: dict[str, str] = field(default_factory=dict)
    processes: dict[str, Pid] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the bridge, the hosts and Slurm's cluster are called."""
        return f"tk{self.number}"

    @property
    def path(self) -> Path:
        return Path(self.folder)

    @property
    def file(self) -> Path:
        return REGISTRY / f"{self.number}.json"

    @property
    def abandoned(self) -> bool:
        """Whether nobody will take it away: its owner is dead, or the machine was restarted."""
        return self.boot_id != boot_id() or (self.owner is not None and not self.owner.alive())

    def host(self, index: int) -> str:
        """The name of a host; they are counted from 1. Raises ValueError when there is none."""
        if index not in self.hosts():
            raise ValueError(f"there is no host {index}, they are 1 to {self.num_hosts}")
        return f"{self.name}-node{index}"

    def address(self, index: int) -> str:
        """The address of a host; 254 is the machine itself."""
        return f"10.213.{self.number}.{index}"

    def hosts(self) -> range:
        return range(1, self.num_hosts + 1)

    def save(self) -> None:
        """Write the file, in one piece; called before and after every process that is started."""
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(asdict(self), indent=2) + "\n")
        os.replace(new, self.file)

    @classmethod
    def load(cls, file: Path) -> State:
        data = json.loads(file.read_text())
        data["owner"] = Pid(**data["owner"]) if data["owner"] else None
        data["processes"] = {name: Pid(**pid) for name, pid in data["processes"].items()}
        return cls(**data)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def all_states() -> list[State]:
    """Every cluster of this machine, in the order of their numbers."""
    files = sorted(REGISTRY.glob("[0-9]*.json"), key=lambda file: int(file.stem))
    return [State.load(file) for file in files]


@contextmanager
def registry_lock(name: str = "lock") -> Iterator[None]:
    """One process at a time: takes a number or edits /etc/hosts; with a name of its own, other things."""
    REGISTRY.mkdir(exist_ok=True)
    with (REGISTRY / name).open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
