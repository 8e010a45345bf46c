"""The rank of another launcher, such as torchrun or mpirun on several hosts without Slurm."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote

from trainkit.errors import UsageError
from trainkit.job.rank_env import RUN_DIR_VARIABLE

LAUNCHERS = {
    "torchrun": ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    "mpirun": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")),
}
"""Launcher -> its variables for the rank, the local rank and how many there are of both."""


@dataclass(frozen=True)
class LaunchedRank:
    """One rank of another launcher, which numbers them host by host."""

    launcher: str
    task: int
    """The rank, as that of a task in a Slurm step."""
    local_task: int
    tasks: tuple[int, ...]
    """Number of ranks on each host."""
    master_addr: str
    """A host that all ranks reach, often that of rank 0."""
    master_port: int

    @property
    def node_rank(self) -> int:
        return self.task // self.tasks[0]

    @property
    def num_tasks(self) -> int:
        return sum(self.tasks)

    @property
    def num_nodes(self) -> int:
        return len(self.tasks)

    @property
    def first(self) -> str:
        """The rank that announces the run, in words."""
        return f"rank 0 of {self.launcher} at {self.master_addr}:{self.master_port}"

    @property
    def key(self) -> str:
        """A string that identifies the ranks that are started together."""
        return f"{quote(self.master_addr, safe='')}.{self.master_port}"


def find_launched_rank(environ: Mapping[str, str] = os.environ) -> LaunchedRank | None:
    """The rank of another launcher that this process is; None if it is not one of several.

    A process that a rank of trainkit has started is none. Raises UsageError if the ranks are not numbered
    host by host, or not as many on each.
    """
    if RUN_DIR_VARIABLE in environ:
        return None
    for launcher, names in LAUNCHERS.items():
        given = [environ.get(name, "") for name in (*names, "MASTER_PORT")]
        if all(map(str.isdigit, given)) and "MASTER_ADDR" in environ:
            rank, local_rank, size, local_size, port = map(int, given)
            if size == 1:
                continue
            if not rank < size or local_size < 1 or size % local_size or rank % local_size != local_rank:
                raise UsageError(
                    " ".join(f"{name}={environ[name]}" for name in names)
                    + ": the ranks are not numbered host by host, or not as many on each",
                    hint="torchrun needs the same --nproc-per-node on every host, mpirun --map-by ppr:N:node",
                )
            tasks = (local_size,) * (size // local_size)
            return LaunchedRank(launcher, rank, local_rank, tasks, environ["MASTER_ADDR"], port)
    return None
